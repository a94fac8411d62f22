"""An event loop whose time passes only while everything waits: minutes of rates in milliseconds, to the microsecond."""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any


class _Selector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Moves the loop's time by what it would have waited."""

    now = 1_000.0

    def select(self, timeout: float | None = None) -> list[Any]:
        """Look at the sockets, and let the time pass instead of waiting."""
        found = super().select(0)
        if not found and timeout:
            self.now += timeout
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """Loop with a clock of its own."""

    def __init__(self) -> None:
        self._selector_of_time = _Selector()
        super().__init__(self._selector_of_time)

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._selector_of_time.now


def run_virtually(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(work)


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Have a test run in virtual time."""

    @functools.wraps(test)
    def run(*args: Any, **fixtures: Any) -> None:
        run_virtually(test(*args, **fixtures))

    return run


def virtual_now() -> float:
    """Return the time of the loop that runs."""
    return asyncio.get_running_loop().time()
