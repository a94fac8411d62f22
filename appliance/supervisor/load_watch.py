"""Whether a sandbox computes or waits, from its processor time alone. Pure."""

from __future__ import annotations

LOOK_S = 2.0
"""Seconds between two looks: short beside a minute of work, long beside the 0.6 ms that a look takes."""

BUSY_SHARE = 0.5
"""Of one core. An engine that decodes takes all of it, one that answers now and then a tenth."""


class LoadWatch:
    """Remembers the last look. Times and processor time are seconds of the caller's clocks."""

    def __init__(self, now: float, used_s: float) -> None:
        self._then, self._used_s = now, used_s
        self._busy = False

    def look(self, now: float, used_s: float) -> bool | None:
        """Whether it is busy, when that is news; None when it is not. A tree that has lost processes is not busy."""
        busy = used_s - self._used_s >= BUSY_SHARE * (now - self._then)
        self._then, self._used_s = now, used_s
        if busy is self._busy:
            return None
        self._busy = busy
        return busy
