"""How often tokens are handed on to clients: at each step while that is cheap, in larger pieces when it is not. Pure.

Writing a chunk costs the same whether it holds one token or five: a system call, a packet, a wake-up of the client. The
machine counts as *busy* when handing every step on at once would take more of a core than ``SHARE``; then all streams
together are handed on in passes that keep to that share, and what came in between leaves as one chunk. A pass that runs
late is a sign as well: other work has the processor, so passes become rarer by what they were late.

Nothing waits longer than ``MOST_S``. A request's first token, its end, a single stream and a stream of a class with a
fixed interval do not wait at all.
"""

from __future__ import annotations

CHUNK_S = 20e-6
"""Processor seconds of one chunk, decoding to socket, measured on a 2-core virtual machine: 14 to 34 us."""

SHARE = 1 / 32
"""Part of one core that chunks may take before they grow."""

MOST_S = 0.04
"""Longest wait of a token for others, in seconds; with a late timer still below 50 ms beyond the step itself."""

LATE_WEIGHT = 0.25
"""Weight of the newest pass in the mean lateness: about four passes are remembered."""

LATE_FACTOR = 4.0
"""Factor between the mean lateness of passes and the least interval between them; the usual few tenths of a millisecond
lengthen nothing."""


class FlushInterval:
    """Interval between passes over all streams. Times are monotonic seconds, given by the caller."""

    __slots__ = ("_late", "_then")

    def __init__(self) -> None:
        self._then = float("-inf")
        self._late = 0.0

    def wait_s(self, now: float, streams: int) -> float:
        """Return the seconds until a pass over so many live streams may begin; 0 for now."""
        return max(0.0, self._then + self.interval_s(streams) - now)

    def interval_s(self, streams: int) -> float:
        """Return the least seconds between two passes."""
        if streams <= 1:
            return 0.0
        return min(MOST_S, max(streams * CHUNK_S / SHARE, LATE_FACTOR * self._late))

    def passed(self, now: float, late_s: float) -> None:
        """Note that a pass begins, ``late_s`` after the moment for which it was planned."""
        self._then = now
        self._late += LATE_WEIGHT * (max(0.0, late_s) - self._late)
