"""The Messages API over a real socket, as Anthropic's client reads it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from appliance.common.errors import RateLimitedError, UnavailableError
from appliance.gateway.generate_request import ChatPrompt, Finished, FinishReason, Started
from tests.appliance.gateway.front.support import MODEL, Running, text_script
from tests.appliance.gateway.http.scripts import CALLING, CUT, REFUSING

if TYPE_CHECKING:
    import anthropic

USER: dict[str, Any] = {"role": "user", "content": "?"}
WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "The weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
NOW: dict[str, Any] = {"name": "now", "input_schema": {"type": "object"}}


@pytest.fixture
async def client(running: Running) -> AsyncIterator[anthropic.AsyncAnthropic]:
    """Anthropic's client, with its own header for the key. Imported by those who use it: it takes two seconds."""
    import anthropic

    key = running.authorization["authorization"].removeprefix("Bearer ")
    async with anthropic.AsyncAnthropic(base_url=running.base_url, api_key=key, max_retries=0) as made:
        yield made


async def ask(client: anthropic.AsyncAnthropic, **fields: Any) -> Any:
    """The answer to a message."""
    return await client.messages.create(**{"model": MODEL, "max_tokens": 50, "messages": [USER], **fields})


async def test_a_message_is_answered(running: Running, client: anthropic.AsyncAnthropic) -> None:
    """Text, reason and usage, in which cached tokens are counted apart; the prompt has the system's text first."""
    answer = await ask(
        client, system=[{"type": "text", "text": "Be brief."}], stop_sequences=["END"], extra_body={"top_k": 5}
    )
    assert [block.model_dump(exclude_none=True) for block in answer.content] == [{"type": "text", "text": "Hello"}]
    assert (answer.role, answer.stop_reason, answer.stop_sequence, answer.model) == (
        "assistant",
        "end_turn",
        None,
        MODEL,
    )
    assert (answer.usage.input_tokens, answer.usage.cache_read_input_tokens, answer.usage.output_tokens) == (4, 3, 2)
    (request,) = running.service.requests
    assert (request.max_tokens, request.stop, request.sampling.top_k) == (50, ("END",), 5)
    assert isinstance(request.prompt, ChatPrompt)
    told = json.loads(request.prompt.source)
    assert told == {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "?"}]}
    running.service.script = [Started(1, 0), Finished(FinishReason.STOP, 1, 0, 1, stop="END")]
    answer = await ask(client)
    assert (answer.stop_reason, answer.stop_sequence, answer.content) == ("stop_sequence", "END", [])


async def test_a_stream_is_put_together_by_the_client(running: Running, client: anthropic.AsyncAnthropic) -> None:
    """Thinking, text and two calls: each block begins, goes on and ends, and together they are the whole answer."""
    running.service.script = CALLING
    whole = await ask(client, tools=[WEATHER, NOW])
    kinds = []
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 50, "messages": [USER], "tools": [WEATHER, NOW]}
    async with client.messages.stream(**asked) as stream:
        async for event in stream:
            kinds.append(event.type)
        final = await stream.get_final_message()
    assert final.model_dump(exclude={"id"}) == whole.model_dump(exclude={"id"})
    thinking, text, weather, now = whole.content
    assert (thinking.type, thinking.thinking, text.text) == ("thinking", "I need both.", "So: ")
    assert (weather.type, weather.id, weather.name, weather.input) == (
        "tool_use",
        "call_a",
        "weather",
        {"city": "Paris"},
    )
    assert (now.name, now.input, whole.stop_reason) == ("now", {}, "tool_use")
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")


async def test_a_message_of_the_system_stands_in_its_place(running: Running, client: anthropic.AsyncAnthropic) -> None:
    """A message of the role system reaches the template between the others, behind what ``system`` says; one with
    anything but text is refused."""
    import anthropic

    messages: list[Any] = [USER, {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}]
    await ask(client, system="First.", messages=messages)
    turns = json.loads(running.service.requests[0].prompt.source)["messages"]
    assert [(turn["role"], turn["content"]) for turn in turns][::2] == [("system", "First."), ("system", "Be brief.")]
    call = {"type": "tool_use", "id": "call_a", "name": "now", "input": {}}
    with pytest.raises(anthropic.BadRequestError, match="in a message of the system"):
        await ask(client, messages=[USER, {"role": "system", "content": [call]}])


async def test_events_have_the_published_names(running: Running) -> None:
    """Each event's type stands in its data as well, and the last of a message is its stop."""
    names = []
    async with (
        httpx.AsyncClient(base_url=running.base_url, headers=running.authorization) as http,
        http.stream(
            "POST", "/v1/messages", json={"model": MODEL, "max_tokens": 5, "stream": True, "messages": [USER]}
        ) as answer,
    ):
        async for line in answer.aiter_lines():
            if line.startswith("event: "):
                names.append(line.removeprefix("event: "))
            elif line.startswith("data: "):
                assert json.loads(line.removeprefix("data: "))["type"] == names[-1]
    assert names == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


async def test_turns_with_tools_reach_the_template(running: Running, client: anthropic.AsyncAnthropic) -> None:
    """Calls, results (also of several blocks) and earlier thinking; a text beside results is a turn of the user."""
    said = {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "x"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "So:"},
            {"type": "tool_use", "id": "toolu_1", "name": "now", "input": {}},
        ],
    }
    results = {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "12"}]},
            {"type": "tool_result", "tool_use_id": "toolu_2"},
            {"type": "text", "text": "And?"},
        ],
    }
    await ask(client, messages=[USER, said, results, {"role": "user", "content": results["content"][:1]}])
    (request,) = running.service.requests
    assert isinstance(request.prompt, ChatPrompt)
    call = {"id": "toolu_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    assert json.loads(request.prompt.source)["messages"][1:] == [
        {"role": "assistant", "content": "So:", "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "content": "12", "tool_call_id": "toolu_1"},
        {"role": "tool", "content": "", "tool_call_id": "toolu_2"},
        {"role": "user", "content": "And?"},
        {"role": "tool", "content": "12", "tool_call_id": "toolu_1"},
    ]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, (False, True, ["now", "weather"])),
        ({"type": "auto", "disable_parallel_tool_use": True}, (False, False, ["now", "weather"])),
        ({"type": "any"}, (True, True, ["now", "weather"])),
        ({"type": "tool", "name": "now"}, (True, True, ["now"])),
        ({"type": "none"}, None),
    ],
    ids=str,
)
async def test_a_choice_says_what_may_be_called(
    running: Running, client: anthropic.AsyncAnthropic, choice: Any, expected: Any
) -> None:
    """Whether one has to be called, whether several may, and which."""
    await ask(client, tools=[WEATHER, NOW], **({} if choice is None else {"tool_choice": choice}))
    (request,) = running.service.requests
    if expected is None:
        assert request.tools is None
        return
    assert request.tools is not None
    told = json.loads(request.tools.source)
    assert (told["required"], told["parallel"], sorted(request.tools.names)) == expected


@pytest.mark.parametrize(("kind", "thinks"), [("enabled", True), ("adaptive", True), ("disabled", False)])
async def test_thinking_is_a_hint_to_the_template(
    running: Running, client: anthropic.AsyncAnthropic, kind: str, thinks: bool
) -> None:
    """Templates that have a word for it are told; control: without the field none is."""
    await ask(client, thinking={"type": kind, "budget_tokens": 1_024})
    await ask(client)
    first, second = (json.loads(one.prompt.source) for one in running.service.requests)  # type: ignore[union-attr]
    assert first["hints"] == {"enable_thinking": thinks, "thinking": thinks}
    assert "hints" not in second


async def test_a_call_that_is_none_and_one_that_is_cut(running: Running, client: anthropic.AsyncAnthropic) -> None:
    """The first is text alone; the second has no input that could be run, and the reason says so."""
    running.service.script = REFUSING
    answer = await ask(client, tools=[NOW])
    assert ([block.type for block in answer.content], answer.stop_reason) == (["text"], "end_turn")
    running.service.script = CUT
    answer = await ask(client, tools=[NOW])
    assert (answer.content[0].input, answer.stop_reason) == ({}, "max_tokens")


async def test_tokens_are_counted(running: Running, client: anthropic.AsyncAnthropic) -> None:
    """As many as the same message would have; tools and system are part of it."""
    counted = await client.messages.count_tokens(model=MODEL, messages=[USER], system="x", tools=[NOW])  # type: ignore[list-item]
    await ask(client, system="x", tools=[NOW])
    (asked,) = running.service.tokenizer_requests
    assert asked.prompt == running.service.requests[0].prompt
    assert counted.input_tokens > 0


async def test_errors_are_those_that_the_client_knows(running: Running, client: anthropic.AsyncAnthropic) -> None:
    """Types by status, the request's id, and the client's own classes; a stranger's too, and inside a stream."""
    import anthropic

    with pytest.raises(anthropic.BadRequestError) as bad:
        await client.messages.create(model=MODEL, messages=[USER], max_tokens=0)  # type: ignore[list-item]
    assert bad.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    assert bad.value.body["request_id"].startswith("req_")  # type: ignore[index]
    running.service.script = [RateLimitedError("slow down", retry_after_s=2.0)]
    with pytest.raises(anthropic.RateLimitError):
        await ask(client)
    async with anthropic.AsyncAnthropic(base_url=running.base_url, api_key="ath_x", max_retries=0) as stranger:
        with pytest.raises(anthropic.AuthenticationError) as unknown:
            await ask(stranger)
    assert unknown.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
    running.service.script = [*text_script("Hel")[:2], UnavailableError("the engine ended", retry_after_s=1.0)]
    with pytest.raises(anthropic.APIStatusError) as broken:
        async for _ in await ask(client, stream=True):
            pass
    assert broken.value.body["error"]["type"] == "overloaded_error"  # type: ignore[index]


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("max_tokens is required", {"max_tokens": None}),
    ("messages is required", {"messages": None}),
    ("messages[0].role", {"messages": [{"role": "tool", "content": "x"}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": 3}]}),
    ("messages[0].content[0]", {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}),
    ("messages[0].content[0]", {"messages": [{"role": "assistant", "content": [{"type": "tool_result"}]}]}),
    (
        "messages[0].content[0].id",
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "x"}]}]},
    ),
    ("system[0]", {"system": [{"type": "image"}]}),
    ("system", {"system": 3}),
    ("tools[0].type", {"tools": [{"type": "bash_20250124", "name": "bash"}]}),
    ("tools[0].name", {"tools": [{"input_schema": {}}]}),
    ("tool_choice.type", {"tools": [NOW], "tool_choice": {"type": "required"}}),
    ("tool_choice", {"tools": [NOW], "tool_choice": {"type": "tool", "name": "then"}}),
    ("thinking.type", {"thinking": {"type": "much"}}),
    ("stop_sequences", {"stop_sequences": [1]}),
    ("mcp_servers", {"mcp_servers": [{"url": "x"}]}),
    ("temperature", {"temperature": "hot"}),
    ("service_tier", {"service_tier": "fast"}),
    ("metadata", {"metadata": "x"}),
]


@pytest.mark.parametrize(("said", "fields"), REFUSED, ids=[f"{said} {at}" for at, (said, _) in enumerate(REFUSED)])
async def test_a_mistake_is_named(running: Running, said: str, fields: dict[str, Any]) -> None:
    """A 400 whose message names the field, before anything is asked of the session."""
    body = {"model": MODEL, "max_tokens": 5, "messages": [USER], **fields}
    async with httpx.AsyncClient(base_url=running.base_url, headers=running.authorization) as http:
        answer = await http.post("/v1/messages", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert said in answer.json()["error"]["message"]
    assert running.service.requests == []


async def test_fields_without_effect_are_named(running: Running) -> None:
    """In the header, as over the other APIs; the two keys of one caller must be one."""
    body = {"model": MODEL, "max_tokens": 5, "messages": [USER], "inference_geo": "eu"}
    async with httpx.AsyncClient(base_url=running.base_url, headers=running.authorization) as http:
        answer = await http.post("/v1/messages", json=body)
        assert answer.headers["x-athanor-ignored"] == "inference_geo"
        twice = await http.post("/v1/messages", json=body, headers={"x-api-key": "ath_other"})
        elsewhere = await http.post("/v1/chat/completions", json=body, headers={"x-api-key": "ath_other"})
    assert (answer.status_code, twice.status_code, elsewhere.status_code) == (200, 401, 200)


async def test_a_stranger_does_not_learn_which_paths_exist(running: Running) -> None:
    """Errors below one path have one form, whether there is such a route or not."""
    async with httpx.AsyncClient(base_url=running.base_url) as http:
        said = [
            (await http.post(path)).json() for path in ("/v1/messages", "/v1/messages/x", "/v1/messages/count_tokens")
        ]
    for one in said:
        one.pop("request_id")
    assert said[0] == said[1] == said[2]
