"""The Responses API over a real socket, as OpenAI's client reads it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pydantic
import pytest

from appliance.common.errors import UnavailableError
from appliance.gateway.generate_request import ChatPrompt, Finished, FinishReason, Started
from tests.appliance.gateway.front.support import MODEL, Running, logprob_script, text_script
from tests.appliance.gateway.http.scripts import CALLING, CALLS, CUT, REFUSING

WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "The weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}
NOW: dict[str, Any] = {"type": "function", "name": "now", "parameters": {"type": "object"}, "strict": False}


@pytest.fixture
async def client(running: Running) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official client."""
    key = running.authorization["authorization"].removeprefix("Bearer ")
    async with openai.AsyncOpenAI(base_url=running.base_url + "/v1", api_key=key, max_retries=0) as made:
        yield made


async def ask(client: openai.AsyncOpenAI, **fields: Any) -> Any:
    """The response to an input."""
    return await client.responses.create(**{"model": MODEL, "input": "?", **fields})


def told(running: Running) -> dict[str, Any]:
    """What the template is told of the last request."""
    prompt = running.service.requests[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    return dict(json.loads(prompt.source))


async def test_an_input_is_answered(running: Running, client: openai.AsyncOpenAI) -> None:
    """Text, status and usage; instructions stand first, and what was asked for is repeated."""
    answer = await ask(client, instructions="Be brief.", max_output_tokens=50, temperature=0.5, metadata={"a": "b"})
    assert (answer.output_text, answer.status, answer.error, answer.store) == ("Hello", "completed", None, False)
    assert (answer.usage.input_tokens, answer.usage.input_tokens_details.cached_tokens) == (7, 3)
    assert (answer.usage.output_tokens, answer.usage.total_tokens) == (2, 9)
    assert (answer.instructions, answer.temperature, answer.metadata) == ("Be brief.", 0.5, {"a": "b"})
    assert (answer.max_output_tokens, answer.id.startswith("resp_"), answer.model) == (50, True, MODEL)
    assert told(running)["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "?"}]
    running.service.script = [Started(1, 0), Finished(FinishReason.LENGTH, 1, 0, 1)]
    answer = await ask(client)
    assert (answer.status, answer.incomplete_details.reason, answer.output) == ("incomplete", "max_output_tokens", [])


async def test_a_response_has_every_field_that_the_client_requires(running: Running) -> None:
    """The client's strict form takes it, whole and as the last event of a stream. Control: it misses a field."""
    key = running.authorization["authorization"].removeprefix("Bearer ")
    options: dict[str, Any] = {"max_retries": 0, "_strict_response_validation": True}
    async with openai.AsyncOpenAI(base_url=running.base_url + "/v1", api_key=key, **options) as strict:
        for script in (running.service.script, CALLING):
            running.service.script = script
            whole = await ask(strict, tools=[NOW])
            *_, last = [event async for event in await ask(strict, tools=[NOW], stream=True)]
            assert last.type == "response.completed" and last.response.usage == whole.usage
            assert type(whole)(**whole.model_dump()).usage.input_tokens_details.cache_write_tokens == 0
    lacking = whole.model_dump()
    del lacking["usage"]["input_tokens_details"]["cache_write_tokens"]
    with pytest.raises(pydantic.ValidationError):
        type(whole)(**lacking)


async def test_a_stream_is_put_together_by_the_client(running: Running, client: openai.AsyncOpenAI) -> None:
    """Reasoning, text and two calls: numbered events, each item begins and ends, and the last event has the whole
    response."""
    running.service.script = CALLING
    whole = await ask(client, tools=[WEATHER, NOW])
    asked: dict[str, Any] = {"model": MODEL, "input": "?", "tools": [WEATHER, {**NOW, "strict": True}]}
    events = [event async for event in await ask(client, tools=[WEATHER, NOW], stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed"
    assert events[-1].response.model_dump(exclude={"id", "created_at"})["usage"] == whole.model_dump()["usage"]
    for shown in (whole, events[-1].response):
        reasoning, message, *calls = shown.output
        assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "I need both.")
        assert message.content[0].text == "So: "
        assert [(one.call_id, one.name, one.arguments) for one in calls] == CALLS
    assert whole.usage.output_tokens_details.reasoning_tokens == 2
    for kind, ends in (("reasoning_text", 1), ("output_text", 1), ("function_call_arguments", 2)):
        deltas = [event for event in events if event.type == f"response.{kind}.delta"]
        done = [event for event in events if event.type == f"response.{kind}.done"]
        assert len(done) == ends and len(deltas) >= ends
        for one in done:
            text = "".join(event.delta for event in deltas if event.item_id == one.item_id)
            assert text == (one.arguments if kind == "function_call_arguments" else one.text)
    async with client.responses.stream(**asked) as stream:
        final = await stream.get_final_response()
    assert final.output_text == "So: "


async def test_items_become_turns(running: Running, client: openai.AsyncOpenAI) -> None:
    """Messages in both spellings, reasoning and calls of one answer as one turn, and outputs."""
    await ask(
        client,
        input=[
            {"role": "developer", "content": "Be brief."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "?"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So:"}]},
            {"type": "function_call", "call_id": "call_a", "name": "now", "arguments": "{}"},
            {"type": "function_call", "call_id": "call_b", "name": "now", "arguments": ""},
            {"type": "function_call_output", "call_id": "call_a", "output": "12"},
            {"type": "function_call_output", "call_id": "call_b", "output": [{"type": "input_text", "text": "13"}]},
            {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "x"},
            {"role": "assistant", "content": "Both."},
            {"role": "user", "content": "Thanks"},
        ],
    )
    calls = [
        {"id": f"call_{name}", "type": "function", "function": {"name": "now", "arguments": "{}"}}
        for name in ("a", "b")
    ]
    assert told(running)["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "So:", "tool_calls": calls, "reasoning_content": "hm"},
        {"role": "tool", "content": "12", "tool_call_id": "call_a"},
        {"role": "tool", "content": "13", "tool_call_id": "call_b"},
        {"role": "assistant", "content": "Both."},
        {"role": "user", "content": "Thanks"},
    ]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (False, True, ["now", "weather"])),
        ({"parallel_tool_calls": False}, (False, False, ["now", "weather"])),
        ({"tool_choice": "required"}, (True, True, ["now", "weather"])),
        ({"tool_choice": {"type": "function", "name": "now"}}, (True, True, ["now"])),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "now"}]}},
            (False, True, ["now"]),
        ),
        ({"tool_choice": "none"}, None),
    ],
    ids=str,
)
async def test_a_choice_says_what_may_be_called(
    running: Running, client: openai.AsyncOpenAI, fields: dict[str, Any], expected: Any
) -> None:
    """Whether one has to be called, whether several may, and which."""
    await ask(client, tools=[WEATHER, NOW], **fields)
    tools = running.service.requests[0].tools
    if expected is None:
        assert tools is None and "tools" not in told(running)
        return
    assert tools is not None
    document = json.loads(tools.source)
    assert (document["required"], document["parallel"], sorted(tools.names)) == expected
    assert told(running)["tools"][0]["function"]["name"] == "weather"


async def test_structure_reasoning_and_scores_are_asked_for(running: Running, client: openai.AsyncOpenAI) -> None:
    """A schema is a grammar, an effort is a hint to the template, log-probabilities stand beside the text."""
    schema = {"type": "object", "properties": {}}
    running.service.script = logprob_script()
    answer = await ask(
        client,
        text={"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}},
        reasoning={"effort": "none"},
        include=["message.output_text.logprobs"],
        top_logprobs=2,
    )
    (request,) = running.service.requests
    assert request.grammar is not None and json.loads(request.grammar.source) == schema
    assert told(running)["hints"] == {"enable_thinking": False, "thinking": False, "reasoning_effort": "none"}
    assert request.logprobs == 2
    scores = answer.output[0].content[0].logprobs
    assert [one.logprob for one in scores][:2] == [-0.5, -0.25]
    await ask(client)
    assert "hints" not in told(running) and running.service.requests[-1].logprobs == -1


async def test_a_call_that_is_none_and_one_that_is_cut(running: Running, client: openai.AsyncOpenAI) -> None:
    """The first is a message alone; the second is incomplete, and so is the response."""
    running.service.script = REFUSING
    answer = await ask(client, tools=[NOW])
    assert ([item.type for item in answer.output], answer.output_text) == (["message"], "<call>{]")
    running.service.script = CUT
    answer = await ask(client, tools=[NOW])
    assert (answer.status, answer.output[0].status, answer.output[0].arguments) == ("incomplete", "incomplete", '{"a')


async def test_tokens_are_counted(running: Running, client: openai.AsyncOpenAI) -> None:
    """As many as the same input would have."""
    counted = await client.responses.input_tokens.count(model=MODEL, input="?", instructions="x")
    await ask(client, instructions="x")
    assert running.service.tokenizer_requests[0].prompt == running.service.requests[0].prompt
    assert (counted.object, counted.input_tokens > 0) == ("response.input_tokens", True)


async def test_a_stream_that_fails_raises(running: Running, client: openai.AsyncOpenAI) -> None:
    """The official client raises the error that ended it; control: what came before was given."""
    running.service.script = [*text_script("Hel")[:2], UnavailableError("the engine ended", retry_after_s=1.0)]
    texts = []
    with pytest.raises(openai.APIError, match="the engine ended"):
        async for event in await ask(client, stream=True):
            texts += [event.delta] if event.type == "response.output_text.delta" else []
    assert texts == ["Hel"]


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("input", {"input": None}),
    ("input", {"input": 3}),
    ("input[0]", {"input": ["x"]}),
    ("input[0].type", {"input": [{"type": "computer_call"}]}),
    ("input[0].role", {"input": [{"role": "tool", "content": "x"}]}),
    ("input[0].content[0]", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
    ("input[0].call_id", {"input": [{"type": "function_call", "name": "x"}]}),
    ("input[0].arguments", {"input": [{"type": "function_call", "name": "x", "call_id": "1", "arguments": "["}]}),
    ("tools[0].type", {"tools": [{"type": "web_search"}]}),
    ("tools[0].name", {"tools": [{"type": "function"}]}),
    ("tool_choice", {"tools": [NOW], "tool_choice": {"type": "web_search"}}),
    ("tool_choice.mode", {"tools": [NOW], "tool_choice": {"type": "allowed_tools", "mode": "x", "tools": []}}),
    ("previous_response_id", {"previous_response_id": "resp_1"}),
    ("background", {"background": True}),
    ("conversation", {"conversation": "conv_1"}),
    ("text.format.type", {"text": {"format": {"type": "xml"}}}),
    ("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "x"}}}),
    ("reasoning.effort", {"reasoning": {"effort": "extreme"}}),
    ("truncation", {"truncation": "some"}),
    ("top_logprobs", {"top_logprobs": 21}),
    ("max_output_tokens", {"max_output_tokens": 0}),
    ("service_tier", {"service_tier": "x"}),
    ("store", {"store": "yes"}),
]


@pytest.mark.parametrize(("param", "fields"), REFUSED, ids=[f"{param} {at}" for at, (param, _) in enumerate(REFUSED)])
async def test_a_mistake_is_named(running: Running, param: str, fields: dict[str, Any]) -> None:
    """A 400 that names the field, before anything is asked of the session."""
    async with httpx.AsyncClient(base_url=running.base_url, headers=running.authorization) as http:
        answer = await http.post("/v1/responses", json={"model": MODEL, "input": "?", **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert running.service.requests == []
