"""Life cycle of one sandbox as a table, and the delay before the next boot. Pure: time is an argument.

    ABSENT -> BOOTING -> READY -> STOPPING -> ABSENT
                 |          |
                 +-> FAILED <+   -> (delay) -> BOOTING

DIED and ENDED both lead to FAILED; only DIED counts as a failure, which makes the next delay longer. A missing key of
``TRANSITIONS`` is a bug of the caller and raises ``KeyError``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

FIRST_DELAY_S = 0.0
"""Seconds before the boot after a first death, which is normal."""
BASE_DELAY_S = 0.5
"""Seconds before the boot after a second death in a row."""
MAX_DELAY_S = 30.0
"""Longest delay in seconds: a model file that is mended is served within half a minute."""
STABLE_S = 60.0
"""Seconds of service after which earlier failures are forgotten."""


class State(Enum):
    """State of a sandbox."""

    ABSENT = "absent"
    BOOTING = "booting"
    READY = "ready"
    STOPPING = "stopping"
    FAILED = "failed"


class Event(Enum):
    """Change in the life of a sandbox."""

    BOOT = "boot"
    BECAME_READY = "became ready"
    DIED = "died"
    ENDED = "ended"
    """Ended while in order, to boot again: its gateway left, and its channel with it."""
    STOP = "stop"
    GONE = "gone"


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.ABSENT, Event.BOOT): State.BOOTING,
    (State.FAILED, Event.BOOT): State.BOOTING,
    (State.BOOTING, Event.BECAME_READY): State.READY,
    (State.BOOTING, Event.DIED): State.FAILED,
    (State.READY, Event.DIED): State.FAILED,
    (State.READY, Event.ENDED): State.FAILED,
    (State.ABSENT, Event.STOP): State.STOPPING,
    (State.BOOTING, Event.STOP): State.STOPPING,
    (State.READY, Event.STOP): State.STOPPING,
    (State.FAILED, Event.STOP): State.STOPPING,
    (State.STOPPING, Event.GONE): State.ABSENT,
}


@dataclass(frozen=True, slots=True)
class Life:
    """State and history of one sandbox."""

    state: State = State.ABSENT
    generation: int = 0
    """Boots."""
    restarts: int = 0
    """Boots after the first."""
    failures: int = 0
    """Deaths in a row."""
    ready_at: float | None = None
    """Monotonic seconds at which it became ready; None before."""

    def advance(self, event: Event, now: float) -> Life:
        """State and history after an event at ``now`` (monotonic seconds)."""
        state = TRANSITIONS[self.state, event]
        if event is Event.BOOT:
            again = self.generation > 0
            return replace(
                self, state=state, generation=self.generation + 1, restarts=self.restarts + again, ready_at=None
            )
        if event is Event.BECAME_READY:
            return replace(self, state=state, ready_at=now)
        if event is Event.DIED:
            stable = self.ready_at is not None and now - self.ready_at >= STABLE_S
            return replace(self, state=state, failures=1 if stable else self.failures + 1)
        if event is Event.ENDED:
            return replace(self, state=state, failures=0, ready_at=None)
        return replace(self, state=state)

    def delay_s(self) -> float:
        """Seconds to wait before the next boot: none after the first death, then doubling up to ``MAX_DELAY_S``."""
        if self.failures <= 1:
            return FIRST_DELAY_S
        return float(min(MAX_DELAY_S, BASE_DELAY_S * 2 ** (self.failures - 2)))
