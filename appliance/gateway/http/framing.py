"""Where a request's body ends: bytes of the connection in, bytes of the body out (RFC 9112, sections 6 and 7.1); pure.

httptools tells neither where a message ends nor how long its chunk extensions are, and gives trailers as headers. So
bodies are read here. Trailers are checked, counted and dropped: none becomes a header.
"""

from __future__ import annotations

import re

from appliance.gateway.http.head import MAX_HEAD_BYTES, MAX_HEADERS, RequestHead

MAX_EXTENSION_BYTES = 4 << 10
"""Bytes of chunk extensions in one body; no client of ours sends any."""

MAX_CHUNKS = 1 << 16
"""Chunks of one body: 64 bytes each in the largest one. Clients send kilobytes at a time."""

_SIZE = re.compile(rb"([0-9A-Fa-f]{1,8})([ \t]*;[\t\x20-\x7e\x80-\xff]*)?\r\n")
_TRAILER = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t\x20-\x7e\x80-\xff]*\r\n")


class FramingError(Exception):
    """The body breaks the rules: where it ends is unknown."""


class LengthBody:
    """A body whose length was announced."""

    __slots__ = ("_left", "done")

    def __init__(self, length: int) -> None:
        self._left = length
        self.done = False

    def feed(self, data: bytes, body: bytearray) -> int:
        """Add the body's part of ``data`` to ``body``; gives how many bytes of ``data`` that took."""
        taken = min(self._left, len(data))
        body += data if taken == len(data) else data[:taken]
        self._left -= taken
        self.done = not self._left
        return taken


class ChunkedBody:
    """A body in chunks."""

    __slots__ = ("_at_end", "_chunks", "_extensions", "_left", "_line", "_trailer_bytes", "_trailers", "done")

    def __init__(self) -> None:
        self.done = False
        self._line = b""
        self._left = 0
        """Bytes of the current chunk that are still to come."""
        self._at_end = False
        """Whether the current chunk's own line end comes next."""
        self._chunks = 0
        self._extensions = 0
        self._trailers = -1
        """Trailers so far; -1 before the last chunk."""
        self._trailer_bytes = 0

    def feed(self, data: bytes, body: bytearray) -> int:
        """Add the body's part of ``data`` to ``body``; gives how many bytes of ``data`` belong to the message.

        Raises:
            FramingError: this is no chunked body, or one of too many or too long parts.
        """
        at = 0
        while at < len(data) and not self.done:
            if self._left:
                taken = min(self._left, len(data) - at)
                body += data[at : at + taken]
                self._left -= taken
                self._at_end = not self._left
                at += taken
                continue
            end = data.find(b"\n", at) + 1
            line = self._line + data[at : end or len(data)]
            at = end or len(data)
            if (self._at_end and not b"\r\n".startswith(line)) or len(line) > MAX_HEAD_BYTES:
                raise FramingError
            self._line = b"" if end else line
            if end:
                self._take(line)
        return at

    def _take(self, line: bytes) -> None:
        if self._at_end:
            self._at_end = False
        elif self._trailers < 0:
            self._take_size(line)
        elif line == b"\r\n":
            self.done = True
        else:
            self._trailers += 1
            self._trailer_bytes += len(line)
            if self._trailers > MAX_HEADERS or self._trailer_bytes > MAX_HEAD_BYTES or not _TRAILER.fullmatch(line):
                raise FramingError

    def _take_size(self, line: bytes) -> None:
        match = _SIZE.fullmatch(line)
        if match is None:
            raise FramingError
        self._extensions += len(match[2] or b"")
        self._chunks += 1
        if self._extensions > MAX_EXTENSION_BYTES or self._chunks > MAX_CHUNKS:
            raise FramingError
        self._left = int(match[1], 16)
        if not self._left:
            self._trailers = 0


def framing_of(head: RequestHead) -> LengthBody | ChunkedBody | None:
    """What reads the body behind a head; None where there is none."""
    if head.length is None:
        return ChunkedBody()
    return LengthBody(head.length) if head.length else None
