"""Tools over a real socket: what is offered, and calls and reasoning as the official client reads them."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from appliance.gateway.generate_request import (
    CallDelta,
    ChatPrompt,
    ChoiceFinished,
    Delta,
    Finished,
    FinishReason,
    Started,
)
from tests.appliance.gateway.front.support import MODEL, Running
from tests.appliance.gateway.http.scripts import CALLING, CALLS, CUT, REFUSING

USER = {"role": "user", "content": "?"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": True,
    },
}
NOW = {"type": "function", "function": {"name": "now"}}


def client(running: Running) -> openai.AsyncOpenAI:
    """The official client of a tenant."""
    key = running.authorization["authorization"].removeprefix("Bearer ")
    return openai.AsyncOpenAI(base_url=running.base_url + "/v1", api_key=key, max_retries=0)


async def ask(running: Running, **fields: Any) -> Any:
    """The answer to a conversation, of a stream all its chunks."""
    async with client(running) as caller:
        answer = await caller.chat.completions.create(
            model=MODEL, **{"messages": [USER], "tools": [WEATHER, NOW], **fields}
        )
        return [chunk async for chunk in answer] if fields.get("stream") else answer


async def test_a_whole_answer_has_its_calls(running: Running) -> None:
    """Ids, names and arguments of both calls, the reasoning beside them, and the reason why it ended."""
    running.service.script = CALLING
    answer = await ask(running)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert [(one.id, one.function.name, one.function.arguments) for one in choice.message.tool_calls] == CALLS
    assert choice.message.content == "So: "
    assert choice.message.model_extra == {"reasoning_content": "I need both."}
    assert answer.usage.completion_tokens_details.reasoning_tokens == 2
    running.service.script = [step for step in CALLING if not (isinstance(step, Delta) and step.text)]
    answer = await ask(running)
    assert answer.choices[0].message.content is None, "as OpenAI has it where there is nothing but calls"


async def test_a_stream_gives_calls_as_they_come(running: Running) -> None:
    """Each call's first piece has id and name, the others its number; put together they are those of the whole
    answer."""
    running.service.script = CALLING
    calls: dict[int, list[str]] = {}
    reasoning, pieces = "", 0
    for chunk in await ask(running, stream=True):
        (choice,) = chunk.choices
        reasoning += (choice.delta.model_extra or {}).get("reasoning_content", "")
        for piece in choice.delta.tool_calls or ():
            pieces += 1
            if piece.id is not None:
                assert piece.type == "function" and piece.index not in calls
                calls[piece.index] = [piece.id, piece.function.name, ""]
            calls[piece.index][2] += piece.function.arguments
    assert [tuple(one) for one in calls.values()] == CALLS
    assert (reasoning, pieces, choice.finish_reason) == ("I need both.", 4, "tool_calls")


async def test_the_official_helpers_put_a_stream_together(running: Running) -> None:
    """``chat.completions.stream`` of the official client parses the arguments of both."""
    running.service.script = CALLING
    now = {"type": "function", "function": {"name": "now", "strict": True, "parameters": {}}}
    asked: dict[str, Any] = {"model": MODEL, "messages": [USER], "tools": [WEATHER, now]}
    async with client(running) as caller, caller.chat.completions.stream(**asked) as stream:
        final = await stream.get_final_completion()
    parsed = [one.function.parsed_arguments for one in final.choices[0].message.tool_calls or ()]
    assert parsed == [{"city": "Paris"}, {}]


async def test_a_call_that_is_none_is_content_with_a_reason(running: Running) -> None:
    """The whole answer has no call, and says why; a stream says it at its end."""
    running.service.script = REFUSING
    (choice,) = (await ask(running)).choices
    assert (choice.message.tool_calls, choice.message.content, choice.finish_reason) == (None, "<call>{]", "stop")
    assert choice.model_extra == {"tool_call_error": "the call is not JSON"}
    chunks = await ask(running, stream=True)
    assert chunks[-1].choices[0].model_extra == {"tool_call_error": "the call is not JSON"}


async def test_a_call_that_is_cut_is_shown_as_far_as_it_came(running: Running) -> None:
    """With the reason ``length``, and not as if it were complete."""
    running.service.script = CUT
    (choice,) = (await ask(running)).choices
    assert (choice.finish_reason, choice.message.tool_calls[0].function.arguments) == ("length", '{"a')


async def test_choices_have_calls_of_their_own(running: Running) -> None:
    """Control: the first has one, the second none."""
    running.service.script = [
        Started(1, 0),
        Delta("", (1,), choice=0, calls=(CallDelta(0, "now", "call_a", "{}"),)),
        Delta("x", (2,), choice=1),
        ChoiceFinished(0, FinishReason.TOOL_CALLS),
        Finished(FinishReason.STOP, 1, 0, 2, choice=1),
    ]
    first, second = (await ask(running, n=2, tools=[NOW])).choices
    assert (first.finish_reason, len(first.message.tool_calls)) == ("tool_calls", 1)
    assert (second.finish_reason, second.message.tool_calls, second.message.content) == ("stop", None, "x")


async def test_a_padded_stream_has_the_same_calls(running: Running) -> None:
    """Records of one size carry them; put together they are those of the whole answer."""
    running.service.script = CALLING
    running.service.padded = {"acme"}
    calls: dict[int, str] = {}
    for chunk in await ask(running, stream=True):
        for piece in chunk.choices[0].delta.tool_calls or ():
            calls[piece.index] = calls.get(piece.index, "") + piece.function.arguments
    assert list(calls.values()) == [arguments for _, _, arguments in CALLS]


CHOICES: list[tuple[dict[str, Any], tuple[set[str], bool, bool, bool] | None]] = [
    ({}, ({"weather", "now"}, False, True, True)),
    ({"tool_choice": "auto", "parallel_tool_calls": False}, ({"weather", "now"}, False, False, True)),
    ({"tool_choice": "required"}, ({"weather", "now"}, True, True, True)),
    ({"tool_choice": {"type": "function", "function": {"name": "now"}}}, ({"now"}, True, True, True)),
    (
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NOW]}}},
        ({"now"}, False, True, False),
    ),
    ({"tool_choice": "none"}, None),
    ({"tools": []}, None),
]


@pytest.mark.parametrize(("fields", "expected"), CHOICES, ids=[json.dumps(fields)[:60] for fields, _ in CHOICES])
async def test_a_choice_says_what_may_be_called(
    running: Running, fields: dict[str, Any], expected: tuple[set[str], bool, bool, bool] | None
) -> None:
    """Names, whether one has to be called, whether several may, whether a grammar holds them; the model is told of all
    tools, unless it shall call none."""
    await ask(running, **fields)
    (request,) = running.service.requests
    assert isinstance(request.prompt, ChatPrompt)
    told = json.loads(request.prompt.source).get("tools", [])
    if expected is None:
        assert (request.tools, told) == (None, [])
        return
    names, required, parallel, held = expected
    assert request.tools is not None
    document = json.loads(request.tools.source)
    assert (request.tools.names, document["required"], document["parallel"]) == (names, required, parallel)
    assert request.tools.held is held
    assert {one["name"] for one in document["tools"]} == names
    assert [one["function"]["name"] for one in told] == ["weather", "now"]
    assert told[0]["function"] == {name: WEATHER["function"][name] for name in ("name", "description", "parameters")}


VERDICT = {"type": "object", "properties": {"allowed": {"type": "boolean"}}}
FORM = {"type": "json_schema", "json_schema": {"name": "v", "schema": VERDICT}}


@pytest.mark.parametrize(
    ("fields", "strict"),
    [
        ({"response_format": FORM}, False),
        ({"response_format": {**FORM, "json_schema": {**FORM["json_schema"], "strict": True}}}, True),
        ({"extra_body": {"structured_outputs": {"json": VERDICT}}}, True),
        ({"extra_body": {"guided_json": VERDICT}, "parallel_tool_calls": False}, True),
    ],
)
async def test_an_answer_beside_tools_follows_its_schema(
    running: Running, fields: dict[str, Any], strict: bool
) -> None:
    """The schema goes with the tools, which a grammar then holds, strict or not; there is no other grammar. Control:
    without it these are not held."""
    await ask(running, tools=[NOW], **fields)
    await ask(running, tools=[NOW])
    request, control = running.service.requests
    assert request.grammar is None and request.tools is not None and control.tools is not None
    answer = json.loads(request.tools.source)["answer"]
    assert (json.loads(answer["schema"]), answer["strict"]) == (VERDICT, strict)
    assert (request.tools.held, control.tools.held) == (True, False)
    named = next(iter(fields.get("extra_body", fields)))
    assert request.tools.answer_param is not None and request.tools.answer_param.split(".")[0] == named
    assert "answer" not in json.loads(control.tools.source) and control.tools.answer_param is None


async def test_a_choice_decides_between_calls_and_the_schema(running: Running) -> None:
    """A call that is required leaves no answer that could follow it; without calls the schema alone holds. Fields that
    ask for nothing are no schema."""
    for choice in ("required", {"type": "function", "function": {"name": "now"}}, "none", "auto"):
        await ask(running, tools=[NOW], tool_choice=choice, response_format=FORM if choice != "auto" else None)
    required, named, none, auto = running.service.requests
    for request in (required, named, auto):
        assert request.tools is not None and request.grammar is None and request.tools.answer_param is None
        assert "answer" not in json.loads(request.tools.source)
    assert none.tools is None and none.grammar is not None and json.loads(none.grammar.source) == VERDICT


async def test_calls_and_results_reach_the_template(running: Running) -> None:
    """An assistant's calls with their reasoning, and the results, in the shape that templates read."""
    call = {"id": "call_a", "type": "function", "function": {"name": "now", "arguments": ""}}
    said = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"}
    await ask(running, messages=[USER, said, {"role": "tool", "tool_call_id": "call_a", "content": "12"}])
    (request,) = running.service.requests
    assert isinstance(request.prompt, ChatPrompt)
    _, assistant, result = json.loads(request.prompt.source)["messages"]
    call["function"] = {"name": "now", "arguments": "{}"}
    assert assistant == {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "hm"}
    assert result == {"role": "tool", "content": "12", "tool_call_id": "call_a"}


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("tools", {"tools": {}}),
    ("tools[0].type", {"tools": [{"type": "custom", "custom": {"name": "x"}}]}),
    ("tools[0].function", {"tools": [{"type": "function"}]}),
    ("tools[0].function.name", {"tools": [{"type": "function", "function": {}}]}),
    ("tools[0].function.description", {"tools": [{"type": "function", "function": {"name": "a", "description": 1}}]}),
    ("tools[0].function.strict", {"tools": [{"type": "function", "function": {"name": "a", "strict": 1}}]}),
    ("tool_choice", {"tool_choice": {"type": "function"}}),
    ("tool_choice", {"tool_choice": {"type": "custom"}}),
    ("tool_choice", {"tools": [], "tool_choice": {"type": "function", "function": {"name": "now"}}}),
    ("tool_choice.allowed_tools", {"tool_choice": {"type": "allowed_tools"}}),
    (
        "tool_choice.allowed_tools.mode",
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "x", "tools": []}}},
    ),
    ("tool_choice", {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}}),
    ("parallel_tool_calls", {"parallel_tool_calls": "no"}),
    ("functions", {"functions": [{"name": "a"}]}),
    ("messages[0].tool_calls[0]", {"messages": [{"role": "assistant", "tool_calls": ["x"]}]}),
    ("messages[0].tool_calls[0]", {"messages": [{"role": "assistant", "tool_calls": [{"type": "custom"}]}]}),
    ("messages[0].reasoning_content", {"messages": [{"role": "assistant", "reasoning_content": 1}]}),
    ("messages[0].tool_call_id", {"messages": [{"role": "tool", "content": "x", "tool_call_id": "x" * 257}]}),
    ("guided_choice", {"extra_body": {"guided_choice": ["a"]}}),
    ("n", {"n": 2, "tools": [NOW], "response_format": {"type": "json_object"}}),
]


@pytest.mark.parametrize(
    ("param", "fields"), REFUSED, ids=[f"{param} {number}" for number, (param, _) in enumerate(REFUSED)]
)
async def test_a_mistake_is_named(running: Running, param: str, fields: dict[str, Any]) -> None:
    """A 400 that names the field, before anything is asked of the session."""
    with pytest.raises(openai.BadRequestError) as refused:
        await ask(running, **fields)
    assert refused.value.param == param
    assert running.service.requests == []
