"""The corpus on disk: topics with phrasings of a question and one answer each.

`corpus/` are the first topics. Over them are those that `build.py` makes of the references (`desk/reference/`), topics
written by hand (`desk/`) and more ways to ask for them (`desk/wider/`); `desk/held-out/` has questions that are
measured only. A later layer adds phrasings to a topic of the same name, and its answer, where it has one, takes the
place of the earlier one (`combine`).

A corpus file is Markdown. A second-level heading opens a topic; its text is the topic's name.
The list under it holds the phrasings; everything after the first blank line is the answer.

    ## add-tenant
    * new tenant, adding a tenant                 phrases that name the topic, with commas between
    - how do I {add|create} a {new |}tenant?      a phrasing to train on
    ! {add|create} a tenant, let a team in        goals, with commas between: what somebody has in mind to do
    ~ we have a new customer                      a situation: a sentence that is no question yet
    % tenant, new, add, onboard                   words, with commas between, a few of which are enough
    + what is the procedure for a new tenant?     a phrasing held out: measured, never trained on
    = old-name                                    topics, with commas between, whose phrasings this one takes over

    Add it under `tenants:` in policy.yaml, ...

`{a|b|}` stands for any one of its alternatives, the last of which may be empty. Braces do not
nest. Held-out phrasings and answers are taken as they are.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

_ALTERNATIVES = re.compile(r"\{([^{}]*)\}")
_MARKS = ("* ", "- ", "+ ", "! ", "~ ", "% ", "= ")
_WRITTEN, _REFERENCE = 1.0, 0.3
"""Weights of topics with phrasings written by hand, and of those that were generated whole."""
_UNKNOWN = ("command", "setting", "metric", "error", "field")
_ENDLESS = {"absent": 6.0} | dict.fromkeys((f"unknown-{kind}" for kind in _UNKNOWN), 2.0)
"""Weights of topics about what there is not, which has no end."""
_COMMAS = re.compile(r",(?![^{}]*\})")
_SPACES = re.compile(r" {2,}")


class CorpusError(ValueError):
    """A corpus file does not follow the format; the message names file and line."""


@dataclass(frozen=True, slots=True)
class Topic:
    """One thing that can be asked: its names, phrasings to train on and held out, the answer.

    `weight` says how often it is asked beside the others.
    """

    name: str
    phrases: tuple[str, ...]
    patterns: tuple[str, ...]
    held_out: tuple[str, ...]
    answer: str
    goals: tuple[str, ...] = ()
    situations: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    absorbs: tuple[str, ...] = ()
    weight: float = 0.0

    @property
    def templates(self) -> tuple[str, ...]:
        """Everything that a question is made of, keywords excepted."""
        return (*self.phrases, *self.patterns, *self.goals, *self.situations)


def load(folder: Path) -> tuple[Topic, ...]:
    """Read every `*.md` in `folder`, in the order of names.

    Raises CorpusError for a malformed file, for a topic that occurs twice, and for a held-out
    phrasing that a training pattern also produces.
    """
    topics = _read(folder, whole=True)
    _check_held_out(topics)
    return topics


def load_desk(mini: Path) -> tuple[Topic, ...]:
    """All topics of the help desk: `corpus/`, `desk/reference/` and `desk/` of the folder `mini`, one over the other.

    Raises CorpusError as `load` does, and where a topic has no answer in any layer.
    """
    desk = mini / "desk"
    written = [_read(desk), _read(desk / "wider")]
    names = {topic.name for layer in written for topic in layer}
    layers = [_read(mini / "corpus"), _read(desk / "reference"), *written, _read(desk / "held-out")]
    topics = []
    for topic in combine(layers):
        # What people ask in their own words needs more practice than names that are copied from the question.
        plain = topic.name in names or not topic.keywords
        weight = _WRITTEN if plain else _REFERENCE
        topics.append(replace(topic, weight=_ENDLESS.get(topic.name, weight)))
    _check_held_out(topics)
    return tuple(topics)


def combine(layers: Iterable[Sequence[Topic]]) -> tuple[Topic, ...]:
    """Lay topics over each other: phrasings are added up, the last answer holds, absorbed topics are gone."""
    found: dict[str, Topic] = {}
    for layer in layers:
        for topic in layer:
            found[topic.name] = _over(found[topic.name], topic) if topic.name in found else topic
    for topic in list(found.values()):
        for name in topic.absorbs:
            if name not in found or name == topic.name:
                raise CorpusError(f"topic {topic.name!r} takes over {name!r}, which is not there")
            found[topic.name] = _over(found.pop(name), found[topic.name])
    for topic in found.values():
        if not topic.answer or not topic.templates:
            raise CorpusError(f"topic {topic.name!r} lacks phrasings or answer in every layer")
    return tuple(found.values())


def _over(below: Topic, above: Topic) -> Topic:
    """One topic of two: the name and, where it has one, the answer are those of `above`."""
    return Topic(
        name=above.name,
        phrases=below.phrases + above.phrases,
        patterns=below.patterns + above.patterns,
        held_out=below.held_out + above.held_out,
        answer=above.answer or below.answer,
        goals=below.goals + above.goals,
        situations=below.situations + above.situations,
        keywords=below.keywords + above.keywords,
        absorbs=below.absorbs + above.absorbs,
    )


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


def _read(folder: Path, *, whole: bool = False) -> tuple[Topic, ...]:
    """The topics of all files of a folder, in which no name occurs twice; `whole`: each with patterns and answer."""
    topics = [topic for path in sorted(folder.glob("*.md")) for topic in _parse(path, whole)]
    names = [topic.name for topic in topics]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise CorpusError(f"topics occur twice: {', '.join(twice)}; give each its own name")
    return tuple(topics)


def _parse(path: Path, whole: bool) -> list[Topic]:
    """The topics of one file."""
    topics = []
    for start, section in _sections(path.read_text(encoding="utf-8")):
        name, _, rest = section.partition("\n")
        rest = rest.lstrip("\n")
        listing, _, answer = rest.partition("\n\n") if whole or rest.startswith(_MARKS) else ("", "", rest)
        lines: dict[str, list[str]] = {mark: [] for mark in _MARKS}
        for offset, line in enumerate(listing.splitlines()):
            mark, text = line[:2], line[2:].strip()
            if mark not in lines or not text:
                raise CorpusError(f"{path.name}:{start + offset + 1}: expected '* ', '- ' or '+ ' and a text")
            lines[mark].append(text)
        if whole and not (lines["- "] and answer.strip()):
            raise CorpusError(f"{path.name}:{start}: topic {name!r} lacks phrasings or answer")
        topics.append(
            Topic(
                name=name.strip(),
                phrases=_listed(lines["* "]),
                patterns=tuple(lines["- "]),
                held_out=tuple(lines["+ "]),
                answer=answer.strip(),
                goals=_listed(lines["! "]),
                situations=tuple(lines["~ "]),
                keywords=_listed(lines["% "]),
                absorbs=_listed(lines["= "]),
            )
        )
    return topics


def _listed(lines: Sequence[str]) -> tuple[str, ...]:
    """The parts of lines with commas between."""
    return tuple(part.strip() for line in lines for part in _COMMAS.split(line) if part.strip())


def _sections(text: str) -> list[tuple[int, str]]:
    """Line number (of the heading, from 1) and text of each `## ` section."""
    parts = re.split(r"^## ", text, flags=re.MULTILINE)
    sections, line = [], 1 + parts[0].count("\n")
    for part in parts[1:]:
        sections.append((line, part))
        line += part.count("\n")
    return sections


def _check_held_out(topics: Sequence[Topic]) -> None:
    """Refuse a held-out phrasing that is also trained on: it would measure memory only."""
    trained = {normal(text) for topic in topics for pattern in topic.patterns for text in variants(pattern)}
    for topic in topics:
        for question in topic.held_out:
            if normal(question) in trained:
                raise CorpusError(f"topic {topic.name!r}: {question!r} is held out and trained")


def _tidy(text: str) -> str:
    """Close the gaps that an empty alternative leaves."""
    return _SPACES.sub(" ", text).replace(" ?", "?").replace(" ,", ",").strip()
