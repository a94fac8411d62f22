"""What long work says of itself: a line on standard error every few seconds, on a terminal as in a pipe or a log.

Lines are whole and never taken back: no carriage return, nothing that only a terminal understands. Work that ends
before the first interval says nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

import typer

from appliance.common.figures import counted, duration

INTERVAL_S = 5.0
"""Seconds between two lines."""

LEAST_SHARE = 0.01
"""Part of the work that must be done before what is left is estimated."""

LEAST_LEFT_S = 1.0
"""Seconds below which what is left is not told."""

Words = Callable[[float, float], str]
"""Done and all of the work in words."""


def of_counted(noun: str, plural: str = "") -> Words:
    """Words for things that are counted: ``3 of 8 requests``."""
    return lambda done, total: f"{done:,.0f} of {counted(round(total), noun, plural)}"


def of_bytes(done: float, total: float) -> str:
    """``1,200 of 4,096 MiB``."""
    return f"{done / (1 << 20):,.0f} of {total / (1 << 20):,.0f} MiB"


def no_words(done: float, total: float) -> str:
    """Nothing, where the share alone says something."""
    return ""


class LongWork:
    """Tells how far one command is, while the block runs. ``stage`` and ``reach`` may be called from any thread."""

    def __init__(self, what: str, words: Words = no_words, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Prepare.

        Args:
            what: the work, as each line begins.
            words: done and all of it in words.
            clock: for tests.
        """
        self._what, self._words, self._clock = what, words, clock
        self._doing = ""
        self._began = self._stage_began = clock()
        self._look: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0)
        self._reached_at: float | None = None
        self._ended = threading.Event()
        self._teller = threading.Thread(target=self._tell, name="progress", daemon=True)

    def __enter__(self) -> LongWork:
        self._teller.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._teller.join()

    def stage(self, doing: str) -> None:
        """Another part of the work begins, of which nothing is done yet."""
        self._doing, self._stage_began, self._look = doing, self._clock(), lambda: (0.0, 0.0)
        self._reached_at = None

    def reach(self, done: float, total: float, doing: str = "") -> None:
        """So much of this part is done; ``doing`` says what is done next, where that is known."""
        self._doing = doing or self._doing
        self._look, self._reached_at = lambda: (done, total), self._clock()

    def follow(self, look: Callable[[], tuple[float, float]]) -> None:
        """Have done and total of this part asked for whenever a line is due."""
        self._look, self._reached_at = look, None

    def line(self) -> str:
        """The line of now: what is being done, how far it is, since when, and about how much longer."""
        done, total = self._look()
        now = self._clock()
        parts = [self._doing] if self._doing else []
        if total:
            words, share = self._words(done, total), f"{100 * done / total:.0f} %"
            parts.append(f"{words} ({share})" if words else share)
        parts.append(f"{_whole(now - self._began)} so far")
        if total and LEAST_SHARE <= done / total < 1:
            spent = (now if self._reached_at is None else self._reached_at) - self._stage_began
            left = spent * total / done - (now - self._stage_began)
            # What takes longer than was estimated has no better estimate before its next step.
            parts += [f"about {_whole(left)} left"] if left >= LEAST_LEFT_S else []
        return f"{self._what}: {', '.join(parts)}"

    def _tell(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            typer.echo(self.line(), err=True)


def _whole(seconds: float) -> str:
    """A time in whole seconds: ``7 s``, ``2 min 05 s``."""
    return f"{round(seconds)} s" if seconds < 100 else duration(seconds)
