"""Answers to requests for routes, over real sockets: every API names the model that served, and passes the alias on."""

from __future__ import annotations

import json

import grpc
import httpx
import pytest

from appliance.gateway.front.request_builder import MAX_CACHE_KEY_CHARS
from appliance.gateway.grpc.generated import inference_pb2 as pb
from appliance.gateway.grpc.generated.inference_pb2_grpc import InferenceServiceStub
from tests.appliance.gateway.front.support import MODEL, Running

MESSAGES = [{"role": "user", "content": "hi"}]
BODIES = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 5},
}


@pytest.fixture
def routed(running: Running) -> Running:
    """A service whose route ``fast`` leads to its model."""
    running.service.routes = {"fast": MODEL}
    return running


async def send(running: Running, path: str, body: dict[str, object]) -> httpx.Response:
    """Post one body."""
    async with httpx.AsyncClient(base_url=running.base_url, headers=running.authorization) as client:
        return await client.post(path, json=body)


def named(text: str) -> set[str]:
    """Each model that an answer names, whole or in events."""
    events = [line[6:] for line in text.splitlines() if line.startswith("data: {")] or [text]
    found = set()
    for event in map(json.loads, events):
        for part in (event, event.get("message"), event.get("response")):
            if isinstance(part, dict) and "model" in part:
                found.add(part["model"])
    return found


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_names_the_model_that_served(routed: Running, path: str, stream: bool) -> None:
    """Whole and streamed; asked for by its own name (control) it is the same."""
    for name, alias in (("fast", "fast"), (MODEL, "")):
        answer = await send(routed, path, {"model": name, "stream": stream, **BODIES[path]})
        assert answer.status_code == 200
        assert named(answer.text) == {MODEL}
        asked = routed.service.requests[-1]
        assert (asked.model, asked.alias) == (MODEL, alias)


async def test_several_prompts_are_answered_by_one_model(routed: Running) -> None:
    """One object names one model, so one choice is made for all prompts."""
    answer = await send(routed, "/v1/completions", {"model": "fast", "prompt": ["a", "b", "c"]})
    assert named(answer.text) == {MODEL}
    assert {(one.model, one.alias) for one in routed.service.requests} == {(MODEL, "fast")}
    assert len(routed.service.requests) == 3


async def test_vectors_name_the_model_that_made_them(routed: Running) -> None:
    """As answers in text do."""
    answer = await send(routed, "/v1/embeddings", {"model": "fast", "input": "x"})
    assert answer.json()["model"] == MODEL
    assert routed.service.embeds[-1].alias == "fast"


async def test_grpc_names_the_model_that_served(routed: Running, channel: grpc.aio.Channel) -> None:
    """In the first message of an answer, and beside vectors; the key that keeps requests together arrives."""
    stub = InferenceServiceStub(channel)
    metadata = tuple(routed.authorization.items())
    request = pb.GenerateRequest(model="fast", text="hi", prompt_cache_key="chat-7")
    first = await anext(aiter(stub.Generate(request, metadata=metadata)))
    assert first.started.model == MODEL
    asked = routed.service.requests[-1]
    assert (asked.model, asked.alias, asked.cache_key) == (MODEL, "fast", "chat-7")
    made = await stub.Embed(pb.EmbedRequest(model="fast", inputs=[pb.EmbedInput(text="x")]), metadata=metadata)
    assert made.model == MODEL


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
async def test_a_cache_key_is_taken_and_bounded(routed: Running, path: str) -> None:
    """It is no field without effect; one that is too long, or no text, is refused by its name."""
    longest = "k" * MAX_CACHE_KEY_CHARS
    answer = await send(routed, path, {"model": "fast", "prompt_cache_key": longest, **BODIES[path]})
    assert answer.status_code == 200
    assert "x-athanor-ignored" not in answer.headers
    assert routed.service.requests[-1].cache_key == longest
    for wrong in (longest + "k", 7, ["k"]):
        refused = await send(routed, path, {"model": "fast", "prompt_cache_key": wrong, **BODIES[path]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_cache_key")
