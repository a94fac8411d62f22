"""Turns of TLS handshakes, so that handshakes of strangers never take the event loop from tenants.

A handshake costs its sender one packet and the gateway a millisecond of its one core. Networks from which a credential
came have an allowance each, which every first credential on a connection pays back: tenants do not wait. All other
handshakes share one rate and begin in turns of their networks, the one that was served least recently first: a newcomer
passes an address that floods the port, from however many connections. Single-threaded, as the event loop is.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable

from appliance.gateway.front.allowance import MOST_ADDRESSES, Allowance, Rate

STRANGERS = Rate(burst=16, per_s=64)
"""Handshakes of all networks without a credential: a tenth of a core at most, and no pause of more than some 20 ms."""

KNOWN = Rate(burst=64, per_s=32)
"""Handshakes of one network that had a credential and bring none: as many as a client's pool opens at once."""


class Handshakes:
    """The turns of one gateway; both listeners share them, because both share the core."""

    def __init__(self, clock: Callable[[], float], strangers: Rate = STRANGERS, known: Rate = KNOWN) -> None:
        self._clock = clock
        self._rate_of_known = known
        self._strangers = Allowance(strangers, clock())
        self._known: OrderedDict[str, Allowance] = OrderedDict()
        """Networks that had a credential; the one that was used least recently is forgotten first."""
        self._served: OrderedDict[str, float] = OrderedDict()
        """When each stranger's network had its last turn; the oldest is forgotten first, and is a newcomer again."""
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Network -> its turns that wait, the oldest first; no network without one."""
        self._timer: asyncio.TimerHandle | None = None
        self.delayed = 0
        """Handshakes so far that had to wait."""

    @property
    def waiting(self) -> int:
        """Handshakes that wait now."""
        return sum(map(len, self._waiting.values()))

    async def turn(self, network: str) -> None:
        """Return when a handshake of this network (``connections.network_of``) may begin. A cancelled caller leaves the
        queue. The caller bounds the wait and the number of handshakes that wait."""
        now = self._clock()
        if self._spend_known(network, now):
            return
        if not self._waiting and self._strangers.spend(1, now):
            self._note_served(network, now)
            return
        self.delayed += 1
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(network, deque()).append(turn)
        self._arm(now)
        try:
            await turn
        finally:
            self._leave(network, turn)

    def credential(self, network: str) -> None:
        """Note that a connection of this network brought its first credential: its handshake is paid back, and those of
        its handshakes that wait begin."""
        now = self._clock()
        allowance = self._known.get(network)
        if allowance is None:
            self._known[network] = Allowance(self._rate_of_known, now)
            if len(self._known) > MOST_ADDRESSES:
                self._known.popitem(last=False)
        else:
            allowance.earn(1)
            self._known.move_to_end(network)
        while network in self._waiting and self._spend_known(network, now):
            self._begin_next(network)

    def knows(self, network: str) -> bool:
        """Whether a credential came from the network, as far as is remembered."""
        return network in self._known

    def _spend_known(self, network: str, now: float) -> bool:
        allowance = self._known.get(network)
        return allowance is not None and allowance.spend(1, now)

    def _begin_next(self, network: str) -> bool:
        """Give the network's oldest turn; False where all that waited are cancelled, which they learn later."""
        while network in self._waiting:
            turn = self._waiting[network][0]
            self._leave(network, turn)
            if not turn.done():
                turn.set_result(None)
                return True
        return False

    def _leave(self, network: str, turn: asyncio.Future[None]) -> None:
        queue = self._waiting.get(network)
        if queue is not None and turn in queue:
            queue.remove(turn)
            if not queue:
                del self._waiting[network]

    def _arm(self, now: float) -> None:
        """Look again when there is room for a stranger's handshake."""
        if self._timer is None:
            after_s = self._strangers.seconds_until(1, now)
            self._timer = asyncio.get_running_loop().call_later(after_s, self._serve)

    def _serve(self) -> None:
        """Give turns as long as the rate allows."""
        self._timer = None
        now = self._clock()
        while self._waiting and self._strangers.seconds_until(1, now) == 0:
            network = min(self._waiting, key=lambda one: self._served.get(one, 0.0))
            if self._begin_next(network):
                self._strangers.spend(1, now)
                self._note_served(network, now)
        if self._waiting:
            self._arm(now)

    def _note_served(self, network: str, now: float) -> None:
        self._served[network] = now
        self._served.move_to_end(network)
        if len(self._served) > MOST_ADDRESSES:
            self._served.popitem(last=False)
