"""The corpus on disk: topics with phrasings of a question and one answer each.

A corpus file is Markdown. A second-level heading opens a topic; its text is the topic's name.
The list under it holds the phrasings; everything after the first blank line is the answer.

    ## add-tenant
    * new tenant, adding a tenant                 phrases that name the topic, with commas between
    - how do I {add|create} a {new |}tenant?      a phrasing to train on
    + what is the procedure for a new tenant?     a phrasing held out: measured, never trained on

    Add it under `tenants:` in policy.yaml, ...

`{a|b|}` stands for any one of its alternatives, the last of which may be empty. Braces do not
nest. Held-out phrasings and answers are taken as they are.
"""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import dataclass
from pathlib import Path

_ALTERNATIVES = re.compile(r"\{([^{}]*)\}")
_MARKS = ("* ", "- ", "+ ")
_SPACES = re.compile(r" {2,}")


class CorpusError(ValueError):
    """A corpus file does not follow the format; the message names file and line."""


@dataclass(frozen=True, slots=True)
class Topic:
    """One thing that can be asked: its names, phrasings to train on and held out, the answer."""

    name: str
    phrases: tuple[str, ...]
    patterns: tuple[str, ...]
    held_out: tuple[str, ...]
    answer: str


def load(folder: Path) -> tuple[Topic, ...]:
    """Read every `*.md` in `folder`, in the order of names.

    Raises CorpusError for a malformed file, for a topic that occurs twice, and for a held-out
    phrasing that a training pattern also produces.
    """
    topics: list[Topic] = []
    for path in sorted(folder.glob("*.md")):
        topics.extend(_parse(path))
    names = [topic.name for topic in topics]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise CorpusError(f"topics occur twice: {', '.join(twice)}; give each its own name")
    _check_held_out(topics)
    return tuple(topics)


def expand(pattern: str, rng: random.Random) -> str:
    """Replace each `{a|b}` of `pattern` by one alternative, drawn from `rng`."""
    text = _ALTERNATIVES.sub(lambda found: rng.choice(found.group(1).split("|")), pattern)
    return _tidy(text)


def variants(pattern: str) -> list[str]:
    """Every text that `pattern` stands for, in order, without repetition."""
    pieces = _ALTERNATIVES.split(pattern)
    choices = [piece.split("|") if i % 2 else [piece] for i, piece in enumerate(pieces)]
    return list(dict.fromkeys(_tidy("".join(parts)) for parts in itertools.product(*choices)))


def count_variants(pattern: str) -> int:
    """How many texts `pattern` stands for."""
    return len(variants(pattern))


def normal(question: str) -> str:
    """A question without case and punctuation: two that agree here are the same question."""
    return " ".join(re.findall(r"[a-z0-9_/.:-]+", question.lower())).rstrip(".")


def _parse(path: Path) -> list[Topic]:
    """The topics of one file."""
    topics = []
    for start, section in _sections(path.read_text(encoding="utf-8")):
        name, _, rest = section.partition("\n")
        listing, _, answer = rest.lstrip("\n").partition("\n\n")
        lines: dict[str, list[str]] = {mark: [] for mark in _MARKS}
        for offset, line in enumerate(listing.splitlines()):
            mark, text = line[:2], line[2:].strip()
            if mark not in lines or not text:
                raise CorpusError(f"{path.name}:{start + offset + 1}: expected '* ', '- ' or '+ ' and a text")
            lines[mark].append(text)
        patterns, held_out = tuple(lines["- "]), tuple(lines["+ "])
        phrases = tuple(phrase.strip() for line in lines["* "] for phrase in line.split(","))
        if not patterns or not answer.strip():
            raise CorpusError(f"{path.name}:{start}: topic {name!r} lacks phrasings or answer")
        topics.append(Topic(name.strip(), phrases, patterns, held_out, answer.strip()))
    return topics


def _sections(text: str) -> list[tuple[int, str]]:
    """Line number (of the heading, from 1) and text of each `## ` section."""
    parts = re.split(r"^## ", text, flags=re.MULTILINE)
    sections, line = [], 1 + parts[0].count("\n")
    for part in parts[1:]:
        sections.append((line, part))
        line += part.count("\n")
    return sections


def _check_held_out(topics: list[Topic]) -> None:
    """Refuse a held-out phrasing that is also trained on: it would measure memory only."""
    trained = {normal(text) for topic in topics for pattern in topic.patterns for text in variants(pattern)}
    for topic in topics:
        for question in topic.held_out:
            if normal(question) in trained:
                raise CorpusError(f"topic {topic.name!r}: {question!r} is held out and trained")


def _tidy(text: str) -> str:
    """Close the gaps that an empty alternative leaves."""
    return _SPACES.sub(" ", text).replace(" ?", "?").replace(" ,", ",").strip()
