"""The two clocks of a process: a monotonic one, by which everything is measured, and the wall clock, for labels alone.

Somebody may set the machine's clock. So a moment is kept in monotonic seconds, and is turned into Unix time when it is
shown: with the distance from now that it really has.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Clocks:
    """Both clocks, in seconds."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time

    def unix(self, at: float) -> float:
        """Return the Unix time of a moment in monotonic seconds, by the wall clock as it is set now."""
        return self.wall() - (self.monotonic() - at)
