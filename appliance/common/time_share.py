"""Share of time that work for one sandbox may take: seconds spent against seconds earned. Pure: times are arguments."""

from __future__ import annotations


class TimeShare:
    """Bucket of seconds that one sandbox may have spent on what it sends. In any ``t`` seconds at most ``burst_s`` and
    ``share`` of ``t`` are spent, and one piece of work more."""

    __slots__ = ("_burst_s", "_level", "_overhead_s", "_share", "_then")

    def __init__(self, now: float, share: float, burst_s: float, overhead_s: float = 0.0) -> None:
        """Begin full.

        Args:
            now: monotonic seconds.
            share: part of the time that may be spent on and on, above 0.
            burst_s: seconds that may be spent at once after a quiet time.
            overhead_s: seconds that each piece of work costs beside what its caller measures.
        """
        self._share = share
        self._burst_s = burst_s
        self._overhead_s = overhead_s
        self._level = burst_s
        self._then = now

    def spend(self, seconds: float, now: float) -> float:
        """Account for work that ended at ``now``; returns the seconds to pause, 0 while the share is kept."""
        earned = (now - self._then) * self._share
        self._then = now
        self._level = min(self._burst_s, self._level + earned) - seconds - self._overhead_s
        return 0.0 if self._level >= 0 else -self._level / self._share
