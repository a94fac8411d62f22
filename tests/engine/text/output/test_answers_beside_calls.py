"""Outputs that call tools or answer under a schema: both pass a grammar, and are told apart when they are read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import jsonschema
import pytest

from engine.errors import RequestRejectedError
from isolation.ipc.grammar import MaskState
from isolation.ipc.messages import FailureCode
from isolation.ipc.output import Thinking
from tests.engine.text.output.held import (
    ALONE,
    BARE,
    FULL,
    LEAST,
    SCHEMAS,
    SEEDS,
    Held,
    check_calls,
    each_format,
    each_spelt,
    held,
    tools,
)
from tests.engine.text.output.reading import Read
from tests.engine.text.output.writing import write

VERDICT: dict[str, Any] = {
    "type": "object",
    "properties": {"allowed": {"type": "boolean"}, "because": {"type": "string", "maxLength": 12}},
    "required": ["allowed", "because"],
    "additionalProperties": False,
}
LIKE_A_CALL: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"enum": ["get", "get_weather"]},
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
        "arguments": {"type": "object", "properties": {}, "additionalProperties": False},
    },
    "required": ["name", "parameters", "arguments"],
    "additionalProperties": False,
}
"""A schema of answers that say what a call says."""

LISTED = {"type": "array", "items": {"enum": ["get", True]}, "minItems": 1, "maxItems": 2}
"""Answers that begin as a list of calls does."""


def offered(schema: object, *, strict: bool = True, **options: bool) -> bytes:
    """Describe tools, and what answers follow."""
    answer = {"schema": schema if isinstance(schema, str) else json.dumps(schema), "strict": strict}
    return json.dumps({**json.loads(tools(**options)), "answer": answer}).encode()


def final(name: str) -> str:
    """Return what stands before an answer."""
    return "<|channel|>final<|message|>" if name == "harmony" else ""


def compile_or_skip(name: str, source: bytes, *, special: bool = True, **options: Any) -> Held:
    """Compile the grammar; Harmony without special tokens refuses it, as no text could end its answers."""
    if name != "harmony" or special:
        return held(name, source, special=special, **options)
    with pytest.raises(RequestRejectedError) as refused:
        held(name, source, special=special, **options)
    assert refused.value.code is FailureCode.INVALID
    pytest.skip("refused, as it has to be")


@each_spelt
def test_calls_and_answers_pass(name: str, special: bool) -> None:
    """Calls as templates write them, and an answer that satisfies its schema, are read as what they are; text, an
    answer that does not satisfy it, and either behind the other do not pass."""
    grammar = compile_or_skip(name, offered(VERDICT), special=special)
    begin = final(name)
    for calls in ([FULL], [LEAST], [BARE], [BARE, FULL, LEAST]):
        if len(calls) == 1 or name not in ALONE:
            text = write(name, calls)
            assert grammar.passes(text), text
            assert grammar.read(grammar.spelt.ids(text)) == Read(calls=calls)
    answer = '{"allowed":true,"because":"x"}'
    assert grammar.passes(begin + answer)
    assert grammar.read(grammar.spelt.ids(begin + answer)) == Read(answer)
    for wrong in ("It rains.", '{"allowed":1,"because":"x"}', '{"allowed": true}', "", f"{answer}x"):
        assert not grammar.passes(begin + wrong), wrong
    assert not grammar.passes(f"It rains. {write(name, [LEAST])}")
    assert not grammar.passes(begin + answer + write(name, [LEAST]))
    assert not grammar.passes(write(name, [LEAST]) + answer)


@each_spelt
@pytest.mark.parametrize("schema", [VERDICT, LIKE_A_CALL, LISTED], ids=["verdict", "like a call", "listed"])
def test_random_outputs_are_one_or_the_other(name: str, special: bool, schema: Mapping[str, Any]) -> None:
    """Whatever the masks allow is calls that satisfy their schemas, or an answer that satisfies its own, also where
    answers look like calls; nothing is refused when it is read."""
    grammar = compile_or_skip(name, offered(schema), special=special)
    call = write(name, [LEAST])
    for seed in range(SEEDS):
        answered = grammar.read(grammar.walk(seed, final(name) + ("[" if schema is LISTED else '{"')))
        if not answered.calls:
            jsonschema.validate(json.loads(answered.content), schema)
        called = grammar.read(grammar.walk(seed, call[: call.index("get_weather") + len("get")]))
        check_calls(called)
        assert called.calls and not called.content


@each_format
def test_an_answer_that_spells_a_call_is_none(name: str) -> None:
    """A text in an answer, and an answer whose members are those of a call: content, whole. Control: the same call
    outside of it is one."""
    grammar = held(name, offered({"type": "object"}), special=name == "harmony")
    call = write(name, [LEAST])
    spelt = [{"said": call.replace("<|", "< |") if name == "harmony" else call}, {"name": "get", "parameters": {}}]
    for value in (*spelt, {"name": "get", "arguments": {}}):
        answer = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        assert grammar.passes(final(name) + answer), answer
        assert grammar.read(grammar.spelt.ids(final(name) + answer)) == Read(answer)
    assert grammar.read(grammar.spelt.ids(call)) == Read(calls=[LEAST])


@each_format
def test_a_call_that_has_to_be_made_leaves_no_answer(name: str) -> None:
    """Where a call is required the schema of answers has no effect; without parallel calls one call is the end."""
    grammar = held(name, offered(VERDICT, required=True))
    assert not grammar.passes(final(name) + '{"allowed":true,"because":"x"}')
    assert grammar.passes(write(name, [LEAST]))
    if name not in ALONE:
        grammar = held(name, offered(VERDICT, parallel=False))
        assert not grammar.passes(write(name, [LEAST, BARE]))
        assert grammar.passes(write(name, [LEAST]))


@each_spelt
def test_reasoning_comes_before_both(name: str, special: bool) -> None:
    """Where the prompt has begun the reasoning, it, its end and a call or an answer pass, and are read as such."""
    if name == "harmony":
        pytest.skip("has reasoning of its own")
    grammar = held(name, offered(VERDICT), special=special, thinking=Thinking.BEGUN, thinks=True)
    answer = '{"allowed":true,"because":"</think>"}' if not special else '{"allowed":true,"because":"x"}'
    for space in ("", "\n\n"):
        whole = f"hm {{</think>{space}{answer}"
        assert grammar.passes(whole)
        assert grammar.read(grammar.spelt.ids(whole)) == Read(answer, "hm {")
        whole = f"hm {{</think>{space}{write(name, [LEAST])}"
        assert grammar.passes(whole)
        assert grammar.read(grammar.spelt.ids(whole)) == Read("", "hm {", [LEAST])


def test_harmony_answers_behind_its_reasoning() -> None:
    """A message of reasoning, then the answer under its schema on the final channel."""
    grammar = held("harmony", offered(VERDICT))
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>"
    answer = '{"allowed":true,"because":"x"}'
    assert grammar.passes(thought + answer) and not grammar.passes(thought + "It rains.")
    assert grammar.read(grammar.spelt.ids(thought + answer)) == Read(answer, "hm")


@pytest.mark.parametrize("schema", ["", "{", "[]", "3", "false", '{"type":"wrong"}', '{"not":{}}'])
def test_what_is_no_schema_is_refused(schema: str) -> None:
    """With a reason; a keyword that is not implemented only where the answer is strict."""
    with pytest.raises(RequestRejectedError) as refused:
        held("hermes", offered(schema))
    assert refused.value.code is FailureCode.INVALID and refused.value.reason


def test_a_lenient_answer_passes_over_what_is_not_implemented() -> None:
    """Without ``strict`` such a keyword has no effect; ``true`` is any JSON. Blanks between tokens stay forbidden,
    whatever the schema says of them."""
    schema = {"type": "object", "uniqueItems": True, "x-guidance": {"whitespace_pattern": " "}}
    grammar = held("hermes", offered({**schema, "not": {"const": 1}}, strict=False))
    assert grammar.passes("{}") and not grammar.passes("{ }")
    assert held("hermes", offered("true")).passes("[1]")


@pytest.mark.parametrize("entry", ["text", [], {}, {"schema": {}}, None])
def test_a_malformed_answer_is_refused(entry: object) -> None:
    """What the host describes the answer by is checked as its tools are."""
    source = json.dumps({**json.loads(tools()), "answer": entry}).encode()
    with pytest.raises(RequestRejectedError, match="malformed"):
        held("hermes", source)


def test_the_schemas_are_those_of_other_tests() -> None:
    """Control for the names in ``LIKE_A_CALL``: they are tools."""
    assert set(SCHEMAS) == set(LIKE_A_CALL["properties"]["name"]["enum"])
    assert held("llama3", offered(LIKE_A_CALL)).state('{"name":') is MaskState.OPEN
