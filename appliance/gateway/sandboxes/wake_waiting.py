"""Requests that wait until a sleeping model is awake, and what has them look again.

Nobody looks at intervals for a change that somebody tells. Of the requests that wait for one model, the one that has
waited longest looks for room for all of them: when something has changed that may make room (another model is awake,
has ended or is in use no more, another wake takes its turn), and when a time comes that it knows. The others wait for a
change of their own model and for the end of their patience.

A request forgets that it was told before it looks, and nothing runs in between, so no change is lost. A look takes
about a millisecond where there are many models, and a request that goes on as much, so a few are told in each turn of
the loop, the first that came first: other requests, those that are refused among them, do not wait behind all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

from appliance.gateway.sandboxes.model_sandboxes import ModelSandboxes
from appliance.gateway.sandboxes.state_changes import InTurns

LOOK_S = 0.1
"""Least seconds between two rounds of looks for room: a look takes a pass over all requests, and requests may end
thousands of times a second. Changes that come meanwhile are looked at together."""

RELOOK_S = 0.5
"""Most seconds between two looks for room. What the machine has available, and how counts of uses fade, is told by
nobody."""

LEAST_S = 1e-3
"""Least seconds of a wait, so that a time that comes a moment early is not looked at again and again."""


@dataclass(slots=True, eq=False)
class Waiter:
    """One request that waits."""

    tenant: str
    came: float
    """When it came, in monotonic seconds."""
    _told: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def told(self) -> bool:
        """Whether it was told to look again, and has not looked yet."""
        return self._told.is_set()

    def tell(self) -> None:
        """Have it look again."""
        self._told.set()

    async def wait(self, longest_s: float) -> None:
        """Wait until it is told to look again, at most so many seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(LEAST_S, longest_s)):
                await self._told.wait()
        self._told.clear()


@dataclass(slots=True)
class WakeWaiting:
    """Requests that wait, by model. Bounded by who lets them wait (``SleepControl``); all methods run in one event
    loop."""

    clock: Callable[[], float]
    _waiters: dict[ModelSandboxes, dict[Waiter, None]] = field(default_factory=dict)
    """In the order in which they came."""
    _told: InTurns[Waiter] = field(default_factory=lambda: InTurns(Waiter.tell))
    _looked_at: float = float("-inf")
    """When the last round began."""
    _next: asyncio.TimerHandle | None = None
    """Begins a round for changes that came soon after the last one."""

    def enter(self, model: ModelSandboxes, tenant: str) -> Waiter:
        """Have a request wait for a model."""
        waiter = Waiter(tenant, self.clock())
        self._waiters.setdefault(model, {})[waiter] = None
        return waiter

    def leave(self, model: ModelSandboxes, waiter: Waiter) -> None:
        """Have it wait no more; the next one looks in its place."""
        waiters, first = self._waiters[model], self.is_first(model, waiter)
        del waiters[waiter]
        self._told.forget(waiter)
        if not waiters:
            del self._waiters[model]
        elif first:
            next(iter(waiters)).tell()

    def is_first(self, model: ModelSandboxes, waiter: Waiter) -> bool:
        """Return whether it has waited longest for its model."""
        return waiter is next(iter(self._waiters[model]))

    def any_for(self, model: ModelSandboxes) -> bool:
        """Return whether requests wait for a model."""
        return model in self._waiters

    def model_changed(self, model: ModelSandboxes) -> None:
        """Have all that wait for a model look, from now on, and others as after each change."""
        self._told.add(self._waiters.get(model, ()))
        self.changed()

    def changed(self) -> None:
        """Have one request of each model look for room: something has changed that may make some, or the turn of
        another."""
        if not self._waiters or self._next is not None:
            return
        left_s = self._looked_at + LOOK_S - self.clock()
        if left_s > 0:
            self._next = asyncio.get_running_loop().call_later(left_s, self._look)
        else:
            self._look()

    def _look(self) -> None:
        self._next, self._looked_at = None, self.clock()
        self._told.add([next(iter(waiters)) for waiters in self._waiters.values()])
