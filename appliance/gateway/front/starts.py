"""Which requests begin in one turn of the event loop, so that one caller's many never delay another's few.

A request costs the gateway up to a millisecond before it waits for anything, and a peer can send hundreds in one
segment. Few begin in a turn, in turns of their owners (a tenant, or a stranger's network); the others wait. Requests of
networks without a credential share a rate besides, since nothing else bounds what they cost. What waits is bounded by
the connections and their streams. Single-threaded, as the event loop is.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from appliance.gateway.front.allowance import Allowance, Rate

REQUESTS_A_TURN = 4
"""Requests that begin in one turn of the event loop: some 3 ms."""

STRANGERS = Rate(burst=100, per_s=200)
"""Requests of all networks without a credential: a tenth of a core at most, and more than their health checks need."""

Begin = Callable[[], bool]
"""Begins a request; False where its caller has left."""


class Waiting:
    """Requests that wait, one of each owner before the second of any."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[Begin]] = {}
        """Owner -> its requests in their order; the owner that is next comes first."""
        self._number = 0

    def __bool__(self) -> bool:
        return bool(self._queues)

    def __len__(self) -> int:
        return self._number

    def of(self, owner: str) -> int:
        """Return how many of one owner wait."""
        return len(self._queues.get(owner, ()))

    def add(self, owner: str, begin: Begin) -> None:
        """Add a request behind its owner's."""
        self._queues.setdefault(owner, deque()).append(begin)
        self._number += 1

    def begin(self, may: Callable[[str], bool] = lambda owner: True) -> bool:
        """Begin the next request of an owner that may; False where none waits whose caller is there."""
        while (owner := next(filter(may, self._queues), None)) is not None:
            queue = self._queues.pop(owner)
            begin = queue.popleft()
            self._number -= 1
            if queue:
                self._queues[owner] = queue
            if begin():
                return True
        return False


class Starts:
    """The turns of one gateway; both front ends share them."""

    def __init__(self, clock: Callable[[], float], a_turn: int = REQUESTS_A_TURN, strangers: Rate = STRANGERS) -> None:
        self._clock = clock
        self._a_turn = a_turn
        self._rate = Allowance(strangers, clock())
        self._begun = 0
        """Requests that began in this turn."""
        self._tenants = Waiting()
        self.strangers = Waiting()
        """Those of networks without a credential."""
        self._armed = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        """Requests that wait now."""
        return len(self._tenants) + len(self.strangers)

    def ask(self, owner: str, begin: Begin, *, stranger: bool) -> None:
        """Begin a request of this owner, now or in a later turn. ``stranger``: no credential ever came from its
        network."""
        waiting = self.strangers if stranger else self._tenants
        if waiting or self._begun >= self._a_turn or (stranger and not self._affords()):
            waiting.add(owner, begin)
        elif begin():
            self._count(stranger=stranger)
        self._arm()

    def _affords(self) -> bool:
        return self._rate.seconds_until(1, self._clock()) == 0

    def _count(self, *, stranger: bool) -> None:
        self._begun += 1
        if stranger:
            self._rate.spend(1, self._clock())

    def _arm(self) -> None:
        """Take another turn: the next one, or when there is room for a stranger's request."""
        if self._armed or not (self._begun or self._tenants or self.strangers):
            return
        loop = asyncio.get_running_loop()
        if self._begun or self._tenants or self._affords():
            self._armed = True
            loop.call_soon(self._turn)
        elif self._timer is None:
            self._timer = loop.call_later(self._rate.seconds_until(1, self._clock()), self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._arm()

    def _turn(self) -> None:
        """Begin a turn's requests: one of a stranger, then the tenants', then strangers'."""
        self._armed = False
        self._begun = 0
        self._begin_strangers(1)
        while self._begun < self._a_turn and self._tenants.begin():
            self._count(stranger=False)
        self._begin_strangers(self._a_turn)
        self._arm()

    def _begin_strangers(self, most: int) -> None:
        while self._begun < most and self._affords() and self.strangers.begin():
            self._count(stranger=True)
