"""Server-sent events: one event is one body chunk, and a token costs one string escape and one join.

Everything of a chunk but its text is the same for all chunks of a request, so it is rendered once. The escape is the
standard library's C one; its output is ASCII, in which no line terminator of any client's parser can occur.

Source: the event stream format of the WHATWG HTML standard, section 9.2.
"""

from __future__ import annotations

import json
from typing import Any

CONTENT_TYPE = "text/event-stream; charset=utf-8"

DONE = b"data: [DONE]\n\n"
"""OpenAI's end mark; sent after a complete answer only."""

KEEPALIVE = b": keepalive\n\n"
"""A comment: parsers drop it, proxies see traffic."""

_HOLE = "\x00"
"""Stands for the text while a chunk's constant parts are rendered; its escape occurs in no model name (printable)."""

_escape = json.encoder.encode_basestring_ascii


def event(data: Any) -> bytes:
    """One ``data:`` event with ``data`` as JSON."""
    return b"data: " + json.dumps(data, separators=(",", ":")).encode("ascii") + b"\n\n"


def named_event(name: str, data: Any) -> bytes:
    """One event of a type, with ``data`` as JSON."""
    return b"event: " + name.encode("ascii") + b"\n" + event(data)


def escaped(text: str) -> str:
    """The text as a JSON string in ASCII."""
    return _escape(text)


class ChunkTemplate:
    """A chunk with one string left open."""

    def __init__(self, before: bytes, after: bytes) -> None:
        self._before = before
        self._after = after

    @classmethod
    def around(cls, make: Any, name: str = "") -> ChunkTemplate:
        """The template of ``make(text)``, an object in which the text occurs exactly once; ``name`` is the event's."""
        made = named_event(name, make(_HOLE)) if name else event(make(_HOLE))
        before, hole, after = made.partition(_escape(_HOLE).encode("ascii"))
        assert hole
        assert _escape(_HOLE).encode("ascii") not in after
        return cls(before, after)

    def fill(self, text: str) -> bytes:
        """The event with ``text`` in its place."""
        return b"".join((self._before, _escape(text).encode("ascii"), self._after))
