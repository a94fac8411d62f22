"""Whether an engine goes on with its work, from the times of its frames alone.

A step that computes anything sends a frame, also for part of a long prompt. An engine without work may be silent for
ever, and so may one whose requests all wait for masks of the text sandbox: those are probed (``probe``).
"""

from __future__ import annotations

import time
from collections.abc import Callable

HANG_S = 5.0
HANG_FACTOR = 4.0
"""Silence of an engine with work, in seconds and as a multiple of the longest that ended well, from which it hangs: a
balancer shall send requests elsewhere long before ``step_timeout_s`` ends it."""


class Progress:
    """Silences of one engine; seconds of the monotonic clock."""

    def __init__(self, works: Callable[[], bool], owed: Callable[[], bool]) -> None:
        """``works``: whether it has requests; ``owed``: whether all of them, if there are any, wait for masks."""
        self._works = works
        self._owed = owed
        self._heard_at = self._looked_at = time.monotonic()
        self._longest_s = 0.0
        """Longest silence with requests that a frame ended."""

    def begin(self) -> None:
        """Note that a request comes to an engine that had none."""
        self._heard_at = time.monotonic()

    def heard(self) -> None:
        """Note a frame."""
        now = time.monotonic()
        if self._works():
            self._longest_s = max(self._longest_s, now - self._heard_at)
        self._heard_at = now

    @property
    def silence_s(self) -> float:
        """Seconds for which the engine has had requests and has sent nothing; 0 without requests."""
        return time.monotonic() - self._heard_at if self._works() else 0.0

    @property
    def bound_s(self) -> float:
        """Seconds of silence with work from which the engine hangs."""
        return max(HANG_S, HANG_FACTOR * self._longest_s)

    @property
    def hangs(self) -> bool:
        """Whether requests sent now would rather wait for its end than for their answers."""
        return self.silence_s > self.bound_s and not self._owed()

    def stuck(self, limit_s: float) -> bool:
        """Whether no step was finished for ``limit_s`` seconds of work; time in which this process itself stood still
        does not count. To be called every few seconds."""
        now = time.monotonic()
        stood_still, self._looked_at = now - self._looked_at > limit_s, now
        if self._owed() or stood_still:
            self._heard_at = now
        return now - self._heard_at > limit_s
