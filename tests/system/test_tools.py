"""Tools through the whole appliance, as agents use them: calls that parse, streams, results, ends, losses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import jsonschema
import openai
import pytest

from appliance.gateway.grpc.generated import inference_pb2 as pb
from appliance.gateway.grpc.generated import inference_pb2_grpc
from tests.system.conftest import PLAIN, Appliance, begun, running
from tests.system.test_clients_document import blocks, run
from tests.system.tool_models import make_models

pytestmark = pytest.mark.runsc

FAMILIES = ("hermes", "llama3", "mistral")
CALLING = ("hermes", pytest.param("llama3", marks=pytest.mark.full))
"""Each family of calls has its own reader in the sandbox, and tests of it in tests/engine/text/output: one of them is
served in `make test`."""
SEARCH = {
    "type": "object",
    "properties": {
        "query": {"type": "string", "maxLength": 10},
        "kind": {"enum": ["log", "trace"]},
        "limits": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["query", "kind", "limits"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"search": SEARCH, "now": NOTHING}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
    for name, schema in SCHEMAS.items()
]
LOOSE: list[Any] = [{"type": "function", "function": {"name": name}} for name in SCHEMAS]
QUESTION: list[Any] = [{"role": "user", "content": "What does the log say?"}]


def ask(appliance: Appliance, model: str, **fields: Any) -> Any:
    """The answer to a question with tools."""
    given = {"messages": QUESTION, "tools": TOOLS, "max_tokens": 400, "temperature": 1.0, **fields}
    return appliance.openai().chat.completions.create(model=model, **given)


def checked(calls: Any) -> list[tuple[str, str]]:
    """Names and arguments of calls, once they satisfy their tools' schemas."""
    found = [(one.function.name, one.function.arguments) for one in calls or ()]
    for name, arguments in found:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    return found


@pytest.mark.full
def test_the_document_s_turn_goes_round(root: Path, tooled: Appliance) -> None:
    """docs/tools.md: the offer, the call, the result, and an answer that is printed."""
    language, text = blocks(root, "tools.md")["0"]
    text = text.replace("http://127.0.0.1:8080", tooled.ready["http"]).replace("ath_alpha-1_...", tooled.key("alpha"))
    assert run(language, text, {}).strip()


def check_calls(appliance: Appliance, model: str, seed: int) -> None:
    """Ask for one call that is held to its schema."""
    (choice,) = ask(
        appliance, model, seed=seed, tool_choice="required", parallel_tool_calls=False, temperature=1.5
    ).choices
    assert choice.finish_reason == "tool_calls" and len(checked(choice.message.tool_calls)) == 1
    assert choice.model_extra == {} and choice.message.content is None


@pytest.mark.parametrize("model", CALLING)
def test_calls_that_are_held_satisfy_their_schemas(tooled: Appliance, model: str) -> None:
    """Hot answers of a small or random model: each is one call, and satisfies the schema of its tool."""
    for seed in range(5):
        check_calls(tooled, model, seed)


@pytest.fixture(scope="module")
def random(tmp_path_factory: pytest.TempPathFactory, runsc_path: Path) -> Iterator[Appliance]:
    """A demo that serves models of three families with random weights."""
    folder = tmp_path_factory.mktemp("random")
    models = make_models(folder, FAMILIES, random=FAMILIES)
    served = [argument for model in models for argument in ("--model", str(model))]
    with running(folder / "state", *served, *begun()) as started:
        yield started


@pytest.mark.full
@pytest.mark.parametrize("model", FAMILIES)
def test_a_thousand_calls_satisfy_their_schemas(random: Appliance, model: str) -> None:
    """A third of them for each family, of random weights."""
    for seed in range(334):
        check_calls(random, model, seed)


@pytest.mark.parametrize("model", CALLING)
def test_a_stream_gives_what_the_whole_answer_has(tooled: Appliance, model: str) -> None:
    """Several calls, their arguments in several pieces, the same as in one object with the same seed."""
    fields = {"seed": 11, "tool_choice": "required", "temperature": 0.7}
    whole = ask(tooled, model, **fields).choices[0]
    calls: dict[int, list[str]] = {}
    pieces, reason, content = 0, None, ""
    for chunk in ask(tooled, model, stream=True, **fields):
        (choice,) = chunk.choices
        reason, content = choice.finish_reason, content + (choice.delta.content or "")
        for piece in choice.delta.tool_calls or ():
            pieces += 1
            call = calls.setdefault(piece.index, ["", ""])
            call[0] += piece.function.name or ""
            call[1] += piece.function.arguments or ""
    assert [(one.function.name, one.function.arguments) for one in whole.message.tool_calls or ()] == [
        (name, arguments) for name, arguments in calls.values()
    ]
    assert (reason, content) == (whole.finish_reason, whole.message.content or "")
    assert pieces > len(calls)


@pytest.mark.parametrize("model", CALLING)
def test_an_agent_s_turn_goes_round(tooled: Appliance, model: str) -> None:
    """Two calls of one message and both results reach the model, whoever made the ids; it answers, and the prompt holds
    the results. Control: without them it is shorter."""
    (choice,) = ask(
        tooled, model, seed=1, tool_choice={"type": "function", "function": {"name": "now"}}, parallel_tool_calls=False
    ).choices
    first = choice.message.model_dump(exclude_none=True)
    other = {"id": "toolu_01AbCdEf", "type": "function", "function": {"name": "search", "arguments": '{"query": "x"}'}}
    first["tool_calls"].append(other)
    results = [
        {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "12:00"},
        {"role": "tool", "tool_call_id": other["id"], "content": "nothing"},
    ]
    answered = ask(tooled, model, messages=[*QUESTION, first, *results], max_tokens=5, tool_choice="none")
    asked = ask(tooled, model, max_tokens=5, tool_choice="none")
    assert answered.choices[0].message.tool_calls is None
    assert answered.usage.prompt_tokens > asked.usage.prompt_tokens


def test_a_call_that_is_cut_says_so(tooled: Appliance) -> None:
    """Too few tokens for any call: the reason is ``length``, never ``tool_calls``."""
    for tokens in (1, 8, 14):
        (choice,) = ask(tooled, "hermes", max_tokens=tokens, tool_choice="required").choices
        assert choice.finish_reason == "length"


def test_a_model_that_may_answer_does(tooled: Appliance) -> None:
    """Free to choose, the embedded model's weights answer as they would without tools in the prompt, where the tools
    are none that it was trained to use."""
    for tools in (TOOLS, LOOSE):
        (choice,) = ask(tooled, "hermes", tools=tools, temperature=0).choices
        assert choice.finish_reason == "stop" and choice.message.content and choice.message.tool_calls is None


VERDICT = {
    "type": "object",
    "properties": {"allowed": {"type": "boolean"}, "because": {"type": "string", "maxLength": 10}},
    "required": ["allowed", "because"],
    "additionalProperties": False,
}
FORM: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "verdict", "strict": True, "schema": VERDICT}}


@pytest.mark.parametrize("model", CALLING)
def test_an_answer_beside_tools_follows_its_schema(tooled: Appliance, model: str) -> None:
    """Free to choose, each hot output is calls that satisfy their schemas, or an answer that satisfies its own; where a
    call is required it is a call, and where none may be made an answer. A stream gives the same; so do responses."""
    for seed in range(2):
        asked = {"seed": seed, "response_format": FORM, "tools": LOOSE if seed % 2 else TOOLS, "temperature": 1.5}
        (choice,) = ask(tooled, model, **asked).choices
        streamed = "".join(
            chunk.choices[0].delta.content or "" for chunk in ask(tooled, model, **asked, stream=True) if chunk.choices
        )
        assert streamed == (choice.message.content or "") and choice.model_extra == {}
        if choice.finish_reason == "stop":
            jsonschema.validate(json.loads(streamed), VERDICT)
        else:
            assert choice.finish_reason == "tool_calls" or seed % 2, "arguments without a schema may be of any length"
    asked = {"response_format": FORM, "parallel_tool_calls": False, "temperature": 1.5}
    (choice,) = ask(tooled, model, **asked, tool_choice="required").choices
    assert len(checked(choice.message.tool_calls)) == 1 and choice.message.content is None
    (choice,) = ask(tooled, model, **asked, tool_choice="none").choices
    jsonschema.validate(json.loads(choice.message.content), VERDICT)
    answer = tooled.openai().responses.create(
        model=model,
        input="May it?",
        tools=[{"type": "function", "name": "now", "parameters": NOTHING, "strict": True}],
        parallel_tool_calls=False,
        text={"format": {"type": "json_schema", "name": "verdict", "strict": True, "schema": VERDICT}},
    )
    if answer.output_text:
        jsonschema.validate(json.loads(answer.output_text), VERDICT)
    else:
        assert answer.output[0].type == "function_call"


def test_a_schema_beside_tools_that_cannot_be_used_is_named(tooled: Appliance) -> None:
    """By the field that it stands in; a tool's own schema by ``tools`` (control)."""
    odd = {"type": "object", "properties": {"a": {"not": {}}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": odd}}
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": odd}}
    cases: list[Any] = [({"response_format": form}, "response_format.json_schema.schema"), ({"tools": [tool]}, "tools")]
    for fields, param in cases:
        with pytest.raises(openai.BadRequestError) as refused:
            ask(tooled, "hermes", **fields)
        assert (refused.value.code, refused.value.param) == ("invalid_grammar", param)


def test_reasoning_is_told_from_the_answer(tooled: Appliance) -> None:
    """A model whose prompt begins inside its reasoning, and that never ends it: all of it is reasoning, each token is
    counted as such, and the content is empty. Control: another model has none."""
    answer = ask(tooled, "thinking", tools=[], max_tokens=40, seed=3)
    message = answer.choices[0].message
    assert not message.content and message.model_extra["reasoning_content"]
    assert answer.usage.completion_tokens_details.reasoning_tokens == answer.usage.completion_tokens == 40
    other = ask(tooled, "hermes", tools=[], max_tokens=40, seed=2)
    assert other.choices[0].message.model_extra == {} and other.usage.completion_tokens_details is None


def test_structure_of_a_model_that_reasons_is_content(tooled: Appliance) -> None:
    """A prompt that begins the reasoning, and an answer that has to follow a schema: it is content from its first
    token, and none of it is reasoning. Control: without the schema all of it is."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SEARCH}}
    answer = ask(tooled, "thinking", tools=[], response_format=form)
    jsonschema.validate(json.loads(answer.choices[0].message.content), SEARCH)
    assert answer.choices[0].message.model_extra == {} and answer.usage.completion_tokens_details is None
    assert ask(tooled, "thinking", tools=[], max_tokens=5).choices[0].message.model_extra


@pytest.mark.full
def test_a_reading_outlives_its_sandbox(tooled: Appliance) -> None:
    """The text sandbox is killed in the middle of an answer that it reads, as there are tools: another one reads on
    from where it had come to, and the answer is that of an undisturbed request: nothing is lost or said twice."""
    for seed in range(5, 25):  # which of them is long is a matter of the processor's last bits
        fields = {"tools": LOOSE, "max_tokens": 600, "seed": seed}
        whole = ask(tooled, "thinking", **fields).choices[0].message.model_extra["reasoning_content"]
        if len(whole) > 200:
            break
    before = next(one for one in tooled.status()["models"] if one["name"] == "thinking")["text"]["generation"]
    told = ""
    for number, chunk in enumerate(ask(tooled, "thinking", stream=True, **fields)):
        if number == 3:
            os.kill(tooled.sandbox_pid("text", "thinking"), signal.SIGKILL)
        (choice,) = chunk.choices
        told += (choice.delta.model_extra or {}).get("reasoning_content", "")
    assert told == whole and len(whole) > 200
    after = next(one for one in tooled.status()["models"] if one["name"] == "thinking")["text"]["generation"]
    assert after > before


def test_an_agent_of_the_messages_api_goes_round(tooled: Appliance) -> None:
    """Anthropic's client: a call that is held to its schema, the same streamed, its result, and the answer."""
    import anthropic  # for two seconds: by the worker that needs it

    tools: list[Any] = [{"name": name, "input_schema": schema, "strict": True} for name, schema in SCHEMAS.items()]
    client = anthropic.Anthropic(
        base_url=tooled.ready["http"],
        api_key=tooled.key("alpha"),
        max_retries=0,
        http_client=anthropic.DefaultHttpxClient(verify=PLAIN),
    )
    asked: dict[str, Any] = {
        "model": "hermes",
        "max_tokens": 300,
        "messages": QUESTION,
        "tools": tools,
        "tool_choice": {"type": "tool", "name": "search", "disable_parallel_tool_use": True},
    }
    with client, client.messages.stream(**asked) as stream:
        said = stream.get_final_message()
        (call,) = said.content
        assert (said.stop_reason, call.type) == ("tool_use", "tool_use")
        jsonschema.validate(call.input, SEARCH)
        result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "nothing"}]}
        told = [*QUESTION, {"role": "assistant", "content": said.content}, result]
        answer = client.messages.create(**{**asked, "messages": told, "tool_choice": {"type": "auto"}, "max_tokens": 5})
        counted = client.messages.count_tokens(model="hermes", messages=told, tools=tools)
    used = answer.usage
    assert counted.input_tokens == used.input_tokens + used.cache_read_input_tokens
    assert used.cache_read_input_tokens > 0


def test_an_agent_of_the_responses_api_goes_round(tooled: Appliance) -> None:
    """OpenAI's client: a call that is held to its schema, the same streamed, its output, and the answer."""
    tools: list[Any] = [
        {"type": "function", "name": name, "parameters": schema, "strict": True} for name, schema in SCHEMAS.items()
    ]
    client = tooled.openai()
    asked: dict[str, Any] = {"model": "hermes", "tools": tools, "parallel_tool_calls": False, "max_output_tokens": 300}
    with client.responses.stream(**asked, input=QUESTION, tool_choice="required") as stream:
        said = stream.get_final_response()
    (call,) = said.output
    assert (said.status, call.type) == ("completed", "function_call")
    jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    items = [
        *QUESTION,
        {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments},
        {"type": "function_call_output", "call_id": call.call_id, "output": "nothing"},
    ]
    answer = client.responses.create(**{**asked, "input": items, "max_output_tokens": 16, "temperature": 0})
    assert answer.output_text and answer.usage is not None
    counted = client.responses.input_tokens.count(model="hermes", input=items, tools=tools)
    assert counted.input_tokens == answer.usage.input_tokens


def test_grpc_has_the_same_calls(tooled: Appliance) -> None:
    """Tools, a choice, calls as they come in numbered messages, and the reason; a strict schema holds."""
    tool = pb.Tool(name="search", strict=True, description="Searches")
    tool.parameters.update(SEARCH)
    request = pb.GenerateRequest(
        model="hermes",
        conversation=pb.Conversation(
            messages=[pb.ChatMessage(role=pb.ROLE_USER, content="?")], tools=[tool, pb.Tool(name="now")]
        ),
        tool_choice=pb.ToolChoice(mode=pb.TOOL_MODE_REQUIRED, only=["search"], parallel=False),
        max_output_tokens=400,
    )
    with grpc.insecure_channel(tooled.ready["grpc"]) as channel:
        events = list(
            inference_pb2_grpc.InferenceServiceStub(channel).Generate(
                request, metadata=[("authorization", f"Bearer {tooled.key('alpha')}")], timeout=60
            )
        )
    assert [event.sequence for event in events] == list(range(len(events)))
    pieces = [piece for event in events for piece in event.delta.tool_calls]
    assert (pieces[0].name, pieces[0].id[:5], {piece.index for piece in pieces}) == ("search", "call_", {0})
    jsonschema.validate(json.loads("".join(piece.arguments for piece in pieces)), SEARCH)
    assert events[-1].finished.reason == pb.FINISH_REASON_TOOL_CALLS


@pytest.mark.full
def test_the_example_s_agent_asks_the_appliance_about_itself(root: Path, tooled: Appliance) -> None:
    """examples/agent.py, run as a program: the model's call names a tool and its arguments by strict grammar, the tool
    is answered by this appliance, and an answer follows. The state and the reason are those of the admin listener."""
    alpha = {"OPENAI_BASE_URL": tooled.ready["http"] + "/v1", "OPENAI_API_KEY": tooled.key("alpha")}

    def ask_agent(tool: str, question: str) -> tuple[Any, str]:
        argv = [sys.executable, str(root / "examples/agent.py"), question, "--model", "hermes", "--look", tool]
        argv += ["--admin", tooled.ready["admin"]]
        done = subprocess.run(
            argv, env={**os.environ, **alpha}, capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == 0, done.stderr[-2_000:]
        called, _, answer = done.stdout.partition("\n")
        assert called.startswith(f"{tool}: ")
        return json.loads(called.removeprefix(f"{tool}: ")), answer.strip()

    found, answer = ask_agent("get_status", "Is everything up?")
    assert {"name": "hermes", "state": "ready"} in found["models"] and answer
    with pytest.raises(openai.AuthenticationError):
        tooled.openai().with_options(api_key="ath_nobody_" + "0" * 64).models.list()
    found, answer = ask_agent("explain_denial", "Why was the last request refused?")
    assert found["request_id"].startswith("req_") and found["reason"] and answer
