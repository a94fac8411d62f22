"""The life of one sandbox as a table, and how long to wait before the next boot. Pure: time is an argument.

    ABSENT -> BOOTING -> READY -> STOPPING -> ABSENT
                 |          |
                 +-> FAILED <+   -> (delay) -> BOOTING

A missing key of ``TRANSITIONS`` is a bug of the caller and raises ``KeyError``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

FIRST_DELAY_S = 0.0
"""A single death is normal: the next boot starts at once."""
BASE_DELAY_S = 0.5
"""Delay before the second boot in a row that did not last."""
MAX_DELAY_S = 30.0
"""The longest delay: an operator who mends a model file sees it served within half a minute."""
STABLE_S = 60.0
"""A sandbox that lived this long starts its count of failures afresh."""


class State(Enum):
    """Where a sandbox is in its life."""

    ABSENT = "absent"
    BOOTING = "booting"
    READY = "ready"
    STOPPING = "stopping"
    FAILED = "failed"


class Happening(Enum):
    """What can happen to a sandbox."""

    BOOT = "boot"
    BECAME_READY = "became ready"
    DIED = "died"
    STOP = "stop"
    GONE = "gone"


TRANSITIONS: dict[tuple[State, Happening], State] = {
    (State.ABSENT, Happening.BOOT): State.BOOTING,
    (State.FAILED, Happening.BOOT): State.BOOTING,
    (State.BOOTING, Happening.BECAME_READY): State.READY,
    (State.BOOTING, Happening.DIED): State.FAILED,
    (State.READY, Happening.DIED): State.FAILED,
    (State.ABSENT, Happening.STOP): State.STOPPING,
    (State.BOOTING, Happening.STOP): State.STOPPING,
    (State.READY, Happening.STOP): State.STOPPING,
    (State.FAILED, Happening.STOP): State.STOPPING,
    (State.STOPPING, Happening.GONE): State.ABSENT,
}


@dataclass(frozen=True, slots=True)
class Life:
    """State, boots and failures of one sandbox. ``generation`` counts boots; ``failures`` deaths in a row."""

    state: State = State.ABSENT
    generation: int = 0
    restarts: int = 0
    failures: int = 0
    ready_at: float | None = None

    def advance(self, happening: Happening, now: float) -> Life:
        """The life after this happening at ``now`` (monotonic seconds)."""
        state = TRANSITIONS[self.state, happening]
        if happening is Happening.BOOT:
            again = self.generation > 0
            return replace(
                self, state=state, generation=self.generation + 1, restarts=self.restarts + again, ready_at=None
            )
        if happening is Happening.BECAME_READY:
            return replace(self, state=state, ready_at=now)
        if happening is Happening.DIED:
            stable = self.ready_at is not None and now - self.ready_at >= STABLE_S
            return replace(self, state=state, failures=1 if stable else self.failures + 1)
        return replace(self, state=state)

    def delay_s(self) -> float:
        """Seconds to wait before the next boot: none after the first death, then doubling up to ``MAX_DELAY_S``."""
        if self.failures <= 1:
            return FIRST_DELAY_S
        return float(min(MAX_DELAY_S, BASE_DELAY_S * 2 ** (self.failures - 2)))
