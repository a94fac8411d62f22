"""Whether a gateway that has started by itself can still hope for its supervisor. Pure: time is an argument."""

from __future__ import annotations

from dataclasses import dataclass

ABSENT_S = 60.0
"""Without a supervisor that listens. It listens before it boots anything, and systemd starts a gateway only when its
supervisor has started or failed: whoever is awaited this long is not coming."""

MOST_LOSSES = 3
"""Supervisors that came and went before anything was served."""


@dataclass(slots=True)
class FirstStart:
    """What has been seen of supervisors since the gateway's start at ``absent_since`` (monotonic seconds)."""

    absent_since: float
    present: bool = False
    losses: int = 0

    def look(self, now: float, *, present: bool) -> str:
        """Take note of whether one is there; gives why none will come, empty while there is hope."""
        if self.present and not present:
            self.losses += 1
            self.absent_since = now
        self.present = present
        if self.losses >= MOST_LOSSES:
            return f"{self.losses} supervisors have ended before anything was served"
        if not present and now - self.absent_since > ABSENT_S:
            return f"no supervisor has listened for {ABSENT_S:g} s"
        return ""
