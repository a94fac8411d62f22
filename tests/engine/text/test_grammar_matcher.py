"""What the compiler of grammars takes and refuses, as docs/structured-output.md says; whitespace, choices, ends."""

from __future__ import annotations

import json

import pytest

from engine.errors import RequestRejectedError
from engine.text.grammar_matcher import CompiledGrammar
from engine.text.token_bytes import build_tokenizer
from isolation.ipc.grammar import GrammarKind, MaskState, Whitespace
from isolation.ipc.messages import FailureCode


@pytest.fixture(scope="module")
def words(mini):
    """The embedded model's tokens."""
    return mini.words()


@pytest.fixture(scope="module")
def compiled(words):
    """Compiles over that model."""
    tokenizer = build_tokenizer(words)

    def compiled(kind: GrammarKind, source: object, whitespace: Whitespace = Whitespace.COMPACT) -> CompiledGrammar:
        data = source if isinstance(source, bytes) else json.dumps(source).encode()
        return CompiledGrammar(tokenizer, kind, data, words, whitespace)

    return compiled


def follow(grammar: CompiledGrammar, words, text: str) -> MaskState | None:
    """The state after this text, spelt a byte a token; None when the grammar forbids it. A mask may allow less: of text
    that is forced, only the tokens that the tokenizer cuts it into."""
    row = grammar.open(1)
    for byte in text.encode():
        row = grammar.advance(1, words.entries.index(bytes([byte])))
        if row.state is MaskState.BROKEN:
            return None
    return row.state


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"type": "string"}},
        {"type": "integer", "if": {"minimum": 3}, "then": {"maximum": 5}},
        {"type": "array", "contains": {"type": "integer"}},
        {"type": "array", "uniqueItems": True},
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"type": "string", "format": "nonsense"},
    ],
)
def test_what_is_not_implemented_is_refused_or_passed_over(compiled, schema) -> None:
    """Strict schemas get an error, lenient ones an answer that may break the keyword."""
    with pytest.raises(RequestRejectedError) as raised:
        compiled(GrammarKind.JSON_SCHEMA, schema)
    assert raised.value.code is FailureCode.INVALID
    assert compiled(GrammarKind.JSON_SCHEMA_LENIENT, schema).open(1).state is not MaskState.BROKEN


@pytest.mark.parametrize("kind", [GrammarKind.JSON_SCHEMA, GrammarKind.JSON_SCHEMA_LENIENT])
def test_unknown_keywords_are_annotations(compiled, words, kind) -> None:
    """What JSON Schema does not define has no effect in either way."""
    grammar = compiled(kind, {"type": "boolean", "x-colour": "red", "foo": {"type": "wrong"}})
    assert follow(grammar, words, "true") is MaskState.ACCEPTING
    assert follow(grammar, words, "1") is None


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (GrammarKind.JSON_SCHEMA, {"type": "wrong"}),
        (GrammarKind.JSON_SCHEMA, {"$ref": "http://localhost/other.json"}),
        (GrammarKind.JSON_SCHEMA, {"type": "array", "minItems": 5, "maxItems": 2}),
        (GrammarKind.JSON_SCHEMA, {"$ref": "#"}),
        (GrammarKind.JSON_SCHEMA, b"{"),
        (GrammarKind.JSON_SCHEMA, b"\xff"),
        (GrammarKind.JSON_SCHEMA, True),
        (GrammarKind.REGEX, b"(?=a)b"),
        (GrammarKind.REGEX, rb"(a)\1"),
        (GrammarKind.REGEX, b"["),
        (GrammarKind.LARK, b""),
        (GrammarKind.LARK, b"start: a\na: a"),
        (GrammarKind.LARK, b"start: <|im_start|>"),
        (GrammarKind.CHOICE, b"{}"),
        (GrammarKind.CHOICE, b'["a", 1]'),
        (GrammarKind.CHOICE, b"[]"),
        (GrammarKind.CHOICE, b"[" * 100_000),
    ],
)
def test_what_cannot_be_used_is_refused(compiled, kind, source) -> None:
    """Malformed, unsatisfiable, or asking for what there is not: an error with a reason, at once."""
    with pytest.raises(RequestRejectedError) as raised:
        compiled(kind, source)
    assert raised.value.code is FailureCode.INVALID
    assert raised.value.reason


INTEGER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
KINDS = (GrammarKind.JSON_SCHEMA, GrammarKind.JSON_SCHEMA_LENIENT)


@pytest.mark.parametrize("kind", KINDS)
def test_json_is_compact(compiled, words, kind) -> None:
    """No whitespace passes anywhere between tokens, in constants neither; the compact text does (control)."""
    grammar = compiled(kind, INTEGER)
    assert follow(grammar, words, '{"a":1}') is MaskState.ACCEPTING
    for text in ('{"a": 1}', '{ "a":1}', '{"a" :1}', '{"a":1 }', '{\n"a":1}', ' {"a":1}'):
        assert follow(grammar, words, text) is None
    constant = compiled(kind, {"const": {"x": [1, 2]}})
    assert follow(constant, words, '{"x":[1,2]}') is MaskState.ACCEPTING
    assert follow(constant, words, '{"x":[1, 2]}') is None
    anything = compiled(kind, {"type": "object"})
    assert follow(anything, words, '{"a":[{},null]}') is MaskState.ACCEPTING
    assert follow(anything, words, '{"a":[{}, null]}') is None


@pytest.mark.parametrize("kind", KINDS)
def test_flexible_whitespace_has_an_end(compiled, words, kind) -> None:
    """Compact, spaced and indented JSON pass where that is asked for; a run of spaces or of new lines does not."""
    grammar = compiled(kind, INTEGER, Whitespace.FLEXIBLE)
    for text in ('{"a":1}', '{ "a": 1 }', '{\n  "a": 1\n}'):
        assert follow(grammar, words, text) is MaskState.ACCEPTING
    for text in ('{  "a":1}', '{\n\n"a":1}', ' {"a":1}', "{\n" + 25 * " " + '"a":1}'):
        assert follow(grammar, words, text) is None


def test_only_flexible_masks_allow_whitespace(compiled, words) -> None:
    """After the brace the flexible mask has the bit of a space, the compact one has not; both have that of the
    quote that begins the name (control)."""

    def allowed(whitespace: Whitespace) -> set[bytes]:
        grammar = compiled(GrammarKind.JSON_SCHEMA, INTEGER, whitespace)
        grammar.open(1)
        row = grammar.advance(1, words.entries.index(b"{"))
        return {entry for i, entry in enumerate(words.entries) if row.words[i >> 3] >> (i & 7) & 1}

    compact, flexible = allowed(Whitespace.COMPACT), allowed(Whitespace.FLEXIBLE)
    assert b'"' in compact
    assert {b'"', b" ", b"\n"} <= flexible
    assert not any(entry[:1].isspace() for entry in compact)


def test_whitespace_within_strings_is_the_schemas(compiled, words) -> None:
    """A pattern's and a constant's own spaces pass under compact JSON."""
    spaced = compiled(GrammarKind.JSON_SCHEMA, {"type": "string", "pattern": "^a +b$"})
    assert follow(spaced, words, '"a  b"') is MaskState.ACCEPTING
    assert follow(spaced, words, '"ab"') is None
    assert follow(compiled(GrammarKind.JSON_SCHEMA, {"enum": ["p  q"]}), words, '"p  q"') is MaskState.ACCEPTING


@pytest.mark.parametrize("whitespace", Whitespace)
def test_a_schema_may_have_a_pattern_of_its_own(compiled, words, whitespace) -> None:
    """Its ``x-guidance`` overrides the option by a pattern, and cannot turn bounds off by ``whitespace_flexible``."""
    loose = {**INTEGER, "x-guidance": {"whitespace_pattern": " *"}}
    assert follow(compiled(GrammarKind.JSON_SCHEMA, loose, whitespace), words, '{   "a":1}') is MaskState.ACCEPTING
    endless = {**INTEGER, "x-guidance": {"whitespace_flexible": True}}
    assert follow(compiled(GrammarKind.JSON_SCHEMA, endless, whitespace), words, '{   "a":1}') is None


def test_choices_are_taken_letter_by_letter(compiled, words) -> None:
    """Strings with quotes, backslashes, slashes and new lines are what they are."""
    choices = ['say "hi"', "back\\slash", "a/b", "two\nlines", "caf\u00e9"]
    grammar = compiled(GrammarKind.CHOICE, choices)
    for choice in choices:
        assert follow(grammar, words, choice) is MaskState.ACCEPTING
    assert follow(grammar, words, "a/c") is None


def test_an_output_may_end_only_where_it_is_whole(compiled, words) -> None:
    """Open within, accepting at each possible end, and then nothing more is allowed but the end."""
    grammar = compiled(GrammarKind.REGEX, b"ab(cd)?")
    assert follow(grammar, words, "a") is MaskState.OPEN
    assert follow(grammar, words, "ab") is MaskState.ACCEPTING
    assert follow(grammar, words, "abc") is MaskState.OPEN
    assert follow(grammar, words, "abcd") is MaskState.ACCEPTING
    row = grammar.open(2)
    for byte in b"abcd":
        row = grammar.advance(2, words.entries.index(bytes([byte])))
    assert not any(row.words)


def test_requests_of_one_grammar_do_not_meet(compiled, words) -> None:
    """Each has its own place in it; one that is closed or unknown has none."""
    grammar = compiled(GrammarKind.REGEX, b"ab")
    a, b = (words.entries.index(letter) for letter in (b"a", b"b"))
    grammar.open(1)
    first = grammar.open(2)
    assert grammar.advance(1, a).position == 1
    assert grammar.advance(1, b).state is MaskState.ACCEPTING
    second = grammar.advance(2, a)
    assert (first.position, second.position, second.state) == (0, 1, MaskState.OPEN)
    grammar.close(1)
    grammar.close(1)
    assert grammar.advance(1, a) is None


def test_a_token_that_was_forbidden_breaks_the_row(compiled, words) -> None:
    """An engine that does not keep to the mask ends its own request."""
    grammar = compiled(GrammarKind.REGEX, b"ab")
    grammar.open(1)
    assert grammar.advance(1, words.entries.index(b"z")).state is MaskState.BROKEN
