"""YAML text to plain data, with the line and column of every key and value.

The accepted part of YAML 1.2.2 has one reading: one document, mappings with text keys, sequences and scalars of the
core schema (section 10.3.2) with decimal, finite numbers only, so ``no``, ``2025-01-01`` and ``0x10`` are texts.
Aliases, anchors, tags, directives, merge keys, duplicate keys, and files beyond the bounds below are refused. The text
is read once, as a stream of parser events, so that a construct is refused before anything is built from it.

Pure: the caller reads the file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, NoReturn

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)
from ruamel.yaml.reader import ReaderError

from policy.errors import PolicySyntaxError, Problem

MAX_TEXT_BYTES = 1 << 20
"""Largest size of a file in bytes: some ten thousand tenants, and about six seconds of parsing."""

MAX_DEPTH = 16
"""Largest depth of nested mappings and sequences; our own files need five."""

MAX_INTEGER_DIGITS = 18
"""Largest number of digits of an integer; no limit needs more than 64 bits."""

Path = tuple[str | int, ...]
Place = tuple[int, int]

_NULL = re.compile(r"~|null|Null|NULL|")
_TRUE = re.compile(r"true|True|TRUE")
_FALSE = re.compile(r"false|False|FALSE")
_INTEGER = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")


class Locator:
    """Positions of the keys and values of one file; lines and columns count from 1."""

    def __init__(self) -> None:
        self._values: dict[Path, Place] = {}
        self._keys: dict[Path, Place] = {}

    def __call__(self, path: Path) -> Place:
        """Return line and column of the value at ``path``, or of its nearest existing parent."""
        return self._nearest(path, self._values)

    def key(self, path: Path) -> Place:
        """Return line and column of the key at ``path``; of the value where it has no mapping key."""
        return self._keys.get(path) or self._nearest(path, self._values)

    def note(self, path: Path, *, key: Place | None, value: Place) -> None:
        """Record one position; called only by the reader of the file."""
        self._values[path] = value
        if key is not None:
            self._keys[path] = key

    @staticmethod
    def _nearest(path: Path, places: dict[Path, Place]) -> Place:
        while path and path not in places:
            path = path[:-1]
        return places.get(path, (1, 1))


def load_yaml(text: str, name: str) -> tuple[Any, Locator]:
    """Parse ``text`` into dicts, lists and scalars, with the position of each part.

    An empty document is ``None``.

    Raises:
        PolicySyntaxError: the text is not the YAML described above; ``name`` is the file in its problem.
    """
    if len(text.encode("utf-8", "surrogatepass")) > MAX_TEXT_BYTES:
        raise _refusal(name, (1, 1), f"the file is larger than {MAX_TEXT_BYTES} bytes")
    try:
        return _Reader(name, YAML(typ="rt", pure=True).parse(text)).document()
    except ReaderError as error:
        before = text[: error.position]
        place = (before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1)
        raise _refusal(name, place, f"character U+{ord(text[error.position]):04X} is not allowed") from error
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = (mark.line + 1, mark.column + 1) if mark is not None else (1, 1)
        parts = [str(part) for part in (error.context, error.problem) if part]
        raise _refusal(name, place, "not YAML: " + ": ".join(parts)) from error
    except (YAMLError, ValueError) as error:
        # ValueError: an escape in quotes that names no character, which the parser does not catch.
        raise _refusal(name, (1, 1), f"not YAML: {error}") from error


class _Reader:
    """Builds data from parser events; recursion is bounded by ``MAX_DEPTH``."""

    def __init__(self, name: str, events: Iterator[Event]) -> None:
        self._name = name
        self._events = events
        self._locator = Locator()

    def document(self) -> tuple[Any, Locator]:
        """Read everything up to the end of the stream."""
        data: Any = None
        documents = 0
        for event in self._events:
            if isinstance(event, DocumentStartEvent):
                documents += 1
                if event.version is not None or event.tags:
                    self._refuse(event, "directives are not accepted")
                if documents > 1:
                    self._refuse(event, "a second document in one file is not accepted")
                data = self._node(next(self._events), (), 0)
        return data, self._locator

    def _node(self, event: Event, path: Path, depth: int, key: Place | None = None) -> Any:
        # An omitted value has no position of its own: its key's position is used.
        missing = isinstance(event, ScalarEvent) and event.style is None and not event.value
        place = key if missing and key is not None else _place(event)
        self._locator.note(path, key=key, value=place)
        if isinstance(event, AliasEvent):
            self._refuse(event, "aliases are not accepted; write the value out", path)
        assert isinstance(event, ScalarEvent | MappingStartEvent | SequenceStartEvent)
        if event.anchor is not None:
            self._refuse(event, "anchors are not accepted; write the value out where it is needed", path)
        if event.ctag is not None:
            self._refuse(event, "tags are not accepted; types follow from the schema", path)
        if depth > MAX_DEPTH:
            self._refuse(event, f"nested deeper than {MAX_DEPTH}", path)
        if isinstance(event, MappingStartEvent):
            return self._mapping(path, depth)
        if isinstance(event, SequenceStartEvent):
            return self._sequence(path, depth)
        return self._scalar(event, path)

    def _mapping(self, path: Path, depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        while not isinstance(event := next(self._events), MappingEndEvent):
            if not isinstance(event, ScalarEvent):
                self._refuse(event, "a key must be text", path)
            key = self._node(event, (*path, event.value), depth)
            if not isinstance(key, str):
                self._refuse(event, f"a key must be text; put {event.value!r} in quotes", path)
            if key == "<<":
                self._refuse(event, "merge keys are not accepted; write the values out", path)
            if key in result:
                self._refuse(event, f"key {key!r} stands here twice", path)
            result[key] = self._node(next(self._events), (*path, key), depth + 1, _place(event))
        return result

    def _sequence(self, path: Path, depth: int) -> list[Any]:
        result: list[Any] = []
        while not isinstance(event := next(self._events), SequenceEndEvent):
            result.append(self._node(event, (*path, len(result)), depth + 1))
        return result

    def _scalar(self, event: ScalarEvent, path: Path) -> str | int | float | bool | None:
        value: str = event.value
        if event.style is not None:
            if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
                self._refuse(event, "an escape names half of a character", path)
            return value
        if _NULL.fullmatch(value):
            return None
        if _INTEGER.fullmatch(value):
            if len(value) > MAX_INTEGER_DIGITS:
                self._refuse(event, f"a number of more than {MAX_INTEGER_DIGITS} digits", path)
            return int(value)
        if _TRUE.fullmatch(value) or _FALSE.fullmatch(value):
            return value[0] in "tT"
        if _FLOAT.fullmatch(value):
            if not math.isfinite(float(value)):
                self._refuse(event, "a number beyond the range of floats", path)
            return float(value)
        return value

    def _refuse(self, event: Event, message: str, path: Path = ()) -> NoReturn:
        raise _refusal(self._name, _place(event), message, path)


def dotted(path: Path) -> str:
    """Format a path as text: ``tenants.alpha.models[0]``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _place(event: Event) -> Place:
    return event.start_mark.line + 1, event.start_mark.column + 1


def _refusal(name: str, place: Place, message: str, path: Path = ()) -> PolicySyntaxError:
    return PolicySyntaxError([Problem(name, *place, dotted(path), message)])
