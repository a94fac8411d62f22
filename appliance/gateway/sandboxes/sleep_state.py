"""Whether a model sleeps, and what is known of its wakes. Pure; times are monotonic seconds of the caller."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from appliance.common.sleep_rules import ALWAYS, ASLEEP, AWAKE, DEFAULT_WAKE_S, WAKING

LEAST_LEFT_S = 0.5
"""Least estimate of what is left of a wake, in seconds: one that takes longer than expected is about to end."""


@dataclass(slots=True)
class SleepState:
    """State of a model between awake and asleep."""

    state: str = AWAKE
    keep: str = ALWAYS
    idle_s: float = 0.0
    """Seconds without a request after which it sleeps, where ``keep`` says that it may."""
    need_bytes: int = 0
    boot_s: float = 0.0
    """Seconds that the supervisor took to boot its sandboxes the last time; 0: unknown."""
    wake_s: float = 0.0
    """Seconds that its last wake took; 0: there was none."""
    since: float = field(default_factory=time.monotonic)
    """When it entered its state."""
    used_at: float = field(default_factory=time.monotonic)
    """When a request last used it, or it was woken."""
    used: bool = False
    """Whether a request has used it."""
    cause: str = ""
    """Why the last wake failed."""
    waiting: Counter[str] = field(default_factory=Counter)
    """Requests that wait for its wake, by tenant."""
    counted_until: float = 0.0
    """Until when its next wake for a request is counted already (``WakeGuard``): as long as that counts. Requests for
    which it was counted may have given up."""
    ending: bool = False
    """Whether the supervisor was told that it sleeps, and has not said yet that its sandboxes have ended."""
    heard: bool = False
    """Whether the supervisor has said that it wakes it."""

    @property
    def awake(self) -> bool:
        """Whether its sandboxes are there or are kept alive."""
        return self.state == AWAKE

    @property
    def asleep(self) -> bool:
        """Whether it has no sandboxes."""
        return self.state == ASLEEP

    @property
    def waking(self) -> bool:
        """Whether it is being woken."""
        return self.state == WAKING

    @property
    def estimate_s(self) -> float:
        """Expected seconds of a wake."""
        return self.wake_s or self.boot_s or DEFAULT_WAKE_S

    def stays_for_s(self, now: float, stay_s: float) -> float:
        """Return the seconds that it does not sleep yet, because it was woken less than ``stay_s`` ago; 0: it may."""
        return max(0.0, self.since + stay_s - now) if self.awake and self.wake_s > 0 else 0.0

    def left_s(self, now: float) -> float:
        """Return the expected seconds until it is awake, if it is woken now or is being woken."""
        return max(LEAST_LEFT_S, self.estimate_s - (now - self.since if self.waking else 0.0))

    def begin_wake(self, now: float) -> None:
        """Note that the model is being woken."""
        self.state, self.since, self.heard, self.cause = WAKING, now, False, ""

    def fall_asleep(self, cause: str, now: float) -> None:
        """Note that the model has no sandboxes now; ``cause``: why it could not be woken, if that is so."""
        self.state, self.since, self.cause = ASLEEP, now, cause

    def note_awake(self, now: float) -> None:
        """Note that the model does not sleep any more."""
        if self.waking:
            self.wake_s = now - self.since
        if not self.awake:
            self.state, self.since, self.used_at = AWAKE, now, now
