"""Rules of padding: sizes and times of a padded tenant's answers, so that an observer of the wire learns little.

The length and the time of each record of an encrypted connection are enough to tell the subject of an answer (Whisper
Leak, arXiv 2511.03675; arXiv 2403.09751). So a padded answer has records of one size, one for each tick, whether tokens
came or not, and the number of records is one of few. An observer still sees the size of the request, the shape of the
answer (streamed or not, log-probabilities, several choices), and which of the few numbers its length falls under.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from appliance.gateway.generate_request import CallDelta, Delta

MOST_RECORD_BYTES = 64 << 10
"""Bytes of a record for several choices with many log-probabilities: 1.3 MB/s, some ten thousand numbers a second."""

SCORES = 16
"""Times larger a record is when log-probabilities were asked for: a token with 20 alternatives is 2 KiB of JSON."""

FRAMING_BYTES = 4
"""Colon, space and line end of one header."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """Sizes and intervals of padded answers. ``_s`` is seconds."""

    tick_s: float = 0.05
    """Seconds between two records; the time of every other answer is rounded up to a multiple of it."""
    record_bytes: int = 1_024
    """Size of one record in bytes: at 20 KB/s the text of a thousand tokens a second, which no stream reaches."""
    first_records: int = 32
    """Least number of records of a stream: 1.6 seconds. Shorter answers look alike."""
    growth: int = 4
    """Each number of records is so many times the one before: 32, 128, 512 ... tell at most two bits of an hour."""
    first_bytes: int = 4_096
    """Least bytes of an answer that is not streamed; larger sizes grow by ``growth`` as well."""
    head_bytes: int = 512
    """Bytes to a multiple of which the headers of an answer are filled up."""

    def records(self, needed: int) -> int:
        """Return the number of records of a stream that needs at least ``needed``."""
        return _grown(self.first_records, self.growth, needed)

    def answer_bytes(self, needed: int) -> int:
        """Return the bytes to which an answer of ``needed`` bytes is filled up."""
        return _grown(self.first_bytes, self.growth, needed)

    def size(self, *, choices: int, scored: bool) -> int:
        """Return the bytes of each record of an answer of this shape."""
        return min(MOST_RECORD_BYTES, self.record_bytes * choices * (SCORES if scored else 1))

    def head(self, rows: list[tuple[str, str]]) -> list[tuple[str, str]]:
        """Return the headers, filled up by one more."""
        name = "x-athanor-padding"
        size = sum(len(one) + len(value) + FRAMING_BYTES for one, value in rows) + len(name) + FRAMING_BYTES
        return [*rows, (name, "." * (-size % self.head_bytes))]

    def trailer(self, message: str, details: bytes) -> tuple[str, str]:
        """Return the trailer that fills up those of a failed call together with its message."""
        size = len(message) + len(details)
        return ("x-athanor-padding", "." * (-size % self.head_bytes))

    def body(self, document: bytes) -> bytes:
        """Return a JSON document filled up with blanks, which JSON ignores (RFC 8259, section 2)."""
        return document.ljust(self.answer_bytes(len(document)))


def _grown(first: int, growth: int, needed: int) -> int:
    size = first
    while size < needed:
        size *= growth
    return size


def fill_events(events: bytes, size: int) -> bytes:
    """Return a record of exactly ``size`` bytes: whole events or parts of one, then a comment, which parsers drop.

    What follows must be at an event's end when there is room left. Source: WHATWG HTML, section 9.2.
    """
    left = size - len(events)
    assert left >= 0
    if left <= 2:
        return events + b"\n" * left
    return b"%b:%b\n\n" % (events, b"." * (left - 3))


class Ticks:
    """Ticks at a fixed interval from a start, on the monotonic clock. A missed tick is skipped, so that two records
    never leave together."""

    def __init__(self, began: float, tick_s: float) -> None:
        self._began = began
        self._tick_s = tick_s
        self._last = 0

    @property
    def passed(self) -> int:
        """Number of ticks begun by now, the current one included."""
        return max(self._last, math.ceil((time.monotonic() - self._began) / self._tick_s))

    async def next(self) -> None:
        """Wait for the next tick."""
        self._last = max(self._last + 1, math.ceil((time.monotonic() - self._began) / self._tick_s))
        await asyncio.sleep(self._began + self._last * self._tick_s - time.monotonic())

    async def rest(self, padding: Padding) -> None:
        """Wait for the next tick at which an answer that an engine has worked for may leave."""
        await asyncio.sleep(self._began + padding.records(self.passed) * self._tick_s - time.monotonic())


def merged(deltas: Iterable[Delta]) -> list[Delta]:
    """Return one delta for each choice, joined from its deltas, in the order of the choices' first deltas."""
    parts: dict[int, list[Delta]] = {}
    for delta in deltas:
        parts.setdefault(delta.choice, []).append(delta)
    return [
        Delta(
            "".join(one.text for one in own),
            tuple(token for one in own for token in one.token_ids),
            tuple(entry for one in own for entry in one.logprobs),
            choice,
            "".join(one.reasoning for one in own),
            _joined([call for one in own for call in one.calls]),
        )
        for choice, own in parts.items()
    ]


def cut(delta: Delta, fits: Callable[[Delta], bool]) -> Iterator[Delta]:
    """Yield the delta in parts that fit; a delta of a single token that does not is yielded whole. Text and tokens are
    halved separately, so a part's text need not be that of its tokens."""
    tokens, scored, text = len(delta.token_ids), len(delta.logprobs), len(delta.text)
    reasoning, calls = len(delta.reasoning), len(delta.calls)
    if fits(delta):
        yield delta
        return
    if calls == 1 and len(delta.calls[0].arguments) > 1 and max(tokens, scored, text, reasoning) <= 1:
        delta = replace(delta, calls=_split(delta.calls[0]))
        calls = len(delta.calls)
    if max(tokens, scored, text, reasoning, calls) <= 1:
        yield delta
        return
    for first in (True, False):
        part = replace(
            delta,
            text=delta.text[_half(text, first=first)],
            token_ids=delta.token_ids[_half(tokens, first=first)],
            logprobs=delta.logprobs[_half(scored, first=first)],
            reasoning=delta.reasoning[_half(reasoning, first=first)],
            calls=delta.calls[_half(calls, first=first)],
        )
        yield from cut(part, fits)


def _joined(calls: Iterable[CallDelta]) -> tuple[CallDelta, ...]:
    """Join pieces of one call that follow each other."""
    joined: list[CallDelta] = []
    for call in calls:
        last = joined[-1] if joined else None
        if last is not None and last.index == call.index and not call.refused and not last.refused:
            joined[-1] = replace(last, arguments=last.arguments + call.arguments)
        else:
            joined.append(call)
    return tuple(joined)


def _split(call: CallDelta) -> tuple[CallDelta, CallDelta]:
    middle = (len(call.arguments) + 1) // 2
    rest = CallDelta(call.index, arguments=call.arguments[middle:], refused=call.refused)
    return replace(call, arguments=call.arguments[:middle], refused=False), rest


def _half(count: int, *, first: bool) -> slice:
    middle = (count + 1) // 2
    return slice(middle) if first else slice(middle, count)
