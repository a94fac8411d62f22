"""One run of a piece of work at a time, and at most one that waits: callers that come meanwhile share that one.

Two hundred SIGHUPs within a second ask for one reload of what the files say afterwards, not for two hundred that follow
each other for half a minute and end what clients have asked for in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

MAX_ASKING = 4
"""Different callers of one run that are named."""

Result = TypeVar("Result")


class SharedRuns(Generic[Result]):
    """Gives each caller the result of a run that began after the call."""

    def __init__(self, work: Callable[[], Awaitable[Result]]) -> None:
        self._work = work
        self._turn = asyncio.Lock()
        self._waiting: asyncio.Task[Result] | None = None
        self._asking: list[str] = []
        self.asked = ""
        """Who asked for the run that runs, or ran last: each once, with semicolons between."""

    @property
    def waits(self) -> bool:
        """Whether a run has been asked for that has not begun."""
        return self._waiting is not None

    async def run(self, by: str = "") -> Result:
        """Return the result of the next run; a caller that is cancelled leaves the run to the others. ``by`` says who
        asks, in words; of more than ``MAX_ASKING`` the first are kept.

        Raises:
            Whatever the work raises, to every caller that shared the run.
        """
        if by and by not in self._asking and len(self._asking) < MAX_ASKING:
            self._asking.append(by)
        if self._waiting is None:
            self._waiting = asyncio.create_task(self._take_turn())
        return await asyncio.shield(self._waiting)

    async def _take_turn(self) -> Result:
        async with self._turn:
            self._waiting = None
            self.asked, self._asking = "; ".join(self._asking), []
            return await self._work()
