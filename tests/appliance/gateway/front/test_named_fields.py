"""Every error of validation, over both APIs: one class, and each API's own name of the field at fault."""

from __future__ import annotations

import ast
import json
import re
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor

from appliance.common.errors import InvalidRequestError
from appliance.gateway.front import request_builder, tool_builder
from appliance.gateway.front.request_builder import Stamp
from appliance.gateway.generate_request import Operation
from appliance.gateway.grpc import message_mapping
from appliance.gateway.grpc.generated import inference_pb2 as pb
from appliance.gateway.http import openai, openai_embeddings, scoring, structured, tokenizer_routes, unsupported
from isolation.ipc.grammar import MAX_GRAMMAR_BYTES
from isolation.ipc.sampling import PARAMETERS
from tests.appliance.gateway.front.named_cases import (
    CHAT,
    COUNT,
    EMBED,
    RANK,
    SAID,
    TEXT,
    TOOL_CASES,
    USER,
    Case,
    turns,
)

STAMP = Stamp("req_1", None, 7)

LONG = "x" * ((4 << 20) + 1)


def follow(http: dict[str, Any], http_param: str, grpc_param: str, **form: Any) -> Case:
    """A mistake in what the output shall follow."""
    return Case(grpc_param, http, http_param, {"structured_output": pb.StructuredOutput(**form)}, grpc_param)


def guided(name: str, value: Any, grpc_param: str, **form: Any) -> Case:
    """A mistake in a form of ``structured_outputs``."""
    at = f"structured_outputs.{name}"
    return follow({"structured_outputs": {name: value}}, at, grpc_param, **form)


BIG = "x" * (MAX_GRAMMAR_BYTES + 1)
SCALARS = [one for one in PARAMETERS if one.name != "seed"]
"""The seed has no wrong value over gRPC."""


def arguments(**values: Any) -> pb.Conversation:
    """A conversation with arguments of the chat template."""
    conversation = pb.Conversation(messages=[USER])
    conversation.template_arguments.update(values)
    return conversation


def argued(name: str, **values: Any) -> Case:
    """A mistake in the arguments of the chat template."""
    given = {"messages": [SAID], "chat_template_kwargs": values}
    at = "conversation.template_arguments"
    return Case(name, given, "chat_template_kwargs", {"conversation": arguments(**values)}, at, CHAT)


CASES = [
    argued("an argument that is a list", effort=["low"]),
    argued("a long argument", effort="x" * 1_025),
    Case(
        "an argument that is nothing",
        {"messages": [SAID], "chat_template_kwargs": {"effort": None}},
        "chat_template_kwargs",
        {"conversation": arguments(effort=float("inf"))},
        "conversation.template_arguments",
        CHAT,
    ),
    argued("many arguments", **{f"a{number}": 1.0 for number in range(17)}),
    Case("nothing to count", {}, "prompt", {}, "input", COUNT),
    *(
        Case(
            f"{one.name} too large",
            {one.name: one.kind(one.high + 1)},
            one.name,
            {"sampling": pb.Sampling(**{one.name: one.kind(one.high + 1)})},
            f"sampling.{one.name}",
        )
        for one in SCALARS
    ),
    *(
        Case(
            f"{one.name} at its open end",
            {one.name: one.low},
            one.name,
            {"sampling": pb.Sampling(**{one.name: one.low})},
            f"sampling.{one.name}",
        )
        for one in SCALARS
        if one.above
    ),
    Case("no model", {"model": ""}, "model", {"model": ""}, "model"),
    Case("no model to embed with", {"model": ""}, "model", {"model": ""}, "model", EMBED),
    Case("no output", {"max_tokens": 0}, "max_tokens", {"max_output_tokens": 0}, "max_output_tokens"),
    Case(
        "no output of a chat",
        {"max_completion_tokens": 0},
        "max_completion_tokens",
        {**turns(USER), "max_output_tokens": 0},
        "max_output_tokens",
        CHAT,
    ),
    Case("no choices", {"n": 0}, "n", {"choices": 0}, "choices"),
    Case(
        "the product of both",
        {"n": 16, "max_tokens": 1 << 20},
        "n",
        {"choices": 16, "max_output_tokens": 1 << 20},
        "choices",
    ),
    Case(
        "choices that follow a grammar",
        {"n": 2, "guided_regex": "a"},
        "n",
        {"choices": 2, "structured_output": pb.StructuredOutput(regex="a")},
        "choices",
    ),
    Case("logprobs", {"logprobs": 21}, "logprobs", {"logprobs": 21}, "logprobs"),
    Case(
        "logprobs of a chat",
        {"logprobs": True, "top_logprobs": 21},
        "top_logprobs",
        {**turns(USER), "logprobs": 21},
        "logprobs",
        CHAT,
    ),
    Case("prompt_logprobs", {"prompt_logprobs": 21}, "prompt_logprobs", {"prompt_logprobs": 21}, "prompt_logprobs"),
    Case("many stops", {"stop": ["x"] * 17}, "stop", {"stop": ["x"] * 17}, "stop"),
    Case("an empty stop", {"stop": [""]}, "stop", {"stop": [""]}, "stop"),
    Case("many ids", {"stop_token_ids": [1] * 65}, "stop_token_ids", {"stop_token_ids": [1] * 65}, "stop_token_ids"),
    Case("a large id", {"stop_token_ids": [2**31]}, "stop_token_ids", {"stop_token_ids": [2**31]}, "stop_token_ids"),
    Case("a priority", {"service_tier": "x"}, "service_tier", {"priority": 9}, "priority"),
    Case(
        "a grammar without an end",
        {"ignore_eos": True, "guided_regex": "a"},
        "ignore_eos",
        {"ignore_eos": True, "structured_output": pb.StructuredOutput(regex="a")},
        "ignore_eos",
    ),
    Case(
        "white space of a form that is not JSON",
        {"guided_regex": "a", "whitespace": "flexible"},
        "whitespace",
        {"structured_output": pb.StructuredOutput(regex="a", whitespace=pb.WHITESPACE_FLEXIBLE)},
        "structured_output.whitespace",
    ),
    Case(
        "white space of another kind",
        {"guided_json": {}, "whitespace": "none"},
        "whitespace",
        {"structured_output": pb.StructuredOutput(json_schema="{}", whitespace=9)},
        "structured_output.whitespace",
    ),
    Case("no prompt", {"prompt": None}, "prompt", {"text": None}, "input"),
    Case("no messages", {"messages": []}, "messages", turns(), "conversation.messages", CHAT),
    Case(
        "many messages", {"messages": [SAID] * 1025}, "messages", turns(*[USER] * 1025), "conversation.messages", CHAT
    ),
    Case(
        "nobody speaks",
        {"messages": [SAID, {"content": "x"}]},
        "messages[1].role",
        turns(USER, pb.ChatMessage(content="x")),
        "conversation.messages[1].role",
        CHAT,
    ),
    Case(
        "a long name",
        {"messages": [{**SAID, "name": "n" * 65}]},
        "messages[0].name",
        turns(pb.ChatMessage(role=pb.ROLE_USER, content="x", name="n" * 65)),
        "conversation.messages[0].name",
        CHAT,
    ),
    Case(
        "a long conversation",
        {"messages": [{**SAID, "content": LONG}]},
        "messages",
        turns(pb.ChatMessage(role=pb.ROLE_USER, content=LONG)),
        "conversation.messages",
        CHAT,
    ),
    Case("a long prompt", {"prompt": LONG}, "prompt", {"text": LONG}, "text"),
    Case("no ids", {"prompt": []}, "prompt", {"token_ids": pb.TokenIds()}, "token_ids.ids"),
    Case("a large id", {"prompt": [2**31]}, "prompt", {"token_ids": pb.TokenIds(ids=[2**31])}, "token_ids.ids"),
    Case(
        "too many ids",
        {"prompt": [1] * ((1 << 20) + 1)},
        "prompt",
        {"token_ids": pb.TokenIds(ids=[1] * ((1 << 20) + 1))},
        "token_ids.ids",
    ),
    guided("json", "", "structured_output.json_schema", json_schema=""),
    guided("regex", "", "structured_output.regex", regex=""),
    guided("grammar", "", "structured_output.lark", lark=""),
    guided("regex", BIG, "structured_output.regex", regex=BIG),
    guided("choice", [], "structured_output.choice.values", choice=pb.Choice()),
    guided("choice", [""], "structured_output.choice.values", choice=pb.Choice(values=[""])),
    guided("choice", [BIG], "structured_output.choice.values", choice=pb.Choice(values=[BIG])),
    follow({"response_format": {}}, "response_format", "structured_output"),
    Case("no texts", {"input": []}, "input", {"inputs": []}, "inputs", EMBED),
    Case("many texts", {"input": ["x"] * 2049}, "input", {"inputs": [pb.EmbedInput(text="x")] * 2049}, "inputs", EMBED),
    Case(
        "an empty text",
        {"input": ["x", ""]},
        "input[1]",
        {"inputs": [pb.EmbedInput(text="x"), pb.EmbedInput()]},
        "inputs[1]",
        EMBED,
    ),
    Case("a long text", {"input": [LONG]}, "input[0]", {"inputs": [pb.EmbedInput(text=LONG)]}, "inputs[0].text", EMBED),
    Case(
        "a text of no ids",
        {"input": [[]]},
        "input[0]",
        {"inputs": [pb.EmbedInput(token_ids=pb.TokenIds())]},
        "inputs[0].token_ids.ids",
        EMBED,
    ),
    Case("dimensions", {"dimensions": 0}, "dimensions", {"dimensions": 0}, "dimensions", EMBED),
    Case("no query", {"query": ""}, "query", {"query": ""}, "query", RANK),
    Case("no documents", {"documents": []}, "documents", {"documents": []}, "documents", RANK),
    Case("many documents", {"documents": ["x"] * 2049}, "documents", {"documents": ["x"] * 2049}, "documents", RANK),
    Case("an empty document", {"documents": ["x", ""]}, "documents[1]", {"documents": ["x", ""]}, "documents[1]", RANK),
    Case("a long document", {"documents": [LONG]}, "documents[0]", {"documents": [LONG]}, "documents[0]", RANK),
    Case("more of the best than there can be", {"top_n": 2049}, "top_n", {"top_n": 2049}, "top_n", RANK),
    *TOOL_CASES,
]


PAIR = {"query": "x", "documents": ["x"]}


def by_http(case: Case) -> InvalidRequestError:
    """The error of the case's JSON."""
    least = {CHAT: {"messages": [SAID]}, TEXT: {"prompt": "x"}, EMBED: {"input": "x"}, COUNT: {}, RANK: PAIR}[case.kind]
    body = json.dumps({"model": "m", **least, **case.http}).encode()
    operation = Operation.CHAT if case.kind == CHAT else Operation.TEXT_COMPLETION
    with pytest.raises(InvalidRequestError) as refused:
        if case.kind == EMBED:
            openai_embeddings.parse(body, STAMP)
        elif case.kind == RANK:
            scoring.parse_rerank(body, STAMP)
        elif case.kind == COUNT:
            tokenizer_routes.parse_tokenize(body, STAMP)
        else:
            openai.parse(operation, body, STAMP)
    return refused.value


def by_grpc(case: Case) -> InvalidRequestError:
    """The error of the case's message."""
    least = {
        CHAT: {},
        TEXT: {} if "token_ids" in case.grpc else {"text": "x"},
        EMBED: {"inputs": [pb.EmbedInput(text="x")]},
        COUNT: {},
        RANK: PAIR,
    }
    fields = {"model": "m", **least[case.kind], **case.grpc}
    with pytest.raises(InvalidRequestError) as refused:
        if case.kind == EMBED:
            message_mapping.to_embed_request(pb.EmbedRequest(**fields), STAMP)
        elif case.kind == RANK:
            message_mapping.to_score_request(pb.RerankRequest(**fields), STAMP)
        elif case.kind == COUNT:
            message_mapping.to_tokenizer_request(pb.CountTokensRequest(**fields), STAMP)
        else:
            message_mapping.to_request(pb.GenerateRequest(**fields), STAMP)
    return refused.value


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_api_names_its_own_field(case: Case) -> None:
    """Both refuse the same mistake with the same class; ``param`` and message speak of the caller's own fields."""
    http, grpc = by_http(case), by_grpc(case)
    assert type(http) is type(grpc)
    assert (http.param, grpc.param) == (case.http_param, case.grpc_param)
    messages = {EMBED: pb.EmbedRequest, COUNT: pb.CountTokensRequest, RANK: pb.RerankRequest}
    assert exists(case.grpc_param, messages.get(case.kind, pb.GenerateRequest).DESCRIPTOR)
    assert identifiers(grpc.message) <= GRPC_NAMES, grpc.message
    assert identifiers(http.message) <= HTTP_NAMES, http.message
    assert len(http.message) < 500 and len(grpc.message) < 500, "what was sent is not repeated"


def exists(path: str, message: Descriptor) -> bool:
    """Whether a path of fields leads somewhere in the .proto; its last part may be a oneof."""
    name, _, rest = re.sub(r"\[\d+\]", "", path).partition(".")
    if name in message.oneofs_by_name:
        return not rest
    found = message.fields_by_name.get(name)
    inside = found.message_type if found is not None else None
    return found is not None and (not rest or (inside is not None and exists(rest, inside)))


def test_paths_that_lead_nowhere_are_seen() -> None:
    """Control: OpenAI's names, and fields of another message, are no paths."""
    for path in ("max_tokens", "n", "messages", "conversation.role", "text.ids", "input.text"):
        assert not exists(path, pb.GenerateRequest.DESCRIPTOR)


def identifiers(text: str) -> set[str]:
    """Words of a message that only a field, an enumeration or a value of one has: those with an underscore."""
    return {word for word in re.findall(r"[A-Za-z_]+", text) if "_" in word.strip("_")}


def _names(messages: dict[str, Descriptor]) -> set[str]:
    return {one.name for message in messages.values() for one in message.fields}


GRPC_NAMES = _names(dict(pb.DESCRIPTOR.message_types_by_name)) | {
    value.name for kind in pb.DESCRIPTOR.enum_types_by_name.values() for value in kind.values
}
HTTP_NAMES = (
    set().union(
        *openai._SERVED.values(),
        structured.FIELDS,
        openai_embeddings._SERVED,
        scoring.RERANK_FIELDS,
        unsupported.FIELDS,
    )
    | set(structured._FORMATS)
    | {"structured_outputs", "tool_calls", "tool_call_id", "allowed_tools"}
)


def test_names_of_one_api_are_not_the_other_s() -> None:
    """Control: the sets that tell the two apart do differ."""
    assert {"max_output_tokens", "ROLE_USER", "json_schema"} <= GRPC_NAMES
    assert {"max_tokens", "top_logprobs", "structured_outputs"} <= HTTP_NAMES - GRPC_NAMES
    assert "max_output_tokens" not in HTTP_NAMES


def raises_of(module: ModuleType) -> dict[int, str]:
    """Lines of a module at which an error is raised, and the function of each."""
    assert module.__file__ is not None
    body = ast.parse(Path(module.__file__).read_text()).body
    functions = [node for node in body if isinstance(node, ast.FunctionDef)]
    return {node.lineno: one.name for one in functions for node in ast.walk(one) if isinstance(node, ast.Raise)}


def unmet(errors: list[InvalidRequestError], module: ModuleType) -> set[str]:
    """Functions of a module with a ``raise`` that none of the errors came from."""
    frames = [one for error in errors for one in traceback.walk_tb(error.__traceback__)]
    met = {line for frame, line in frames if frame.f_code.co_filename == module.__file__}
    return {name for line, name in raises_of(module).items() if line not in met}


def test_the_table_is_whole() -> None:
    """Every ``raise`` of the common validation, and of the message mapping, is met by a case. Over HTTP embeddings
    without a text are refused before; half a surrogate pair is refused by protobuf itself; HTTP has no message for one
    model."""
    http, grpc = [by_http(case) for case in CASES], [by_grpc(case) for case in CASES]
    assert unmet(http, request_builder) == {"build_embed", "utf8"}
    assert unmet(grpc, request_builder) == {"utf8"}
    assert unmet(http, tool_builder) == unmet(grpc, tool_builder) == set()
    assert unmet(grpc, message_mapping) == {"to_model"}
    assert "checked" in unmet(grpc[:1], request_builder), "control: a table of one case leaves something out"


@pytest.mark.parametrize(
    "at", [unsupported.FIELDS, unsupported.MESSAGE_FIELDS, unsupported.EMBED_FIELDS, unsupported.SCORE_FIELDS]
)
def test_unsupported_fields_say_what_to_do_instead(at: dict[str, unsupported.Unsupported]) -> None:
    """Each is refused by its name with its advice, which names only fields that are served."""
    for name, one in at.items():
        with pytest.raises(InvalidRequestError) as refused:
            unsupported.refuse_unsupported({name: "something"}, at, "here.")
        assert refused.value.param == f"here.{name}"
        assert refused.value.message.startswith(f"here.{name} is not supported")
        assert refused.value.message.endswith(f"; {one.advice}")
        assert identifiers(one.advice) <= HTTP_NAMES - unsupported.FIELDS.keys(), one.advice
        for value in (None, False, "", [], {}, *one.harmless):
            unsupported.refuse_unsupported({name: value}, at)


@pytest.mark.parametrize(
    ("fields", "advice"),
    [
        ({"messages": [{"role": "function", "content": "4"}]}, "system, developer, user, assistant, tool"),
        ({"functions": [{}]}, "offer the functions as tools"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 'in a part {"type": "text"'),
        ({"structured_outputs": {"structural_tag": "{}"}}, "use one of: json, json_object, regex, choice, grammar"),
        ({"stream": True, "prompt_logprobs": 1}, "leave out prompt_logprobs or stream"),
        ({"echo": True}, "/v1/completions"),
    ],
)
def test_values_that_are_not_served_say_what_to_do_instead(fields: dict[str, Any], advice: str) -> None:
    """Roles, parts and forms of other servers."""
    body = json.dumps({"model": "m", "messages": [SAID], **fields}).encode()
    with pytest.raises(InvalidRequestError) as refused:
        openai.parse(Operation.CHAT, body, STAMP)
    assert advice in refused.value.message
