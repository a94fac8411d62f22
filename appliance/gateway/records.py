"""What status shows of sandboxes and of the supervisor: values that ``sandboxes`` keeps current."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from appliance.control import COLD, FALLEN_BACK, RESTORED

STARTS = (COLD, RESTORED, FALLEN_BACK)

MAX_UNCOUNTED = 64
"""Starts between two looks of whoever counts them, seconds apart."""


@dataclass(slots=True)
class SandboxRecord:
    """What status shows of one sandbox."""

    state: str = "booting"
    generation: int = 0
    restarts: int = 0
    pid: int = 0
    since: float = field(default_factory=time.time)
    away_since: float = field(default_factory=time.time)
    """When it was last ready, or first heard of."""
    cause: str = ""
    memory_bytes: int = 0
    """What it holds, as the supervisor said last."""
    memory_limit_bytes: int = 0
    """0: not told yet."""
    away_s: float | None = None
    """How long it was away, or booted, before it was last ready; None before that."""
    starts: list[str] = field(default_factory=list)
    """How it began each time, until somebody has counted that: at most ``MAX_UNCOUNTED``."""

    def note_start(self, start: str) -> None:
        """It has begun once more."""
        if start in STARTS and len(self.starts) < MAX_UNCOUNTED:
            self.starts.append(start)

    def take_starts(self) -> list[str]:
        """What nobody has counted yet."""
        taken, self.starts = self.starts, []
        return taken

    def become(self, state: str, cause: str = "") -> None:
        """Enter a state now."""
        now = time.time()
        if self.state == "ready":
            self.away_since = now
        if state == "ready" and self.state != "ready":
            self.away_s = max(0.0, now - self.away_since)
        self.state, self.cause, self.since = state, cause, now


@dataclass(slots=True)
class Attachment:
    """What the supervisor told on attaching."""

    sandbox: str = "unknown"
    limits: str = "unknown"
    attached: bool = False
