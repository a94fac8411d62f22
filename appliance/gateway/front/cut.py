"""Cancellation with a reason: the client left, the deadline passed, the appliance drains.

Cancellation in asyncio carries no reason. A ``Cut`` runs one coroutine as a task and remembers why it was ended, so
that the handler knows what to tell the client, and a cancel from outside stays a cancel.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from appliance.common.errors import UnavailableError

_T = TypeVar("_T")

DRAIN_RETRY_S = 2.0
"""Seconds after which a client turned away by a drain is told to come back: to another instance, or to this one
restarted."""


def shutting_down() -> UnavailableError:
    """Return the error for what a drain ends or turns away."""
    return UnavailableError("the appliance is shutting down; try again shortly", retry_after_s=DRAIN_RETRY_S)


class Cut:
    """Runs one piece of work at most once."""

    def __init__(self) -> None:
        self._task: asyncio.Task[Any] | None = None
        self._reason: Exception | None = None

    def end(self, reason: Exception) -> None:
        """End the work; the first reason counts. Before ``run`` it keeps the work from starting; after it, nothing."""
        if self._reason is None:
            self._reason = reason
            if self._task is not None:
                self._task.cancel()

    async def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Return the work's result.

        Raises:
            Exception: the reason given to ``end``, or what the work raised.
        """
        if self._reason is not None:
            work.close()
            raise self._reason
        task: asyncio.Task[_T] = asyncio.ensure_future(work)
        self._task = task
        try:
            return await task
        except asyncio.CancelledError:
            if self._reason is None:
                raise
            raise self._reason from None
        finally:
            # What the work raised refers to this frame, and the task to what was raised: kept, both would wait for the
            # collector, with all that the work's frames have.
            self._task = None
            del task
