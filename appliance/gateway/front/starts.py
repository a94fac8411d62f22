"""Which requests begin in one turn of the event loop, so that one caller's many never delay another's few.

A request costs the gateway up to a millisecond before it waits for anything, and a peer can send hundreds in one
segment. Few begin in a turn, in turns of their owners (a tenant, or a stranger's network); the others wait. What waits
is bounded by the connections and their streams. Single-threaded, as the event loop is.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

REQUESTS_A_TURN = 4
"""Requests that begin in one turn of the event loop: some 3 ms."""

Begin = Callable[[], bool]
"""Begins a request; False where its caller has left."""


class Starts:
    """The turns of one gateway; both front ends share them."""

    def __init__(self, a_turn: int = REQUESTS_A_TURN) -> None:
        self._a_turn = a_turn
        self._begun = 0
        """Requests that began in this turn."""
        self._waiting: dict[str, deque[Begin]] = {}
        """Owner -> its requests that wait, in their order; the owner that is next comes first."""
        self._armed = False

    @property
    def waiting(self) -> int:
        """Requests that wait now."""
        return sum(map(len, self._waiting.values()))

    def ask(self, owner: str, begin: Begin) -> None:
        """Begin a request of this owner, now or in a later turn."""
        if not self._waiting and self._begun < self._a_turn:
            self._begun += begin()
        else:
            self._waiting.setdefault(owner, deque()).append(begin)
        self._arm()

    def _arm(self) -> None:
        if not self._armed:
            self._armed = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        """Begin a turn's requests, one of each owner before the second of any."""
        self._armed = False
        self._begun = 0
        while self._waiting and self._begun < self._a_turn:
            owner = next(iter(self._waiting))
            queue = self._waiting.pop(owner)
            begin = queue.popleft()
            if queue:
                self._waiting[owner] = queue
            self._begun += begin()
        if self._waiting or self._begun:
            self._arm()
