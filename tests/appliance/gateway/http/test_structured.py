"""How structured output is asked for over HTTP and gRPC: what each spelling means, and what is refused by name."""

from __future__ import annotations

import json

import pytest

from appliance.common.errors import GrammarTooLargeError, InvalidRequestError
from appliance.gateway.front.request_builder import Stamp
from appliance.gateway.generate_request import Grammar, Operation
from appliance.gateway.grpc.generated import inference_pb2 as pb
from appliance.gateway.grpc.message_mapping import to_request
from appliance.gateway.http.openai import parse
from isolation.ipc.grammar import MAX_GRAMMAR_BYTES, GrammarKind, Whitespace

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"const": "\u00e9"}}}
WRITTEN = '{"type":"object","properties":{"b":{"type":"integer"},"a":{"const":"\u00e9"}}}'.encode()
OBJECT = Grammar(GrammarKind.JSON_SCHEMA, b'{"type":"object"}')


def asked(operation: Operation = Operation.TEXT_COMPLETION, **fields: object) -> Grammar | None:
    """The grammar of a completion, or a chat, with these fields."""
    content = (
        {"prompt": "x"} if operation is Operation.TEXT_COMPLETION else {"messages": [{"role": "user", "content": "x"}]}
    )
    parsed = parse(operation, json.dumps({"model": "m", **content, **fields}).encode(), Stamp("id"))
    assert parsed.ignored == ()
    return parsed.request.grammar


def schema_format(**fields: object) -> dict[str, object]:
    """A ``response_format`` of a schema."""
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, **fields}}


@pytest.mark.parametrize("operation", Operation)
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": None, "guided_json": None, "structured_outputs": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"structured_outputs": {}}, None),
        ({"structured_outputs": {"json": None, "json_object": False, "regex": "a"}}, Grammar(GrammarKind.REGEX, b"a")),
        ({"response_format": {"type": "json_object"}}, OBJECT),
        ({"structured_outputs": {"json_object": True}}, OBJECT),
        ({"response_format": schema_format()}, Grammar(GrammarKind.JSON_SCHEMA_LENIENT, WRITTEN)),
        ({"response_format": schema_format(strict=None)}, Grammar(GrammarKind.JSON_SCHEMA_LENIENT, WRITTEN)),
        ({"response_format": schema_format(strict=True)}, Grammar(GrammarKind.JSON_SCHEMA, WRITTEN)),
        ({"guided_json": SCHEMA}, Grammar(GrammarKind.JSON_SCHEMA, WRITTEN)),
        ({"guided_json": '{"type": "null"}'}, Grammar(GrammarKind.JSON_SCHEMA, b'{"type": "null"}')),
        ({"structured_outputs": {"json": SCHEMA}}, Grammar(GrammarKind.JSON_SCHEMA, WRITTEN)),
        ({"guided_regex": "[\u00e9]"}, Grammar(GrammarKind.REGEX, "[\u00e9]".encode())),
        ({"guided_grammar": "start: x"}, Grammar(GrammarKind.LARK, b"start: x")),
        ({"structured_outputs": {"grammar": "start: x"}}, Grammar(GrammarKind.LARK, b"start: x")),
        ({"guided_choice": ["a", "b"]}, Grammar(GrammarKind.CHOICE, b'["a","b"]')),
        ({"structured_outputs": {"choice": ["a"]}}, Grammar(GrammarKind.CHOICE, b'["a"]')),
    ],
)
def test_what_each_spelling_means(operation: Operation, fields: dict[str, object], expected: Grammar | None) -> None:
    """Properties keep their order, since answers follow it; a schema that is not strict is lenient."""
    assert asked(operation, **fields) == expected


@pytest.mark.parametrize("operation", Operation)
@pytest.mark.parametrize(
    "form",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": schema_format()},
        {"response_format": schema_format(strict=True)},
        {"guided_json": SCHEMA},
        {"structured_outputs": {"json": SCHEMA}},
    ],
)
def test_whitespace_goes_with_every_form_of_json(operation: Operation, form: dict[str, object]) -> None:
    """Compact by itself, by null and by name; flexible by name alone. The rest of the grammar is the same."""
    compact = asked(operation, **form)
    assert compact is not None
    assert compact.whitespace is Whitespace.COMPACT
    assert asked(operation, **form, whitespace="compact") == asked(operation, **form, whitespace=None) == compact
    flexible = asked(operation, **form, whitespace="flexible")
    assert flexible == Grammar(compact.kind, compact.source, Whitespace.FLEXIBLE)


@pytest.mark.parametrize("value", ["", "Compact", "unbounded", True, 1, ["compact"], {"compact": 1}])
def test_whitespace_of_no_known_kind_is_refused(value: object) -> None:
    """The error names the field and the values that there are."""
    with pytest.raises(InvalidRequestError, match="whitespace must be one of: compact, flexible") as raised:
        asked(guided_json=SCHEMA, whitespace=value)
    assert raised.value.param == "whitespace"


@pytest.mark.parametrize(
    "fields", [{}, {"guided_regex": "a"}, {"guided_choice": ["a"]}, {"guided_grammar": "start: x"}]
)
def test_whitespace_without_json_is_refused(fields: dict[str, object]) -> None:
    """It would have no effect; the error says what it goes with."""
    with pytest.raises(InvalidRequestError, match="outputs that are JSON") as raised:
        asked(**fields, whitespace="compact")
    assert raised.value.param == "whitespace"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": ["text"]}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"response_format": schema_format(strict="yes")}, "response_format.json_schema.strict"),
        ({"structured_outputs": ["a"]}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
        ({"guided_regex": ["a"]}, "guided_regex"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": "\ud800"}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, object], param: str) -> None:
    """Malformed, asked for twice, or together with what contradicts it."""
    with pytest.raises(InvalidRequestError) as raised:
        asked(**fields)
    assert raised.value.param == param


def test_a_grammar_has_a_largest_size() -> None:
    """The last byte that fits passes, one more does not, and the error says both numbers."""
    assert asked(guided_regex="a" * MAX_GRAMMAR_BYTES) is not None
    with pytest.raises(GrammarTooLargeError) as raised:
        asked(guided_regex="a" * (MAX_GRAMMAR_BYTES + 1))
    assert raised.value.details == {"limit_bytes": "262144", "actual_bytes": "262145"}
    assert raised.value.wire.code == "grammar_too_large"


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (pb.StructuredOutput(json_schema="{}"), Grammar(GrammarKind.JSON_SCHEMA, b"{}")),
        (pb.StructuredOutput(json_schema="{}", lenient=True), Grammar(GrammarKind.JSON_SCHEMA_LENIENT, b"{}")),
        (pb.StructuredOutput(json_object=pb.JsonObject()), OBJECT),
        (pb.StructuredOutput(json_object=pb.JsonObject(), whitespace=pb.WHITESPACE_COMPACT), OBJECT),
        (
            pb.StructuredOutput(json_schema="{}", whitespace=pb.WHITESPACE_FLEXIBLE),
            Grammar(GrammarKind.JSON_SCHEMA, b"{}", Whitespace.FLEXIBLE),
        ),
        (pb.StructuredOutput(regex="a"), Grammar(GrammarKind.REGEX, b"a")),
        (pb.StructuredOutput(lark="start: x"), Grammar(GrammarKind.LARK, b"start: x")),
        (pb.StructuredOutput(choice=pb.Choice(values=["a", "b"])), Grammar(GrammarKind.CHOICE, b'["a","b"]')),
        (None, None),
    ],
)
def test_grpc_forms(form: pb.StructuredOutput | None, expected: Grammar | None) -> None:
    """The typed API's forms are the same grammars."""
    request = pb.GenerateRequest(model="m", text="x", structured_output=form)
    assert to_request(request, Stamp("id")).grammar == expected


@pytest.mark.parametrize(
    "form", [pb.StructuredOutput(), pb.StructuredOutput(regex=""), pb.StructuredOutput(choice=pb.Choice())]
)
def test_grpc_refusals(form: pb.StructuredOutput) -> None:
    """An absent or empty form is refused by its name."""
    with pytest.raises(InvalidRequestError) as raised:
        to_request(pb.GenerateRequest(model="m", text="x", structured_output=form), Stamp("id"))
    assert raised.value.param.startswith("structured_output")


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (pb.StructuredOutput(json_schema="{}", whitespace=9), "WHITESPACE_COMPACT or WHITESPACE_FLEXIBLE"),  # type: ignore[arg-type]
        (pb.StructuredOutput(regex="a", whitespace=pb.WHITESPACE_COMPACT), "outputs that are JSON"),
    ],
)
def test_grpc_whitespace_refusals(form: pb.StructuredOutput, words: str) -> None:
    """A number that the enumeration has not, and whitespace of what is no JSON."""
    with pytest.raises(InvalidRequestError, match=words) as raised:
        to_request(pb.GenerateRequest(model="m", text="x", structured_output=form), Stamp("id"))
    assert raised.value.param == "structured_output.whitespace"
