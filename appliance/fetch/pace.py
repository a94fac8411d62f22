"""Limit of a downloader's bandwidth: bytes are paid for after they came, and who owes waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class Pace:
    """Most bytes a second of all downloads of a process together; 0: no limit."""

    def __init__(self, bytes_a_second: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._clock = bytes_a_second, clock
        self._paid_until = clock()

    def pay(self, count: int) -> float:
        """Seconds to wait after so many bytes. What was not used is not saved up."""
        if not self._rate:
            return 0.0
        now = self._clock()
        self._paid_until = max(self._paid_until, now) + count / self._rate
        return self._paid_until - now

    async def spend(self, count: int) -> None:
        """Wait until these bytes are paid for. A source that is not read from meanwhile sends no more."""
        if (seconds := self.pay(count)) > 0:
            await asyncio.sleep(seconds)
