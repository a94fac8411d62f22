"""Waits for the next change of some state, in one event loop.

Who is told goes on in the loop's next turn. All who wait for one model may be hundreds, and a turn in which all go on
holds up every other request, so they are told a few in a turn, and those who came first are told first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Generic, TypeVar

T = TypeVar("T")

TOLD_IN_TURN = 4
"""Most who are told in one turn of the loop: each takes about a millisecond of it."""


@dataclass(slots=True)
class InTurns(Generic[T]):
    """Tells a few in each turn of the loop, in the order in which they were added. Bounded by who may wait."""

    tell: Callable[[T], None]
    most: int = TOLD_IN_TURN
    """Most who are told in one turn."""
    _left: dict[T, None] = field(default_factory=dict)
    _goes_on: bool = False

    def add(self, many: Iterable[T]) -> None:
        """Have these told, in this order and after those who were added before; one who was is told once. The first
        are told now, unless others were told in this turn."""
        self._left |= dict.fromkeys(many)
        if self._left and not self._goes_on:
            self._tell_some()

    def forget(self, one: T) -> None:
        """Do not tell one any more. Idempotent."""
        self._left.pop(one, None)

    def _tell_some(self) -> None:
        """Tell the next ones. A turn passes before others are told, also where nobody is left: those who were told now
        run in it."""
        some = list(islice(self._left, self.most))
        for one in some:
            del self._left[one]
            self.tell(one)
        self._goes_on = bool(some)
        if some:
            asyncio.get_running_loop().call_soon(self._tell_some)


@dataclass(slots=True)
class StateChanges:
    """Those who wait for the next change."""

    _waiters: dict[asyncio.Future[None], int] = field(default_factory=dict)
    """With the ticket of each."""
    _tickets: count[int] = field(default_factory=count)
    _told: InTurns[asyncio.Future[None]] = field(default_factory=lambda: InTurns(_end_wait))

    def tell(self) -> None:
        """Tell all who wait."""
        waiters, self._waiters = self._waiters, {}
        self._told.add(sorted(waiters, key=waiters.__getitem__))

    def enter(self) -> int:
        """Return a ticket: of those who wait, the ones with lower tickets are told first, however often they wait."""
        return next(self._tickets)

    async def next(self, longest_s: float, ticket: int) -> None:
        """Wait for the next change.

        Raises:
            TimeoutError: there was none in so many seconds.
        """
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = ticket
        try:
            async with asyncio.timeout(longest_s):
                await waiter
        finally:
            self._waiters.pop(waiter, None)
            self._told.forget(waiter)


def _end_wait(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
