"""A bound on a wait that counts the time in which this process ran, not the time in which it stood still.

A process that was stopped, or kept from its processor, finds all its timers due when it runs again, before it has read
the answers that came meanwhile. A bound in clock time would then blame the other side.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")

SLICE_S = 0.5
"""Seconds of one timer. A slice that takes longer counts as two: the rest is time in which nothing ran."""


class AwakeTime:
    """So many seconds of waiting, over one wait or several."""

    def __init__(self, seconds: float) -> None:
        self._left = seconds

    async def wait(self, work: Coroutine[Any, Any, Result], until: float) -> Result:
        """Wait for ``work``, which is cancelled when the seconds are used up, or at ``until`` (monotonic).

        Raises:
            TimeoutError: it has not ended by then.
            Whatever ``work`` raises.
        """
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                now = time.monotonic()
                most = min(SLICE_S, self._left, until - now)
                if most <= 0:
                    raise TimeoutError
                await asyncio.wait((task,), timeout=most)
                self._left -= min(time.monotonic() - now, 2 * SLICE_S)
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait((task,))
