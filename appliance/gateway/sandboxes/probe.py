"""Whether an idle sandbox would answer: one ping at a time, at intervals. Pure; seconds of the caller's clock.

A sandbox with work shows that it lives by its frames. One without work is silent for good reasons, so it is asked. A
frozen sandbox is not: its freezer vouches for it.
"""

from __future__ import annotations

PERIOD_S = 5.0
"""Seconds between two probes of an idle sandbox, at least. A ping costs both sides, gVisor's wake included, about one
millisecond of processor time (measured at ten a second), so the two of an idle model cost some 0.04 % of a core."""

LATE_S = 5.0
"""Seconds without an answer from which an idle sandbox counts as hung: it has nothing to do but to answer, and a
processor is not taken from it for so long even on a busy machine."""


class Probe:
    """Pings of one sandbox and what became of them."""

    __slots__ = ("_answered_at", "_asked_at", "_late_s", "_looked_at", "_number")

    def __init__(self, now: float) -> None:
        self._number = 0
        self._asked_at: float | None = None
        self._answered_at = self._looked_at = now
        self._late_s = LATE_S

    @property
    def outstanding(self) -> bool:
        """Whether a ping has not been answered yet."""
        return self._asked_at is not None

    def due(self, now: float) -> bool:
        """Return whether an idle sandbox should be asked."""
        return self._asked_at is None and now - self._answered_at >= PERIOD_S

    def ask(self, now: float, late_s: float = LATE_S) -> int:
        """Note that a ping is sent; returns its number. It is late after ``late_s`` seconds."""
        self._number += 1
        self._asked_at, self._late_s = now, late_s
        return self._number

    def answer(self, number: int, now: float) -> bool:
        """Note an answer; returns whether it was asked for."""
        if self._asked_at is None or number != self._number:
            return False
        self._asked_at, self._answered_at = None, now
        return True

    def silence_s(self, now: float) -> float:
        """Return the seconds for which a ping has not been answered; 0 while none is outstanding."""
        return 0.0 if self._asked_at is None else now - self._asked_at

    def late(self, now: float) -> bool:
        """Return whether the sandbox counts as hung."""
        return self.silence_s(now) > self._late_s

    def stuck(self, limit_s: float, now: float) -> bool:
        """Return whether a ping has not been answered for ``limit_s`` seconds; time in which this process itself stood
        still does not count. To be called every few seconds."""
        stood_still, self._looked_at = now - self._looked_at > limit_s, now
        if stood_still and self._asked_at is not None:
            self._asked_at = now
        return self.silence_s(now) > limit_s
