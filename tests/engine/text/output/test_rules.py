"""Grammars of outputs that call tools: what the models write passes, and what passes is read as calls that satisfy the
tools' schemas, whether the markers of a format are special tokens or text."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jsonschema
import pytest

from engine.errors import RequestRejectedError
from engine.text.grammar_matcher import CompiledGrammar, Row
from engine.text.output.detect import FORMATS
from engine.text.output.reader import OutputReader
from engine.text.output.tools import parse_tools
from isolation.ipc.grammar import GrammarKind, MaskState
from isolation.ipc.messages import FailureCode, Finish
from isolation.ipc.output import Thinking
from tests.engine.text.output.reading import Read, joined
from tests.engine.text.output.writing import Call, Spelt, spelt, write

NAMES = tuple(form.name for form in FORMATS)
ALONE = frozenset(("harmony",))
"""Formats with one call in an output."""

WHOLE = frozenset(("llama3", "llama-4", "harmony"))
"""Formats whose calls follow no text."""

IN_JSON = frozenset("hermes llama3 mistral mistral-named deepseek deepseek-bare kimi harmony".split())
"""Formats with arguments in JSON, which are held to whole schemas."""

SEEDS = 6
MOST_TOKENS = 3_000

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 5},
        "days": {"type": "integer", "minimum": 0, "maximum": 14},
        "unit": {"type": "string", "enum": ["c", "c\n", 'f "f"', "caf\u00e9 \\/", ""]},
        "metric": {"type": "boolean"},
        "hours": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 23}, "maxItems": 3},
        "place": {
            "type": "object",
            "properties": {
                "lat": {"type": "number", "minimum": -90, "maximum": 90},
                "names": {"type": "array", "items": {"type": "string", "maxLength": 3}, "minItems": 1, "maxItems": 2},
                "kind": {"enum": ["town", 7, None, True]},
            },
            "required": ["lat"],
            "additionalProperties": False,
        },
        "level": {"type": ["integer", "null"], "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"get_weather": WEATHER, "get": NOTHING}

FULL: Call = (
    "get_weather",
    {
        "city": "Oslo",
        "days": 3,
        "unit": "c",
        "metric": True,
        "hours": [1, 23],
        "place": {"lat": -1.5, "names": ["a", "b"], "kind": 7},
        "level": None,
    },
)
LEAST: Call = ("get_weather", {"city": "Bonn", "days": 14})
BARE: Call = ("get", {})


def tools(schemas: Mapping[str, Any] = SCHEMAS, *, strict: bool = True, **options: bool) -> bytes:
    """Describe tools."""
    listed = [{"name": name, "parameters": schema, "strict": strict} for name, schema in schemas.items()]
    return json.dumps({"tools": listed, **options}).encode()


@dataclass
class Held:
    """A compiled grammar over a small tokenizer."""

    spelt: Spelt
    grammar: CompiledGrammar
    source: bytes
    thinking: Thinking

    def after(self, ids: Iterable[int]) -> Row | None:
        """Return the row after these tokens; None when the grammar forbids them."""
        row = self.grammar.open(1)
        for token in ids:
            # Behind the last token of a grammar, a further one has no effect.
            over = not any(row.words)
            row = self.grammar.advance(1, token) or row
            if over or row.state is MaskState.BROKEN:
                return None
        return row

    def state(self, text: str) -> MaskState | None:
        """Return the state after a text; None when the grammar forbids it."""
        row = self.after(self.spelt.ids(text))
        return None if row is None else row.state

    def passes(self, text: str) -> bool:
        """Return whether the text may be a whole output."""
        return self.state(text) is MaskState.ACCEPTING

    def walk(self, seed: int, begin: str = "") -> list[int]:
        """Return a random output that begins with a text."""
        rng = random.Random(seed)
        ids = self.spelt.ids(begin)
        row = self.after(ids)
        assert row is not None
        while len(ids) < MOST_TOKENS:
            allowed = allowed_by(row)
            if row.state is MaskState.ACCEPTING and (not allowed or rng.random() < 0.3):
                return ids
            assert allowed, f"no way on behind {self.spelt.text(ids)!r}"
            ids.append(rng.choice(allowed))
            row = self.grammar.advance(1, ids[-1]) or row
            assert row.state is not MaskState.BROKEN, f"a token of the mask is refused: {self.spelt.text(ids)!r}"
        raise AssertionError(f"no end behind {self.spelt.text(ids[:400])!r}")

    def read(self, ids: Sequence[int]) -> Read:
        """Read an output."""
        words = self.spelt.words
        reader = OutputReader(words.form, words.spelling, words.entries, parse_tools(self.source), self.thinking)
        return joined(reader.push(ids, Finish.STOP))


def allowed_by(row: Row) -> list[int]:
    """Return the tokens of a mask."""
    return [8 * at + bit for at, byte in enumerate(row.words) for bit in range(8) if byte >> bit & 1]


def held(
    name: str, source: bytes, *, special: bool = True, thinking: Thinking = Thinking.NONE, thinks: bool = False
) -> Held:
    """Compile the grammar of a format."""
    found = spelt(name, special=special, thinking=thinks)
    grammar = CompiledGrammar(found.tokenizer, GrammarKind.TOOLS, source, found.words, thinking=thinking)
    return Held(found, grammar, source, thinking)


def check_calls(found: Read, schemas: Mapping[str, Any] = SCHEMAS) -> None:
    """Check that a reading is of complete calls that satisfy their schemas."""
    assert not found.refused
    assert found.begun is None
    for name, arguments in found.calls:
        jsonschema.Draft202012Validator(schemas[name]).validate(arguments)


each_format = pytest.mark.parametrize("name", NAMES)
each_spelling = pytest.mark.parametrize("special", [True, False], ids=["special", "text"])


@each_spelling
@each_format
@pytest.mark.parametrize("required", [True, False])
def test_what_templates_write_passes(name: str, special: bool, required: bool) -> None:
    """Calls as the chat template writes them pass to their end, one and several, and are read as what they say."""
    grammar = held(name, tools(required=required), special=special)
    for calls in ([FULL], [LEAST], [BARE], [BARE, FULL, LEAST]):
        if len(calls) > 1 and name in ALONE:
            continue
        text = write(name, calls)
        assert grammar.passes(text), text
        assert grammar.read(grammar.spelt.ids(text)).calls == calls


@each_spelling
@each_format
def test_what_is_no_call_of_a_tool_does_not_pass(name: str, special: bool) -> None:
    """An unknown tool, a value of a wrong type or out of bounds, a missing argument and one too many; a begun call is
    no end."""
    grammar = held(name, tools(required=True), special=special)
    for call in (
        ("get_nothing", {}),
        ("get_weathe", LEAST[1]),
        ("get", {"city": "Oslo"}),
        ("get_weather", {"city": "Oslo"}),
        ("get_weather", {"days": 1}),
        ("get_weather", {**LEAST[1], "more": 1}),
        ("get_weather", {**LEAST[1], "days": 15}),
        ("get_weather", {**LEAST[1], "days": "x"}),
        ("get_weather", {**LEAST[1], "city": ""}),
        ("get_weather", {**LEAST[1], "city": "Oslo!!"}),
        ("get_weather", {**LEAST[1], "unit": "k"}),
        ("get_weather", {**LEAST[1], "metric": 1}),
        ("get_weather", {**LEAST[1], "hours": [1, 2, 3, 4]}),
        ("get_weather", {**LEAST[1], "place": {"names": ["a"]}}),
        ("get_weather", {**LEAST[1], "place": {"lat": 1, "names": []}}),
        ("get_weather", {**LEAST[1], "place": {"lat": 91}}),
    ):
        assert not grammar.passes(write(name, [call])), call
    text = write(name, [LEAST])
    assert not any(grammar.passes(text[:length]) for length in range(0, len(text) - 1, 4))
    assert not grammar.passes("")
    assert not grammar.passes("It rains.")


@each_spelling
@each_format
@pytest.mark.parametrize("parallel", [True, False])
def test_random_outputs_are_calls(name: str, special: bool, parallel: bool) -> None:
    """Whatever the masks allow is read, once the grammar accepts the end, as calls that satisfy the schemas."""
    grammar = held(name, tools(required=True, parallel=parallel), special=special)
    begin = "<|channel|>commentary" if name == "harmony" and not special else ""
    for seed in range(SEEDS):
        found = grammar.read(grammar.walk(seed, begin))
        check_calls(found)
        assert len(found.calls) == 1 or (parallel and found.calls)
        assert not found.content.strip()


@each_spelling
@each_format
def test_text_may_stand_for_a_call(name: str, special: bool) -> None:
    """Without a duty to call, plain text passes and may end anywhere, and is read as it is; so is no text at all."""
    grammar = held(name, tools(), special=special)
    begin = "<|channel|>final<|message|>" if name == "harmony" else ""
    for text in ("It rains, 5 < 6 <b>.", "caf\u00e9 \U0001f600 [x] {y} </", "a\n\nb: <|", "Call <tool"):
        for length in range(1, len(text)):
            assert grammar.passes(begin + text[:length])
        assert grammar.read(grammar.spelt.ids(begin + text)) == Read(text)
    assert grammar.passes(begin)


@each_spelling
@each_format
def test_text_may_stand_before_a_call(name: str, special: bool) -> None:
    """Text, then a call, is read as both; not in formats whose calls are the whole answer."""
    grammar = held(name, tools(), special=special)
    for text in ("I look.", "a <b> {\n\n", "<"):
        whole = text + write(name, [LEAST])
        if name not in WHOLE:
            assert grammar.passes(whole), whole
            assert grammar.read(grammar.spelt.ids(whole)) == Read(text.rstrip(), calls=[LEAST])


@each_spelling
@each_format
def test_what_begins_like_a_call_is_one(name: str, special: bool) -> None:
    """Behind the beginning of a call there is no way but to its end."""
    grammar = held(name, tools(), special=special)
    text = write(name, [LEAST])
    begin = text[: text.index("get_weather")]
    assert grammar.state(begin) is MaskState.OPEN
    assert grammar.state(begin + "no such tool") is None
    for seed in range(SEEDS):
        before = "" if name in WHOLE else "Well."
        found = grammar.read(grammar.walk(seed, before + begin))
        check_calls(found)
        assert found.calls
        assert found.content == before


@each_format
def test_markers_that_are_text_are_spelt_nowhere_else(name: str) -> None:
    """Random text made of pieces of the format's markers passes only where the reading has nothing to refuse."""
    grammar = held(name, tools(), special=False)
    form = grammar.spelt.words.form
    pieces = [*form.markers, *(marker[:-1] for marker in form.markers), "<", "a", "\n", " ", "{", "["]
    rng = random.Random(name)
    passed = 0
    for _ in range(200):
        text = "".join(rng.choice(pieces) for _ in range(rng.randint(1, 4)))
        if grammar.passes(text):
            passed += 1
            assert not grammar.read(grammar.spelt.ids(text)).refused, text
    assert passed > 2 or name == "harmony"


@each_spelling
@each_format
@pytest.mark.parametrize("required", [True, False])
def test_reasoning_comes_before_calls(name: str, special: bool, required: bool) -> None:
    """Where the prompt has begun it, reasoning, its end and a call pass and are read as such; a call alone does not.
    Where it is possible, both do."""
    if name == "harmony":
        pytest.skip("has reasoning of its own")
    source, text = tools(required=required), write(name, [FULL])
    # A special token cannot stand in reasoning; its text can.
    thought = "Let me see: <b> {" + ("" if special else "\n" + write(name, [BARE]))
    begun = held(name, source, special=special, thinking=Thinking.BEGUN, thinks=True)
    for space in ("", "\n", "\n\n"):
        whole = f"{thought}</think>{space}{text}"
        assert begun.passes(whole)
        found = begun.read(begun.spelt.ids(whole))
        assert (found.reasoning, found.calls, found.content, found.refused) == (thought, [FULL], "", [])
    assert not begun.passes(text)
    assert begun.passes(f"hm</think>{text}")
    assert begun.passes(f"</think>{text}")
    assert begun.passes("hm</think>\n\nIt rains.") is not required
    possible = held(name, source, special=special, thinking=Thinking.POSSIBLE, thinks=True)
    for whole, reasoning in ((text, ""), (f"<think>{thought}</think>\n\n{text}", thought)):
        assert possible.passes(whole)
        found = possible.read(possible.spelt.ids(whole))
        assert (found.reasoning, found.calls, found.content, found.refused) == (reasoning, [FULL], "", [])
    assert not possible.passes("<think>hm")
    for seed in range(SEEDS // 3):
        check_calls(begun.read(begun.walk(seed, f"hm</think>\n{text[: text.index('get_weather')]}")))


@each_spelling
def test_harmony_reasons_on_its_own_channel(special: bool) -> None:
    """Reasoning, then a call in either order of its header, or an answer where none is required."""
    call = '<|message|>{"city": "Bonn", "days": 14}'
    for header in (
        "<|channel|>commentary to=functions.get_weather <|constrain|>json",
        " to=functions.get_weather<|channel|>commentary json",
        " to=functions.get_weather<|channel|>commentary <|constrain|>json",
    ):
        whole = f"<|channel|>analysis<|message|>hm <b><|end|><|start|>assistant{header}{call}"
        for required in (True, False):
            grammar = held("harmony", tools(required=required), special=special)
            assert grammar.passes(whole)
            assert grammar.passes(header + call)
            assert grammar.read(grammar.spelt.ids(whole)) == Read(reasoning="hm <b>", calls=[LEAST])
            answer = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>It rains."
            assert grammar.passes(answer) is not required


@each_spelling
@each_format
def test_one_call_is_the_end_where_one_is_permitted(name: str, special: bool) -> None:
    """Without parallel calls nothing passes behind a complete call; with them, another does (control)."""
    for required in (True, False):
        grammar = held(name, tools(required=required, parallel=False), special=special)
        row = grammar.after(grammar.spelt.ids(write(name, [LEAST])))
        assert row is not None
        assert row.state is MaskState.ACCEPTING
        assert not allowed_by(row)
        both = write(name, [LEAST, BARE])
        if name not in ALONE:
            assert not grammar.passes(both)
            assert held(name, tools(required=required), special=special).passes(both)


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


@each_spelling
@each_format
def test_names_and_texts_of_a_tenant_are_only_texts(name: str, special: bool) -> None:
    """Whatever stands in the name of a parameter or in a listed text, the outputs that pass are calls with exactly it,
    or the schema is refused; no special token and no rule comes from it."""
    begin = "<|channel|>commentary" if name == "harmony" and not special else ""
    taken = 0
    for seed, text in enumerate(HOSTILE):
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
    assert taken > len(HOSTILE) / 2


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
