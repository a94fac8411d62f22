"""Arguments in another notation than JSON, written as JSON while they come."""

from __future__ import annotations

import json
import re
from typing import Any

from engine.text.output.growing import Emit, Growing, MalformedCallError, Reading
from engine.text.output.parts import Parts
from engine.text.output.tools import STRING, Tool

_OPENINGS = ("{", "[", '"')
_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


class ArgumentsWriter:
    """Writes the arguments of one call, member by member."""

    def __init__(self, parts: Parts, tool: Tool) -> None:
        self._parts = parts
        self._tool = tool
        self._names: set[str] = set()

    def begin(self, name: str) -> None:
        """Begin a member.

        Raises:
            MalformedCallError: there was one of this name.
        """
        if name in self._names:
            raise MalformedCallError(f"has two arguments of the name {name[:64]!r}")
        self._parts.arguments(("," if self._names else "{") + written(name) + ":")
        self._names.add(name)

    def value(self, value: Any) -> None:
        """Write the whole value of the member that has begun."""
        self._parts.arguments(written(value))

    def json(self, raw: str) -> None:
        """Write a value that is spelt as JSON, as it is.

        Raises:
            MalformedCallError: it is not JSON.
        """
        if not _is_json(raw):
            raise MalformedCallError("has a value that is not JSON")
        self._parts.arguments(raw)

    def json_or_text(self, raw: str) -> None:
        """Write a value that is spelt bare: as it is where that is JSON, else as text."""
        self._parts.arguments(raw if _is_json(raw) else written(raw))

    def is_text(self, name: str) -> bool:
        """Return whether the schema has the member as text and nothing else."""
        return self._tool.type_of(name) == STRING

    def end(self) -> None:
        """Write the end of the arguments."""
        self._parts.arguments("}" if self._names else "{}")


def framed_text(text: Growing, parts: Parts, end: str, *, trimmed: bool) -> Reading[None]:
    """Take text up to a marker, and write it as a JSON string while it comes; ``trimmed``: without one line break at
    its beginning and one at its end.

    Raises:
        MalformedCallError: the output ended before the marker.
    """
    parts.arguments('"')
    if trimmed:
        yield from text.begins(("\n",))
    emit = _Escaped(parts.arguments, trimmed=trimmed)
    if (yield from text.until(emit, (end,))) is None:
        text.check_more()
    parts.arguments('"')


def raw_text(text: Growing, end: str) -> Reading[str]:
    """Take text up to a marker, and return it without the white space around it.

    Raises:
        MalformedCallError: the output ended before the marker.
    """
    found: list[str] = []
    if (yield from text.until(found.append, (end,))) is None:
        text.check_more()
    return "".join(found).strip()


def raw_json(text: Growing, end: str) -> Reading[str]:
    """Take a value up to a marker that does not stand in one of its strings, and return it without the white space
    around it.

    Raises:
        MalformedCallError: the output ended before the marker.
    """
    found: list[str] = []
    while True:
        if (yield from text.until(found.append, (end,))) is None:
            text.check_more()
        raw = "".join(found).strip()
        if not _ends_in_string(raw):
            return raw
        found.append(end)


class _Escaped:
    """Emits text as the inside of a JSON string; a line break at the end of it is held back."""

    def __init__(self, emit: Emit, *, trimmed: bool) -> None:
        self._emit = emit
        self._trimmed = trimmed
        self._held = ""

    def __call__(self, text: str) -> None:
        text, self._held = self._held + text, ""
        if self._trimmed and text.endswith("\n"):
            text, self._held = text[:-1], "\n"
        self._emit(written(text)[1:-1])


def written(value: Any) -> str:
    """Return the JSON of a value, as models write it.

    Raises:
        MalformedCallError: JSON has no such value.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        # Half a surrogate pair, which JSON can escape, has no UTF-8.
        return json.dumps(value) if any("\ud800" <= char <= "\udfff" for char in text) else text
    except (ValueError, RecursionError) as error:
        raise MalformedCallError("has a number that JSON does not have") from error


def _is_json(raw: str) -> bool:
    try:
        json.loads(raw, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return False
    return True


def _ends_in_string(raw: str) -> bool:
    """Return whether JSON that begins so has not come to the end of a string."""
    if not raw.startswith(_OPENINGS):
        return False
    return len(_STRINGS.sub("", raw).split('"')) == 2


def _no_constant(name: str) -> Any:
    """Refuse NaN and the infinities, which JSON does not have."""
    raise ValueError(name)
