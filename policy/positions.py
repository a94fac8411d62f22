"""YAML text to plain data, with the line and column of every key and value.

The accepted part of YAML 1.2.2 has one reading: one document, mappings with text keys, sequences and scalars of the
core schema (section 10.3.2) with decimal, finite numbers only, so ``no``, ``2025-01-01`` and ``0x10`` are texts.
Aliases, anchors, tags, directives, merge keys, duplicate keys, and files beyond the bounds below are refused.

The text is read as a stream of libyaml's events. The first pass builds the data and records no positions; a ``Locator``
makes a second pass when it is first asked for one.

Pure: the caller reads the file.
"""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass, field
from typing import Any

from yaml import Mark, MarkedYAMLError, YAMLError
from yaml.cyaml import CParser
from yaml.events import (
    AliasEvent,
    DocumentEndEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    StreamEndEvent,
)

from policy.errors import PolicySyntaxError, Problem
from policy.yaml_text import BYTE_ORDER_MARK, TAB_MESSAGE, place_at, refused_character, shielded, stray_tab, worded

MAX_TEXT_BYTES = 4 << 20
"""Largest size of a file in bytes: ten thousand tenants with most of their keys written out."""

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
_FIRST = frozenset("~nNtTfF+-.0123456789")
"""First characters of unquoted scalars that may be no text; all others are text."""


@dataclass(frozen=True, slots=True)
class _Places:
    """Positions of the values and keys of one file, by path."""

    values: dict[Path, Place] = field(default_factory=dict)
    keys: dict[Path, Place] = field(default_factory=dict)


class Locator:
    """Positions of the keys and values of one file; lines and columns count from 1.

    The text is read again when the first position is asked for: most policies have no mistake and need none.
    """

    def __init__(self, text: str = "") -> None:
        """``text``: a text that ``load_yaml`` has accepted."""
        self._text = text
        self._places: _Places | None = None

    def __call__(self, path: Path) -> Place:
        """Return line and column of the value at ``path``, or of its nearest existing parent."""
        places = self._read().values
        while path and path not in places:
            path = path[:-1]
        return places.get(path, (1, 1))

    def key(self, path: Path) -> Place:
        """Return line and column of the key at ``path``; of the value where it has no mapping key."""
        return self._read().keys.get(path) or self(path)

    def _read(self) -> _Places:
        if self._places is None:
            self._places = _Places()
            _Reader("", self._text, self._places).document()
        return self._places


def load_yaml(text: str, name: str) -> tuple[Any, Locator]:
    """Parse ``text`` into dicts, lists and scalars, with the position of each part.

    An empty document is ``None``.

    Raises:
        PolicySyntaxError: the text is not the YAML described above; ``name`` is the file in its problem.
    """
    if len(text.encode("utf-8", "surrogatepass")) > MAX_TEXT_BYTES:
        raise _refusal(name, (1, 1), f"the file is larger than {MAX_TEXT_BYTES} bytes")
    text = text.removeprefix(BYTE_ORDER_MARK)
    if (index := refused_character(text)) is not None:
        raise _refusal(name, place_at(text, index), f"character U+{ord(text[index]):04X} is not allowed")
    reader = _Reader(name, text)
    tab = reader.stray_tab()
    try:
        data = reader.document()
    except PolicySyntaxError as error:
        [problem] = error.problems
        if tab is None or (problem.line, problem.column) < tab:
            raise
    else:
        if tab is None:
            return data, Locator(text)
    raise _refusal(name, tab, TAB_MESSAGE)


class _Reader:
    """Builds data from libyaml's events; recursion is bounded by ``MAX_DEPTH``."""

    def __init__(self, name: str, text: str, places: _Places | None = None) -> None:
        """``places``: receives the position of every part; None: positions are not recorded."""
        self._name = name
        self._original = text
        self._text, self._restore = shielded(text)
        self._next = CParser(self._text).get_event
        self._places = places
        self._path: list[str | int] = []

    def stray_tab(self) -> Place | None:
        """Return line and column of the first tab where none may stand, if there is one."""
        index = stray_tab(self._text)
        return None if index is None else place_at(self._text, index)

    def document(self) -> Any:
        """Read everything up to the end of the stream; may be called once.

        Raises:
            PolicySyntaxError: the text is not the YAML that is accepted.
        """
        data: Any = None
        documents, ended = 0, False
        try:
            while type(event := self._next()) is not StreamEndEvent:
                if type(event) is DocumentEndEvent:
                    ended = event.explicit
                elif type(event) is DocumentStartEvent:
                    documents += 1
                    self._check_start(event, documents)
                    data = self._node(self._next(), 0, None)
        except MarkedYAMLError as error:
            raise self._syntax_error(error, ended=ended) from error
        except YAMLError as error:
            raise self._refusal((1, 1), f"not YAML: {error}") from error
        return data

    def _check_start(self, event: Event, documents: int) -> None:
        """Refuse directives and any document but the first."""
        if event.version is not None or event.tags:
            # The event begins at the first directive; the problem is shown at the three dashes that end them.
            line, column = _place(event.end_mark)
            raise self._refusal((line, column - 3), "directives are not accepted")
        if documents > 1:
            raise self._refusal(_place(event.start_mark), "a second document in one file is not accepted")

    def _node(self, event: Event, depth: int, key: Place | None) -> Any:
        if self._places is not None:
            self._note(self._places, event, key)
        kind = type(event)
        if kind is AliasEvent:
            raise self._refused(event, "aliases are not accepted; write the value out")
        self._check(event, depth)
        if kind is ScalarEvent:
            return self._scalar(event)
        return self._mapping(depth) if kind is MappingStartEvent else self._sequence(depth)

    def _note(self, places: _Places, event: Event, key: Place | None) -> None:
        path = tuple(self._path)
        # An omitted value has no position of its own: its key's position is used.
        missing = type(event) is ScalarEvent and not event.style and not event.value
        places.values[path] = key if missing and key is not None else _place(event.start_mark)
        if key is not None:
            places.keys[path] = key

    def _check(self, event: Event, depth: int) -> None:
        """Refuse what no scalar and no collection may have."""
        if event.anchor is not None:
            raise self._refused(event, "anchors are not accepted; write the value out where it is needed")
        if event.tag is not None:
            raise self._refused(event, "tags are not accepted; types follow from the schema")
        if depth > MAX_DEPTH:
            raise self._refused(event, f"nested deeper than {MAX_DEPTH}")

    def _mapping(self, depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        path = self._path
        while type(event := self._next()) is not MappingEndEvent:
            if type(event) is not ScalarEvent:
                raise self._refused(event, "a key must be text")
            path.append(event.value)
            self._check(event, depth)
            key: Any = self._scalar(event)
            if type(key) is not str or key == "<<" or key in result:
                path.pop()
                raise self._refused(event, _objection(event.value, key))
            path[-1] = key
            place = None if self._places is None else _place(event.start_mark)
            result[key] = self._node(self._next(), depth + 1, place)
            path.pop()
        return result

    def _sequence(self, depth: int) -> list[Any]:
        result: list[Any] = []
        path = self._path
        path.append(0)
        while type(event := self._next()) is not SequenceEndEvent:
            result.append(self._node(event, depth + 1, None))
            path[-1] = len(result)
        path.pop()
        return result

    def _scalar(self, event: Event) -> str | int | float | bool | None:
        value: str = event.value
        if self._restore:
            value = value.translate(self._restore)
        if event.style or (value and value[0] not in _FIRST):
            return value
        if _NULL.fullmatch(value):
            return None
        if _INTEGER.fullmatch(value):
            if len(value) > MAX_INTEGER_DIGITS:
                raise self._refused(event, f"a number of more than {MAX_INTEGER_DIGITS} digits")
            return int(value)
        if _TRUE.fullmatch(value) or _FALSE.fullmatch(value):
            return value[0] in "tT"
        if _FLOAT.fullmatch(value):
            if not math.isfinite(float(value)):
                raise self._refused(event, "a number beyond the range of floats")
            return float(value)
        return value

    def _syntax_error(self, error: MarkedYAMLError, *, ended: bool) -> PolicySyntaxError:
        """Return libyaml's error in our words."""
        mark = error.problem_mark or error.context_mark
        if ended and "<document start>" in error.problem:
            return self._refusal(_place(mark), "a second document in one file is not accepted")
        if "expected key" in error.problem and self._text[mark.index : mark.index + 1] == ":":
            return _refusal(self._name, _place(mark), "a key must be text; put '' in quotes", tuple(self._path))
        if "escape code" in error.problem:
            # After \u four digits follow, after \U eight: libyaml refuses surrogates and what is beyond Unicode.
            digits = 4 if self._text[mark.index - 1] == "u" else 8
            if int(self._text[mark.index : mark.index + digits], 16) > sys.maxunicode:
                return self._refusal((1, 1), "not YAML: chr() arg not in range(0x110000)")
            message = "an escape names half of a character"
            return _refusal(self._name, _place(error.context_mark), message, tuple(self._path))
        place, message = worded(error, self._text, self._original)
        return self._refusal(place, message)

    def _refused(self, event: Event, message: str) -> PolicySyntaxError:
        """Return a problem of the part at the reader's path."""
        return _refusal(self._name, _place(event.start_mark), message, tuple(self._path))

    def _refusal(self, place: Place, message: str) -> PolicySyntaxError:
        """Return a problem of the text that belongs to no path."""
        return _refusal(self._name, place, message)


def _objection(written: str, key: object) -> str:
    """Return the reason why a mapping cannot have a key."""
    if not isinstance(key, str):
        return f"a key must be text; put {written!r} in quotes"
    if key == "<<":
        return "merge keys are not accepted; write the values out"
    return f"key {key!r} stands here twice"


def dotted(path: Path) -> str:
    """Format a path as text: ``tenants.alpha.models[0]``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _place(mark: Mark) -> Place:
    return mark.line + 1, mark.column + 1


def _refusal(name: str, place: Place, message: str, path: Path = ()) -> PolicySyntaxError:
    return PolicySyntaxError([Problem(name, *place, dotted(path), message)])
