"""What whitespace costs in structured output: tokens of the same answers written compactly, spaced and indented.

    python bench/structured.py [--tokenizer FILE ...] [--appliance]

``--tokenizer`` is a tokenizer.json (default: the embedded model's). The answers are sensible ones to published kinds of
schemas; each is checked to be allowed by its grammar where it should be, and there alone. ``--appliance`` starts
`athanor demo` and asks the embedded model under the same schemas with both values of ``whitespace``, each seed in turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine.text.grammar_matcher import CompiledGrammar
from engine.text.token_bytes import Words, build_tokenizer
from engine.text.tokenizer import Tokenizer
from engine.text.vocabulary import Vocabulary
from isolation.ipc.grammar import GrammarKind, MaskState, Whitespace

ROOT = Path(__file__).resolve().parents[1]
SCHEMAS = ROOT / "tests" / "engine" / "text" / "schemas"
SEEDS = 8
MAX_TOKENS = 256
"""Output tokens of an answer of the embedded model: more than any of ``ANSWERS`` has in any form."""

ANSWERS: dict[str, Any] = {
    "sentiment": {"label": "positive", "confidence": 0.93},
    "person": {"name": "Ada Lovelace", "age": 36, "email": "ada@analytic.org"},
    "function-call": {"name": "search", "arguments": {"query": "llama grammars", "limit": 5}},
    "calendar-event": {
        "title": "Review",
        "start": "2026-11-24T09:30:00Z",
        "all_day": False,
        "attendees": ["Ada", "Grace"],
    },
    "moderation": {
        "flagged": False,
        "categories": {"hate": False, "violence": False, "self-harm": False, "spam": False},
    },
    "tool-calls": [
        {"id": f"call_{n}x7k", "type": "function", "function": {"name": name, "arguments": {"a": 17, "b": 4}}}
        for n, name in enumerate(("add", "multiply"))
    ],
    "entities": {
        "entities": [
            {"text": "Ada", "type": "PER", "start": 0, "end": 3},
            {"text": "London", "type": "LOC", "start": 14, "end": 20},
        ]
    },
    "invoice": {
        "number": "INV-00042",
        "date": "2026-11-24",
        "lines": [{"item": "paper", "price": 4.5, "vat": 19}, {"item": "ink", "price": 20, "vat": 19}],
        "paid": True,
    },
    "bounding-boxes": [{"box": [12, 40, 220, 310], "label": "cat"}, {"box": [300, 41, 512, 330], "label": "dog"}],
}
"""File of a schema, without its ending -> an answer."""

FORMS: dict[str, dict[str, Any]] = {"compact": {"separators": (",", ":")}, "spaced": {}, "indented": {"indent": 2}}
"""How an answer is written -> options of ``json.dumps``."""


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", type=Path, nargs="+", default=[ROOT / "images/mini/athanor-mini/tokenizer.json"])
    parser.add_argument("--appliance", action="store_true")
    options = parser.parse_args()
    for path in options.tokenizer:
        written(path)
    if options.appliance:
        asked()
    return 0


def written(path: Path) -> None:
    """Print the tokens of each answer in each form, with one tokenizer."""
    tokenizer = Tokenizer(path.read_bytes(), "")
    words = Words(Vocabulary(tokenizer).entries, tokenizer.fragment)
    compiler = build_tokenizer(words)
    totals = dict.fromkeys(FORMS, 0)
    print(f"{path.name}, {len(words.entries):,} ids\n{'tokens of':20}" + "".join(f"{form:>10}" for form in FORMS))
    for name, answer in ANSWERS.items():
        row = {}
        for form, options in FORMS.items():
            ids = tokenizer.fragment(json.dumps(answer, **options))
            for whitespace in Whitespace:
                passes = form == "compact" or whitespace is Whitespace.FLEXIBLE
                assert allowed(compiler, words, name, ids, whitespace) is passes, (name, form, whitespace)
            row[form] = len(ids)
            totals[form] += len(ids)
        print(f"{name:20}" + "".join(f"{row[form]:10}" for form in FORMS))
    print(f"{'all':20}" + "".join(f"{total:10}" for total in totals.values()))
    for form in ("spaced", "indented"):
        print(f"compact has {100 * (1 - totals['compact'] / totals[form]):.0f} % fewer tokens than {form}")


def allowed(compiler: Any, words: Words, name: str, ids: list[int], whitespace: Whitespace) -> bool:
    """Whether the tokens are a complete answer to the schema."""
    source = (SCHEMAS / f"{name}.json").read_bytes()
    grammar = CompiledGrammar(compiler, GrammarKind.JSON_SCHEMA, source, words.mask_bytes, whitespace)
    row = grammar.open(1)
    for token_id in ids:
        following = grammar.advance(1, token_id)
        assert following is not None
        row = following
    return row.state is MaskState.ACCEPTING


def asked() -> None:
    """Print how answers of the embedded model end, and their tokens, with each value of ``whitespace``."""
    from tests.system.conftest import running

    ends: dict[str, list[tuple[str, int]]] = {"compact": [], "flexible": []}
    with tempfile.TemporaryDirectory(prefix="ath-", dir="/tmp") as folder, running(Path(folder) / "state") as appliance:
        client = appliance.openai()
        for name in ANSWERS:
            schema = json.loads((SCHEMAS / f"{name}.json").read_text())
            for seed in range(SEEDS):
                for whitespace, found in ends.items():
                    answer = client.chat.completions.create(
                        model="athanor-mini",
                        messages=[{"role": "user", "content": "Answer in JSON."}],
                        seed=seed,
                        max_tokens=MAX_TOKENS,
                        extra_body={"guided_json": schema, "whitespace": whitespace},
                    )
                    assert answer.usage is not None
                    found.append((answer.choices[0].finish_reason, answer.usage.completion_tokens))
    for whitespace, found in ends.items():
        done = sum(reason == "stop" for reason, _ in found)
        mean = statistics.fmean(tokens for _, tokens in found)
        print(f"embedded model, {whitespace}: {done} of {len(found)} end by themselves, mean {mean:.1f} tokens")


if __name__ == "__main__":
    sys.exit(main())
