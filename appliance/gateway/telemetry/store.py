"""The embedded trace store: the last requests, in memory, so that a box without a collector still
shows them.

Stdlib only, because the command line reads the same shapes. A trace is filed under its request id,
which the server made; a trace id comes from the caller when it sent a ``traceparent``, so several
requests may share one and it is never a key.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

_PREFIX = re.compile(r"^[a-z]+[-_]")
"""``req_`` of our ids, ``chatcmpl-`` and ``cmpl-`` of what a client saw: the digits are the same."""

MAX_TRACES = 512
"""Requests kept; about 8 KiB each with all spans, so 4 MiB when full."""

MAX_SPANS = 32
"""Spans kept of one request: two and five phases, and room for eight replays."""

MIN_PREFIX = 6
"""Hex digits by which a trace may be named: one in 16 million."""

Attribute = str | int | float | bool
"""Lists do not occur: a list attribute is stored as its items joined by a comma."""


@dataclass(frozen=True, slots=True)
class StoredSpan:
    """Finished span. Times are Unix nanoseconds; ``error`` is its ``error.type``."""

    span_id: str
    parent_id: str | None
    name: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Attribute] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSummary:
    """One request as a list shows it. None: not known, or the request ended before."""

    request_id: str
    trace_id: str
    route: str
    outcome: str
    """One of ``appliance.common.outcomes``."""
    started_ns: int
    duration_s: float
    error: str | None = None
    tenant: str | None = None
    model: str | None = None
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    ttft_s: float | None = None
    """Time to first token."""
    token_s: float | None = None
    """Mean time per output token after the first."""
    finish_reason: str | None = None
    policy_rule: str | None = None
    sandbox: str | None = None


@dataclass(frozen=True, slots=True)
class StoredTrace:
    """One request with its spans in order of their start."""

    summary: TraceSummary
    spans: tuple[StoredSpan, ...]
    dropped_spans: int = 0
    """Spans of this request beyond ``MAX_SPANS``."""


@dataclass(frozen=True, slots=True)
class TraceList:
    """List of requests, those that ended last first."""

    traces: tuple[TraceSummary, ...]
    recorded: int
    """Requests recorded since the start, those that have left the store included."""
    capacity: int


@dataclass(frozen=True, slots=True)
class Ended:
    """One finished request and how long ago it ended, by a clock that nobody sets."""

    age_s: float
    summary: TraceSummary


class TraceStore:
    """A ring of the last ``capacity`` traces; safe to use from several threads."""

    def __init__(self, capacity: int = MAX_TRACES, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock``: monotonic seconds."""
        self._clock = clock
        self._traces: deque[StoredTrace] = deque(maxlen=capacity)
        self._ended: deque[float] = deque(maxlen=capacity)
        self._recorded = 0
        self._capacity = capacity
        self._lock = threading.Lock()

    def record(self, trace: StoredTrace) -> None:
        """Keep a finished request; the oldest is dropped when the store is full."""
        kept = trace.spans[:MAX_SPANS]
        dropped = trace.dropped_spans + len(trace.spans) - len(kept)
        with self._lock:
            self._traces.append(StoredTrace(trace.summary, kept, dropped))
            self._ended.append(self._clock())
            self._recorded += 1

    def newest(self, limit: int) -> TraceList:
        """Return the ``limit`` requests that ended last."""
        with self._lock:
            kept = list(reversed(self._traces))[: max(limit, 0)]
            return TraceList(tuple(trace.summary for trace in kept), self._recorded, self._capacity)

    def ended(self, within_s: float) -> tuple[Ended, ...]:
        """Return the requests that ended in the last ``within_s`` seconds, the newest first."""
        now, found = self._clock(), []
        with self._lock:
            for at, trace in zip(reversed(self._ended), reversed(self._traces), strict=True):
                if now - at > within_s:
                    break
                found.append(Ended(now - at, trace.summary))
        return tuple(found)

    def find(self, wanted: str) -> tuple[StoredTrace, ...]:
        """Return all traces that ``wanted`` names, newest first: a request id, a trace id, or at least
        ``MIN_PREFIX`` hex digits that one of them begins with. A request id may have the prefix
        of the response's id (``chatcmpl-``) or none. A whole id wins over a part of one. Empty
        when nothing fits.
        """
        digits = _PREFIX.sub("", wanted.strip().lower())
        with self._lock:
            newest = tuple(reversed(self._traces))
        exact = tuple(trace for trace in newest if digits in _names(trace))
        if exact or len(digits) < MIN_PREFIX:
            return exact
        return tuple(trace for trace in newest if any(name.startswith(digits) for name in _names(trace)))


def _names(trace: StoredTrace) -> tuple[str, str]:
    summary = trace.summary
    return (_PREFIX.sub("", summary.request_id), summary.trace_id)
