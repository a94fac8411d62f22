"""200 JSON Schemas: what random tokens under the masks spell satisfies the schema, whatever the vocabulary."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from engine.text.grammar_matcher import CompiledGrammar
from engine.text.token_bytes import Words, build_tokenizer
from isolation.ipc.grammar import GrammarKind, MaskState, Whitespace
from tests.engine.text.schema_maker import make_schema

WRITTEN = sorted((Path(__file__).parent / "schemas").glob("*.json"))
MADE = range(200 - len(WRITTEN))

MOST_TOKENS = 4_000


@pytest.fixture(scope="module")
def words(mini) -> Words:
    """The embedded model's tokens."""
    return mini.words()


@pytest.fixture(scope="module")
def tokenizer(words: Words) -> Any:
    """The same as llguidance has them."""
    return build_tokenizer(words)


STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


def spelt(
    words: Words,
    tokenizer: Any,
    schema: object,
    rng: random.Random,
    *,
    short: float = 0.5,
    whitespace: Whitespace = Whitespace.COMPACT,
) -> str:
    """An answer whose tokens are drawn from those that are allowed, as by a model whose logits say nothing; ends are
    taken where they are allowed, and one of the shortest ``short`` of the time, so that it comes to an end."""
    source = json.dumps(schema).encode()
    grammar = CompiledGrammar(tokenizer, GrammarKind.JSON_SCHEMA, source, words, whitespace)
    row = grammar.open(1)
    text = b""
    for _ in range(MOST_TOKENS):
        assert row is not None
        assert row.state is not MaskState.BROKEN
        packed = np.frombuffer(row.words, dtype=np.uint8)
        ids = np.unpackbits(packed, bitorder="little").nonzero()[0].tolist()
        if row.state is MaskState.ACCEPTING and (not ids or rng.random() < 0.5):
            return text.decode()
        closing = [token_id for token_id in ids if words.entries[token_id][:1] in (b'"', b"]", b"}", b"e")]
        token_id = rng.choice(closing if closing and rng.random() < short else ids)
        text += words.entries[token_id]
        row = grammar.advance(1, token_id)
    raise AssertionError("the answer does not come to an end")


def checker() -> jsonschema.FormatChecker:
    """The validator's formats; a moment may have a leap second and the year 0, as RFC 3339 allows and its checker does
    not."""
    made = jsonschema.FormatChecker()
    made.checkers = dict(jsonschema.Draft202012Validator.FORMAT_CHECKER.checkers)
    for name in ("date-time", "date", "time"):
        known, raises = made.checkers[name]
        made.checkers[name] = partial(_as_known, known), raises
    return made


def _as_known(known: Callable[[object], bool], one: object) -> bool:
    return known(re.sub(r"^0000-", "2000-", one.replace(":60", ":59")) if isinstance(one, str) else one)


CHECKER = checker()


def check(schema: object, text: str) -> None:
    """Raise unless the text is JSON that satisfies the schema, formats included."""
    jsonschema.Draft202012Validator(schema, format_checker=CHECKER).validate(json.loads(text))


def test_there_are_two_hundred() -> None:
    """Sixty and more of them are written by hand."""
    assert len(WRITTEN) >= 60
    assert len(WRITTEN) + len(MADE) == 200


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.stem)
def test_written_schemas_are_satisfied(path: Path, words: Words, tokenizer: Any) -> None:
    """Three random answers to each, and not all the same where there is a choice."""
    schema = json.loads(path.read_text())
    for seed in range(3):
        check(schema, spelt(words, tokenizer, schema, random.Random(seed)))


def test_answers_to_written_schemas_are_compact(words: Words, tokenizer: Any) -> None:
    """No answer has whitespace outside of its strings; with flexible whitespace most have some (control)."""
    spaced = dict.fromkeys(Whitespace, 0)
    for path in WRITTEN:
        schema = json.loads(path.read_text())
        for whitespace in Whitespace:
            text = spelt(words, tokenizer, schema, random.Random(7), whitespace=whitespace)
            check(schema, text)
            spaced[whitespace] += re.search(r"\s", STRING.sub('""', text)) is not None
    assert spaced[Whitespace.COMPACT] == 0
    assert spaced[Whitespace.FLEXIBLE] > len(WRITTEN) / 2


def test_made_schemas_are_satisfied(words: Words, tokenizer: Any) -> None:
    """One random answer to each of the schemas by seed; they are all different ones."""
    seen = set()
    for seed in MADE:
        schema = make_schema(seed)
        seen.add(json.dumps(schema, sort_keys=True))
        check(schema, spelt(words, tokenizer, schema, random.Random(seed)))
    assert len(seen) > 0.9 * len(MADE)


def test_an_answer_to_another_schema_does_not_pass(words: Words, tokenizer: Any) -> None:
    """The check can fail."""
    text = spelt(words, tokenizer, {"type": "integer", "minimum": 0, "maximum": 9}, random.Random(1))
    with pytest.raises(jsonschema.ValidationError):
        check({"type": "string"}, text)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(5))
def test_every_schema_over_a_published_vocabulary(seed: int, qwen2, shared_data: Path) -> None:
    """The same with the 151,936 tokens of a published model, where a token spells many characters at once."""
    from engine.text.vocabulary import Vocabulary

    words = Words(Vocabulary(qwen2).entries, qwen2.fragment)
    tokenizer = build_tokenizer(words)
    schemas = [json.loads(path.read_text()) for path in WRITTEN] + [make_schema(made) for made in MADE]
    for schema in schemas:
        check(schema, spelt(words, tokenizer, schema, random.Random(seed)))
