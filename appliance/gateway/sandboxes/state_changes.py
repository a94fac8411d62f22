"""Waits for the next change of some state, in one event loop."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field


@dataclass(slots=True)
class StateChanges:
    """Those who wait for the next change."""

    _waiters: set[asyncio.Future[None]] = field(default_factory=set)

    def tell(self) -> None:
        """Tell all who wait."""
        waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def next(self, longest_s: float) -> None:
        """Wait for the next change.

        Raises:
            TimeoutError: there was none in so many seconds.
        """
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            async with asyncio.timeout(longest_s):
                await waiter
        finally:
            self._waiters.discard(waiter)
