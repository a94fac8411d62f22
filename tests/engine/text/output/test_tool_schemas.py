"""Schemas of tools in grammars: hostile names and texts, references, keywords without a rule, odd and malformed ones,
and many of them."""

from __future__ import annotations

import time
from typing import Any

import pytest

from engine.errors import RequestRejectedError
from isolation.ipc.messages import FailureCode
from tests.engine.text.output.held import IN_JSON, check_calls, each_format, each_spelling, held, tools
from tests.engine.text.output.writing import spelt, write

HOSTILE = (
    '"',
    '" | "x',
    "\\",
    "\n",
    'a\nstart: "x"',
    "</parameter>",
    "<[256]>",
    "%json {}",
    "//",
    "#",
    "'",
    "]",
    '<|"|>',
    "<escape>",
    "<tool_call|>",
    "</arg_value>",
    "</arg_key>",
    "\uff5cDSML\uff5c",
    "</\uff5cDSML\uff5cparameter>",
    "<|tool_call_end|>",
    "a>b",
    "a:b",
    " a ",
    "\u2028",
    "\x00",
    "\x7f",
    "{",
    "}",
    "",
)


@pytest.mark.parametrize("share", [2, pytest.param(1, marks=pytest.mark.full)])
@each_spelling
@each_format
def test_names_and_texts_of_a_tenant_are_only_texts(name: str, special: bool, share: int) -> None:
    """Whatever stands in the name of a parameter or in a listed text, the outputs that pass are calls with exactly it,
    or the schema is refused; no special token and no rule comes from it. Every run has each text in each format, every
    second one with special tokens and the others without; the full counts have all with both."""
    texts = HOSTILE[special % share :: share]
    begin = "<|channel|>commentary" if name == "harmony" and not special else ""
    taken = 0
    for seed, text in enumerate(texts):
        properties: dict[str, Any] = {
            "a": {"type": "string", "enum": [text, "ok"]},
            "b": {"enum": [[text], {"b": text}]},
            text: {"type": "boolean"},
        }
        for needed in (["a", "b"], [text]):
            used = properties if len(needed) > 1 else {text: properties[text]}
            schemas = {"f": {"type": "object", "properties": used, "required": needed, "additionalProperties": False}}
            # A name that cannot be written is left out, or refused where the tool is strict.
            source = tools(schemas, strict=needed == [text], required=True, parallel=False)
            try:
                grammar = held(name, source, special=special)
            except RequestRejectedError as error:
                assert error.code is FailureCode.INVALID
                assert name not in IN_JSON
                continue
            taken += 1
            found = grammar.read(grammar.walk(seed, begin))
            check_calls(found, schemas)
            assert len(found.calls) == 1
    assert taken > len(texts) / 2


REFERRING: dict[str, Any] = {
    "type": "object",
    "properties": {"day": {"$ref": "#/$defs/day"}},
    "required": ["day"],
    "$defs": {"day": {"type": "string", "enum": ["mon", "tue"]}},
}
IN_TAGS = frozenset(("tagged", "glm", "dsml", "dsml-v4"))
"""Formats with each argument in tags."""

IN_NOTATION = frozenset(("gemma-4", "function-gemma", "llama-4", "lfm2"))
"""Formats with a notation of their own for all values."""


@each_format
def test_references_within_a_schema(name: str) -> None:
    """A strict tool is held to what its schema refers to, or refused; one that is not has any value."""
    right = write(name, [("f", {"day": "mon"})])
    if name in IN_TAGS:
        # What a schema does not have as text at once stands there in JSON.
        right = right.replace("mon", '"mon"').replace('string="true"', 'string="false"')
    wrong = right.replace("mon", "sun")
    if name in IN_NOTATION:
        with pytest.raises(RequestRejectedError, match=r"\$ref") as raised:
            held(name, tools({"f": REFERRING}, required=True))
        assert raised.value.code is FailureCode.INVALID
        grammar = held(name, tools({"f": REFERRING}, strict=False, required=True))
        assert grammar.passes(wrong)
    else:
        grammar = held(name, tools({"f": REFERRING}, required=True))
        assert not grammar.passes(wrong)
    assert grammar.passes(right)
    assert grammar.read(grammar.spelt.ids(right)).calls == [("f", {"day": "mon"})]


UNKEPT = {
    "pattern": {"type": "string", "pattern": "^a$", "maxLength": 3},
    "not": {"type": "string", "not": {"const": "a"}, "maxLength": 3},
    "uniqueItems": {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "maxItems": 2},
    "oneOf": {"oneOf": [{"type": "integer", "maximum": 9}, {"type": "number", "maximum": 9}]},
}


@each_format
@pytest.mark.parametrize("keyword", UNKEPT)
def test_keywords_without_a_rule_are_refused_or_passed_over(name: str, keyword: str) -> None:
    """A strict tool with a keyword that calls cannot be held to is refused; else the keyword has no effect, and every
    output is still a call."""
    schema = {"type": "object", "properties": {"a": UNKEPT[keyword]}, "required": ["a"], "additionalProperties": False}
    if keyword != "pattern" or name not in IN_JSON:
        with pytest.raises(RequestRejectedError) as raised:
            held(name, tools({"f": schema}, required=True))
        assert raised.value.code is FailureCode.INVALID
    grammar = held(name, tools({"f": schema}, strict=False, required=True))
    for seed in range(2):
        found = grammar.read(grammar.walk(seed))
        assert not found.refused
        assert {called for called, _ in found.calls} == {"f"}


@each_format
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"description": "no type"},
        {"properties": {"a": {"type": "boolean", "x-colour": 1, "deprecated": True}}, "additionalProperties": False},
        {"type": ["object", "null"], "properties": {}, "additionalProperties": False},
        {"type": "object", "required": ["b"], "properties": {"b": {"type": "null"}}, "additionalProperties": False},
        {"type": "object", "properties": {"a": {"const": "x"}, "c": {"const": 1.0}}, "required": ["a", "c"]},
        {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "null"}, "maxItems": 1}}},
        {"type": "object", "properties": {"a": {"type": "array", "maxItems": 0}}, "required": ["a"]},
        {"type": "object", "properties": {"a": {"type": "string", "minLength": 2.0, "maxLength": 2}}},
    ],
    ids=str,
)
def test_schemas_of_every_kind_give_objects(name: str, strict: bool, schema: dict[str, Any]) -> None:
    """Schemas without types, with unknown keywords, constants and narrow bounds: the arguments are an object that
    satisfies them."""
    bounded = {**schema, "additionalProperties": False} if schema.get("properties") else schema
    grammar = held(name, tools({"f": bounded}, strict=strict, required=True, parallel=False))
    for seed in range(2):
        found = grammar.read(grammar.walk(seed))
        check_calls(found, {"f": bounded})
        assert isinstance(found.calls[0][1], dict)


@each_format
@pytest.mark.parametrize(
    "part",
    [
        {"type": "wrong"},
        {"type": [{}]},
        {"type": "string", "maxLength": float("inf")},
        {"type": "string", "minLength": 3, "maxLength": 2},
        {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 2},
        {"type": "string", "maxLength": -1},
        {"type": "array", "minItems": "1"},
        {"$ref": "http://localhost/other.json"},
    ],
    ids=str,
)
def test_schemas_that_nothing_satisfies_are_refused(name: str, part: dict[str, Any]) -> None:
    """A strict tool with a malformed schema gets an error with a reason."""
    schema = {"type": "object", "properties": {"a": part}, "required": ["a"]}
    with pytest.raises(RequestRejectedError) as raised:
        held(name, tools({"f": schema}, required=True))
    assert raised.value.code is FailureCode.INVALID
    assert raised.value.reason


@each_format
def test_many_tools_compile_quickly(name: str) -> None:
    """The most tools that a request may have, with small schemas, take a part of a second."""
    small = {
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": {"type": "integer"}, "c": {"enum": ["x", "y"]}},
        "required": ["a"],
    }
    source = tools({f"tool_number_{number}": small for number in range(128)}, strict=False)
    spelt(name, special=True)
    begun = time.process_time()
    grammar = held(name, source)
    spent = time.process_time() - begun
    assert grammar.passes(write(name, [("tool_number_127", {"a": "b"})]))
    assert spent < 2
