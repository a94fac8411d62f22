"""Looks at the load and the memory of all sandboxes, in one turn for all: each wake-up and each thread's turn for a
sandbox of its own costs an idle supervisor as much as the look itself.

A frozen sandbox is not looked at: it takes no time, and its memory stays as it is. One that cannot be looked at, for
the supervisor has no descriptor left or the kernel refuses, keeps no other from being looked at, and is tried again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import structlog

from appliance.common.aligned_sleep import aligned_sleep
from appliance.common.kept_tasks import log_failure
from isolation.gvisor.runtime import Sandbox

log = structlog.get_logger()

MEMORY_PERIOD_S = 5.0
"""Seconds between two readings of the sandboxes' memory: the usual interval of a scrape."""

LOOK_S = 2.0
"""Seconds between two readings of the load: short beside a minute of work."""

BUSY_SHARE = 0.5
"""Share of one core from which a sandbox counts as busy. An engine that decodes takes all of a core, one that answers
now and then a tenth."""


class LoadWatch:
    """Whether a sandbox computes or waits, from its processor time alone. Pure: times are seconds of the caller's
    clocks."""

    def __init__(self, now: float, used_s: float) -> None:
        self._then, self.used_s = now, used_s
        self._busy = False

    def look(self, now: float, used_s: float) -> bool | None:
        """Whether it is busy, or None when that has not changed. A process tree that shrank is not busy."""
        busy = used_s - self.used_s >= BUSY_SHARE * (now - self._then)
        self._then, self.used_s = now, used_s
        if busy is self._busy:
            return None
        self._busy = busy
        return busy


@dataclass(slots=True, eq=False)
class Looked:
    """One sandbox that is looked at."""

    sandbox: Sandbox
    holds: Callable[[int], None]
    """Takes the bytes of memory that it holds, at each reading that found some."""
    changes: Callable[[bool], None] | None = None
    """Takes whether it is busy, whenever that changes; None for one whose load does not matter."""
    frozen: bool = False
    _load: LoadWatch | None = None
    _problems: dict[str, str] = field(default_factory=dict)
    """By what is looked at, what the last look met that found nothing."""

    def look(self) -> None:
        """Read the load, and tell what has changed."""
        if self.changes is None:
            return
        try:
            self._look(self.changes)
        except OSError as error:
            self._note("load", error)
        else:
            self._problems.pop("load", None)

    def held(self) -> int:
        """Return the bytes of memory that it holds; 0 where they cannot be read. May block."""
        try:
            found = self.sandbox.memory_bytes()
        except OSError as error:
            self._note("memory", error)
            return 0
        self._problems.pop("memory", None)
        return found

    def _look(self, changes: Callable[[bool], None]) -> None:
        now = time.monotonic()
        if self._load is None:
            self._load = LoadWatch(now, self.sandbox.processor_s())
            return
        # Frozen it takes no time; each look begins a new one all the same, so that the next finds it busy.
        busy = self._load.look(now, self._load.used_s if self.frozen else self.sandbox.processor_s())
        if busy is not None:
            changes(busy)

    def _note(self, what: str, error: OSError) -> None:
        """Log what was in the way of a look, once for as long as it is the same."""
        if self._problems.get(what) != (problem := str(error)):
            self._problems[what] = problem
            log.warning("a sandbox cannot be looked at", sandbox=self.sandbox.name, what=what, problem=problem)


class SandboxLooks:
    """The looks at all sandboxes of a supervisor. All methods run in one event loop; it works while there are any."""

    def __init__(self) -> None:
        self._looked: dict[Looked, None] = {}
        self._works: tuple[asyncio.Task[None], ...] = ()
        self._first: set[asyncio.Task[None]] = set()
        """First readings of the memory of sandboxes that have come."""

    def add(self, one: Looked) -> None:
        """Look at a sandbox from now on: at once, and at intervals."""
        self._looked[one] = None
        one.look()
        first = asyncio.create_task(self._read_memory((one,)), name="memory of a sandbox")
        self._first.add(first)
        first.add_done_callback(self._first.discard)
        if not self._works:
            works = {"load of sandboxes": self._watch_load(), "memory of sandboxes": self._watch_memory()}
            self._works = tuple(asyncio.create_task(work, name=name) for name, work in works.items())
            for work in self._works:
                work.add_done_callback(log_failure)

    def remove(self, one: Looked) -> None:
        """Look at a sandbox no more. Idempotent."""
        self._looked.pop(one, None)
        if not self._looked:
            for work in self._works:
                work.cancel()
            self._works = ()

    async def _watch_load(self) -> None:
        """Read the load of all every ``LOOK_S``, until cancelled."""
        while True:
            await aligned_sleep(LOOK_S)
            for one in tuple(self._looked):
                one.look()

    async def _watch_memory(self) -> None:
        """Read the memory of all every ``MEMORY_PERIOD_S``, until cancelled."""
        while True:
            await aligned_sleep(MEMORY_PERIOD_S)
            await self._read_memory([one for one in self._looked if not one.frozen])

    async def _read_memory(self, those: Iterable[Looked]) -> None:
        """Read the memory of these sandboxes and tell it; without cgroups that reads large files, so in a thread. One
        that has left meanwhile is passed over: it may be held until all of its processes have ended."""
        found = await asyncio.to_thread(lambda: [(one, one.held()) for one in those if one in self._looked])
        for one, held in found:
            if held and one in self._looked:
                one.holds(held)
