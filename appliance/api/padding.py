"""What an observer of the wire may learn of a padded tenant's answers: sizes and moments as rules; pure but for a wait.

An encrypted connection shows how long each record is and when it leaves, and that is enough to tell what a model
talks about (Whisper Leak, arXiv 2511.03675; arXiv 2403.09751). So a padded answer has records of one size, one a tick,
whether tokens came or not, and their number is one of few. What is left: the request's own size, which shape of answer
was asked for (streamed or not, log-probabilities, several choices), and of its length which of these numbers it is.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

MOST_RECORD_BYTES = 64 << 10
"""Bytes of a record for several choices with many log-probabilities: 1.3 MB/s, some ten thousand numbers a second."""

SCORES = 16
"""Times larger a record is when log-probabilities were asked for: a token with 20 alternatives is 2 KiB of JSON."""

FRAMING_BYTES = 4
"""Colon, space and line end of one header."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """The rules. ``_s`` is seconds."""

    tick_s: float = 0.05
    """Between two records; also what every other answer's moment is rounded up to."""
    record_bytes: int = 1_024
    """Of one record: at 20 KB/s the text of a thousand tokens a second, which no stream reaches."""
    first_records: int = 32
    """The least number of records of a stream: 1.6 seconds. An answer's length below that is not seen at all."""
    growth: int = 4
    """Each number of records is so many times the one before: 32, 128, 512 ... tell at most two bits of an hour."""
    first_bytes: int = 4_096
    """The least size of an answer that is not streamed; those above grow alike."""
    head_bytes: int = 512
    """The headers of an answer are filled up to a multiple of this."""

    def records(self, needed: int) -> int:
        """How many records a stream has that needs so many."""
        return _grown(self.first_records, self.growth, needed)

    def answer_bytes(self, needed: int) -> int:
        """How long an answer is made that has so many bytes."""
        return _grown(self.first_bytes, self.growth, needed)

    def size(self, *, choices: int, scored: bool) -> int:
        """Bytes of each record of an answer of this shape."""
        return min(MOST_RECORD_BYTES, self.record_bytes * choices * (SCORES if scored else 1))

    def head(self, rows: list[tuple[str, str]]) -> list[tuple[str, str]]:
        """The headers, filled up."""
        name = "x-athanor-padding"
        size = sum(len(one) + len(value) + FRAMING_BYTES for one, value in rows) + len(name) + FRAMING_BYTES
        return [*rows, (name, "." * (-size % self.head_bytes))]

    def trailer(self, message: str, rows: Sequence[tuple[str, str | bytes]]) -> tuple[tuple[str, str | bytes], ...]:
        """The trailing metadata of a failed call, filled up together with its message."""
        size = len(message) + sum(len(value) for _, value in rows)
        return (*rows, ("x-athanor-padding", "." * (-size % self.head_bytes)))

    def body(self, document: bytes) -> bytes:
        """A JSON document, filled up with blanks, which JSON ignores (RFC 8259, section 2)."""
        return document.ljust(self.answer_bytes(len(document)))


def _grown(first: int, growth: int, needed: int) -> int:
    size = first
    while size < needed:
        size *= growth
    return size


def fill_events(events: bytes, size: int) -> bytes:
    """A record of exactly ``size`` bytes: whole server-sent events or parts of one, then a comment, which parsers drop.

    What follows must be at an event's end when there is room left. Source: WHATWG HTML, section 9.2.
    """
    left = size - len(events)
    assert left >= 0
    if left <= 2:
        return events + b"\n" * left
    return b"%b:%b\n\n" % (events, b"." * (left - 3))


class Ticks:
    """Moments at a fixed distance from a beginning, on the monotonic clock. A missed one is left out, never made up
    for, so that two records never leave together."""

    def __init__(self, began: float, tick_s: float) -> None:
        self._began = began
        self._tick_s = tick_s
        self._last = 0

    @property
    def passed(self) -> int:
        """Ticks begun by now, the current one included."""
        return max(self._last, math.ceil((time.monotonic() - self._began) / self._tick_s))

    async def next(self) -> None:
        """Wait for the next moment."""
        self._last = max(self._last + 1, math.ceil((time.monotonic() - self._began) / self._tick_s))
        await asyncio.sleep(self._began + self._last * self._tick_s - time.monotonic())

    async def rest(self, padding: Padding) -> None:
        """Wait for the next moment at which an answer may leave that an engine has worked for."""
        await asyncio.sleep(self._began + padding.records(self.passed) * self._tick_s - time.monotonic())
