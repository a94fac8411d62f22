"""Outputs that are held to a grammar of tools, as tests make and read them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jsonschema
import numpy as np
import pytest

from engine.text.grammar_matcher import CompiledGrammar, Row
from engine.text.output.detect import FORMATS
from engine.text.output.reader import OutputReader
from engine.text.output.tools import parse_tools
from isolation.ipc.grammar import GrammarKind, MaskState
from isolation.ipc.messages import Finish
from isolation.ipc.output import Thinking
from tests.engine.text.output.reading import Read, joined
from tests.engine.text.output.writing import Call, Spelt, spelt

NAMES = tuple(form.name for form in FORMATS)
ALONE = frozenset(("harmony",))
"""Formats with one call in an output."""

WHOLE = frozenset(("llama3", "llama-4", "harmony"))
"""Formats whose calls follow no text."""

IN_JSON = frozenset("hermes llama3 mistral mistral-named deepseek deepseek-bare kimi harmony".split())
"""Formats with arguments in JSON, which are held to whole schemas."""

SEEDS = 3
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
    bits = np.unpackbits(np.frombuffer(row.words, np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


@lru_cache(maxsize=64)
def held(
    name: str, source: bytes, *, special: bool = True, thinking: Thinking = Thinking.NONE, thinks: bool = False
) -> Held:
    """Compile the grammar of a format; the tests of a module ask for some of them again and again."""
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
each_spelt = pytest.mark.parametrize(
    ("name", "special"),
    [
        pytest.param(
            name,
            special,
            id=f"{name}-{'special' if special else 'text'}",
            marks=() if special == (place % 2 == 0) else pytest.mark.full,
        )
        for place, name in enumerate(NAMES)
        for special in (True, False)
    ],
)
"""Each format with its markers as special tokens and as text: in turn in every run, both ways in the full counts."""
