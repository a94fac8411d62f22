"""How much of the event loop's time goes into reading what strangers send over HTTP/2.

A peer without a credential can send frames that cost the gateway a hundred times what they cost the peer, from many
addresses, each within its own allowance. So the time of all of them together is measured and bounded: when it is used
up, their connections are read in turns of their networks, as time comes back. A network is not read either while its
requests wait to begin, each of which takes memory; one that has none waiting is read whatever the others do, so that a
newcomer passes a flood. Networks with a credential never wait. What waits is bounded by the connections, each of which
is paused. Single-threaded, as the event loop is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from appliance.gateway.front.allowance import Allowance, Rate
from appliance.gateway.front.starts import Begin, Waiting

SHARE = Rate(burst=0.02, per_s=0.15)
"""Seconds of reading at once, and as many more each second: a seventh of the loop."""

TURN_S = 0.002
"""Seconds of reading in one turn of the event loop, and one piece more; a tenant's token waits no longer."""

MOST_BEGINNING = 128
"""Strangers' requests that wait to begin, at which networks that have one are not read: what begins in two thirds of a
second."""

MOST_OF_ONE = 8
"""Requests of one network that wait to begin, at which it is not read, however few wait in all."""

LOOK_S = 0.01
"""Between two looks at whether they have become fewer."""


class StrangerTime:
    """The turns in which strangers' HTTP/2 connections are read; a gateway has one."""

    def __init__(self, beginning: Waiting, clock: Callable[[], float] = time.perf_counter, share: Rate = SHARE) -> None:
        """``beginning``: strangers' requests that wait to begin; ``clock``: seconds, to measure what a read takes."""
        self._beginning = beginning
        self._clock = clock
        self._left = Allowance(share, clock())
        self._waiting = Waiting()
        self._armed = False

    @property
    def waiting(self) -> int:
        """Connections that wait for their turn now."""
        return len(self._waiting)

    def ask(self, network: str, read: Begin) -> None:
        """Have a piece read that came from this network, now or in a later turn. ``read`` gives False where its peer
        has left; it may ask again, from a later turn of the loop."""
        if self._waiting or self._pause_s() > 0 or not self._may(network):
            self._waiting.add(network, read)
            self._arm()
        else:
            self._measure(read)

    def _may(self, network: str) -> bool:
        """Whether a network may be read, for its requests that wait to begin."""
        own = self._beginning.of(network)
        return own == 0 or (own < MOST_OF_ONE and len(self._beginning) < MOST_BEGINNING)

    def _next(self) -> bool:
        return self._waiting.begin(self._may)

    def _measure(self, read: Begin) -> bool:
        start = self._clock()
        try:
            return read()
        finally:
            now = self._clock()
            self._left.owe(now - start, now)

    def _pause_s(self) -> float:
        """Seconds until there is time to read; 0 for now."""
        return self._left.seconds_until(0, self._clock())

    def _arm(self, *, full: bool = False) -> None:
        """Take a turn when there is time for one; ``full``: and when more requests have begun."""
        if self._waiting and not self._armed:
            self._armed = True
            loop = asyncio.get_running_loop()
            pause_s = max(self._pause_s(), LOOK_S if full else 0.0)
            if pause_s > 0:
                loop.call_later(pause_s, self._turn)
            else:
                loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Read for ``TURN_S``, a piece of each network before the second of any."""
        self._armed = False
        end, full = self._clock() + TURN_S, False
        try:
            while not full and self._clock() < end and self._pause_s() == 0:
                full = not self._measure(self._next)
        finally:  # a piece whose reading fails must not leave the others waiting
            self._arm(full=full)
