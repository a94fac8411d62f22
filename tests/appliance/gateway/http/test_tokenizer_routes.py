"""/tokenize, /detokenize and /version over a real socket: vLLM's shapes, and a clear error for every mistake."""

from __future__ import annotations

import json
from array import array
from typing import Any

import httpx
import pytest

from appliance.common.errors import FeatureNotAllowedError
from appliance.common.version import VERSION
from appliance.gateway.generate_request import ChatPrompt, TextPrompt, TokenizerOperation, TokenPrompt
from appliance.gateway.http.tokenizer_routes import IDS_AT_ONCE
from tests.appliance.gateway.front.support import MODEL, Running

MESSAGES = [{"role": "user", "content": "hi"}]


async def post(running: Running, path: str, **body: Any) -> httpx.Response:
    """The answer to a tenant's request."""
    async with httpx.AsyncClient(base_url=running.base_url, headers=running.authorization) as client:
        return await client.post(path, content=json.dumps({"model": MODEL, **body}))


async def test_a_text_becomes_ids_and_ids_become_text(running: Running) -> None:
    """Ids and their number come as vLLM gives them, in pieces that make one document, and back again."""
    text = "hello " * IDS_AT_ONCE
    answer = await post(running, "/tokenize", prompt=text)
    assert answer.json() == {
        "count": len(text),
        "max_model_len": 4096,
        "tokens": list(map(ord, text)),
        "token_strs": None,
    }
    assert {"x-request-id", "x-ratelimit-limit-requests"} <= set(answer.headers)
    back = await post(running, "/detokenize", tokens=answer.json()["tokens"])
    assert back.json() == {"prompt": text}
    first, second = running.service.tokenizer_requests
    assert (first.operation, first.prompt) == (TokenizerOperation.TOKENIZE, TextPrompt(text))
    assert (second.operation, second.prompt) == (TokenizerOperation.DETOKENIZE, TokenPrompt(array("I", map(ord, text))))
    assert [one.route for one in running.service.contexts] == ["POST /tokenize", "POST /detokenize"]


async def test_messages_are_laid_out_as_in_chat(running: Running) -> None:
    """A conversation reaches the tokenizer as /v1/chat/completions would send it; names without effect are told."""
    answer = await post(running, "/tokenize", messages=MESSAGES, temperature=1, add_special_tokens=False)
    assert answer.status_code == 200
    assert answer.headers["x-athanor-ignored"] == "temperature"
    await post(running, "/v1/chat/completions", messages=MESSAGES)
    (asked,) = running.service.tokenizer_requests
    assert isinstance(asked.prompt, ChatPrompt) and asked.prompt == running.service.requests[0].prompt


@pytest.mark.parametrize(("given", "framed"), [({}, True), ({"add_special_tokens": True}, True)])
async def test_special_tokens_are_added_unless_refused(running: Running, given: dict[str, Any], framed: bool) -> None:
    """A prompt is counted with the tokenizer's own special tokens; control: without them where that is asked for."""
    await post(running, "/tokenize", prompt="a", **given)
    await post(running, "/tokenize", prompt="a", add_special_tokens=False)
    assert [one.prompt.framed for one in running.service.tokenizer_requests] == [framed, False]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": [1, 2]}, "prompt"),
        ("/tokenize", {"prompt": ["a", "b"]}, "prompt"),
        ("/tokenize", {"prompt": 7}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ("/tokenize", {"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
        ("/tokenize", {"prompt": "x", "tools": [{"type": "function"}]}, "tools"),
        ("/tokenize", {"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools[0].function"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "return_token_strs": True}, "return_token_strs"),
        ("/tokenize", {"prompt": "a", "model": ""}, "model"),
        ("/tokenize", {"prompt": "a", "model": None}, "model"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": []}, "tokens"),
        ("/detokenize", {"tokens": "1"}, "tokens"),
        ("/detokenize", {"tokens": [1, True]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1 << 31]}, "tokens"),
    ],
)
async def test_a_mistake_is_named(running: Running, path: str, body: dict[str, Any], param: str) -> None:
    """A 400 with the field, before anything is asked of a tokenizer."""
    answer = await post(running, path, **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert not running.service.tokenizer_requests


async def test_a_refusal_of_the_policy_reaches_the_caller(running: Running) -> None:
    """What the session raises is the answer."""
    running.service.script = [FeatureNotAllowedError("this tenant may not use the tokenizer alone")]
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        answer = await post(running, path, **body)
        assert answer.status_code == 403 and "tokenizer" in answer.json()["error"]["message"]


async def test_the_version_is_told_to_tenants(running: Running) -> None:
    """With a key the version; without one nothing, as everywhere."""
    async with httpx.AsyncClient(base_url=running.base_url) as client:
        assert (await client.get("/version", headers=running.authorization)).json() == {"version": VERSION}
        assert (await client.get("/version")).status_code == 401
        assert (await client.post("/tokenize", json={"model": MODEL, "prompt": "a"})).status_code == 401


async def test_a_path_under_v1_is_corrected(running: Running) -> None:
    """Clients whose base URL ends with /v1 are told where the route is."""
    answer = await post(running, "/v1/tokenize", prompt="a")
    assert answer.status_code == 404 and "take /tokenize" in answer.json()["error"]["message"]
