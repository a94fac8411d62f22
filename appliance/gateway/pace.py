"""How much of the event loop one sandbox may take: a bucket of seconds. Pure: times are arguments."""

from __future__ import annotations

SHARE = 0.25
"""Part of the loop's time that one link may spend on what its sandbox sends. An honest engine of 256 sequences needs
two or three hundredths; one that floods frames or rings its bell without end is listened to less often."""

BURST_S = 0.05
"""Seconds that may be spent at once after a quiet time."""

OVERHEAD_S = 30e-6
"""Seconds that the event loop itself spends on one turn of a link, beside what the link measures: the poll, the
callback, a timer."""


class Pace:
    """Seconds spent against seconds earned."""

    __slots__ = ("_level", "_then")

    def __init__(self, now: float) -> None:
        self._level = BURST_S
        self._then = now

    def spend(self, seconds: float, now: float) -> float:
        """Account for a turn's work that ended at ``now``; gives the seconds to stay away, 0 while the share is
        kept."""
        earned = (now - self._then) * SHARE
        self._then = now
        self._level = min(BURST_S, self._level + earned) - seconds - OVERHEAD_S
        return 0.0 if self._level >= 0 else -self._level / SHARE
