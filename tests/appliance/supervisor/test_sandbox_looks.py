"""Looks at all sandboxes in one turn."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from typing import Any

import pytest
import structlog

from appliance.supervisor import sandbox_looks
from appliance.supervisor.sandbox_looks import Looked, SandboxLooks


class OneSandbox:
    """Counts the readings, and says what the test wants."""

    name = "engine-one"

    def __init__(self) -> None:
        self.used_s, self.held = 0.0, 1
        self.refuses = False
        self.read = {"load": 0, "memory": 0}
        self.threads: set[int] = set()

    def processor_s(self) -> float:
        """A reading of the load."""
        self.read["load"] += 1
        self._refuse()
        return self.used_s

    def memory_bytes(self) -> int:
        """A reading of the memory."""
        self.read["memory"] += 1
        self.threads.add(threading.get_ident())
        self._refuse()
        return self.held

    def _refuse(self) -> None:
        if self.refuses:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


class Seen:
    """What is told of one sandbox."""

    def __init__(self, looks: SandboxLooks, *, computes: bool = True, refuses: bool = False) -> None:
        self.sandbox: Any = OneSandbox()
        self.sandbox.refuses = refuses
        self.held: list[int] = []
        self.busy: list[bool] = []
        self.looked = Looked(self.sandbox, self.held.append, self.busy.append if computes else None)
        looks.add(self.looked)


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Periods of the sleeps; each takes a moment."""
    found: list[float] = []

    async def sleep(period_s: float) -> None:
        found.append(period_s)
        await asyncio.sleep(0.01)

    monkeypatch.setattr(sandbox_looks, "aligned_sleep", sleep)
    return found


async def wait_for(happens: Any) -> None:
    """Until this is so."""
    async with asyncio.timeout(20):
        while not happens():
            await asyncio.sleep(0.005)


async def test_one_turn_looks_at_all(turns: list[float]) -> None:
    """Both loops sleep once a turn, however many sandboxes there are; each is read as often as the others, and the load
    of one that has none to tell is not read."""
    looks = SandboxLooks()
    several = [Seen(looks) for _ in range(5)]
    text = Seen(looks, computes=False)
    await wait_for(lambda: all(len(one.held) >= 4 for one in several))
    assert set(turns) == {sandbox_looks.LOOK_S, sandbox_looks.MEMORY_PERIOD_S}
    reads = [one.sandbox.read for one in several]
    assert max(max(one.values()) for one in reads) <= 1 + len(turns), "once at first, and once a turn"
    assert text.sandbox.read["load"] == 0 and len(text.held) >= 3
    assert threading.get_ident() not in text.sandbox.threads, "files without end may be read there"
    for one in (*several, text):
        looks.remove(one.looked)


async def test_changes_of_the_load_are_told(turns: list[float]) -> None:
    """Busy, then idle; nothing while it stays so."""
    looks = SandboxLooks()
    one = Seen(looks)
    one.sandbox.used_s = 1_000.0
    await wait_for(lambda: one.busy == [True, False])
    read = one.sandbox.read["load"]
    await wait_for(lambda: one.sandbox.read["load"] > read + 2)
    assert one.busy == [True, False]
    looks.remove(one.looked)


async def test_a_frozen_one_is_not_read(turns: list[float]) -> None:
    """Neither its load nor its memory; the one beside it is, and so is it once it goes on: what it has computed since
    is a load."""
    looks = SandboxLooks()
    frozen, other = Seen(looks), Seen(looks)
    await wait_for(lambda: frozen.held and other.held)
    frozen.looked.frozen = True
    await wait_for(lambda: len(other.held) > 3)
    read, beside = dict(frozen.sandbox.read), dict(other.sandbox.read)
    await wait_for(lambda: all(other.sandbox.read[what] > beside[what] + 3 for what in beside))
    assert frozen.sandbox.read == read
    frozen.looked.frozen, frozen.sandbox.used_s = False, 1_000.0
    await wait_for(lambda: frozen.busy and frozen.sandbox.read["memory"] > read["memory"])
    assert frozen.busy[0] is True
    for one in (frozen, other):
        looks.remove(one.looked)


async def test_nothing_wakes_up_without_sandboxes(turns: list[float]) -> None:
    """The loops end with the last one, and begin again with the next; one that has gone is told nothing more."""
    looks = SandboxLooks()
    assert turns == []
    one, other = Seen(looks), Seen(looks)
    await wait_for(lambda: len(one.held) > 2)
    looks.remove(one.looked)
    looks.remove(one.looked)
    told = len(one.held)
    await wait_for(lambda: len(other.held) > told + 2)
    assert len(one.held) == told
    looks.remove(other.looked)
    await asyncio.sleep(0.05)
    slept = len(turns)
    await asyncio.sleep(0.05)
    assert len(turns) == slept
    again = Seen(looks)
    await wait_for(lambda: len(again.held) > 2)
    looks.remove(again.looked)


async def test_what_holds_nothing_is_not_told(turns: list[float]) -> None:
    """A reading of zero is that of a sandbox that has ended."""
    looks = SandboxLooks()
    one, other = Seen(looks), Seen(looks)
    one.sandbox.held = 0
    await wait_for(lambda: len(other.held) > 3)
    assert one.held.count(0) == 0 and other.held
    for each in (one, other):
        looks.remove(each.looked)


async def test_one_that_cannot_be_read_keeps_no_other_from_being_read(turns: list[float]) -> None:
    """Whether it is so from its first reading on or later, in the load and in the memory; that is logged once, and once
    it can be read it is. The control is the one beside it."""
    looks = SandboxLooks()
    with structlog.testing.capture_logs() as logs:
        bad, good = Seen(looks, refuses=True), Seen(looks)
        for _ in range(2):
            read = dict(bad.sandbox.read), dict(good.sandbox.read)
            for one, before in zip((bad, good), read, strict=True):
                await wait_for(
                    lambda one=one, before=before: all(one.sandbox.read[key] > before[key] + 3 for key in before)
                )
            assert not bad.held and good.held
    problem = str(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
    assert {(line["what"], line["problem"]) for line in logs} == {("load", problem), ("memory", problem)}
    assert len(logs) == 2
    bad.sandbox.refuses, again = False, bad.sandbox.read["load"]
    await wait_for(lambda: bad.held and bad.sandbox.read["load"] > again + 1)
    bad.sandbox.used_s = 1_000.0
    await wait_for(lambda: bad.busy)
    with structlog.testing.capture_logs() as logs:
        bad.sandbox.refuses, again = True, dict(bad.sandbox.read)
        await wait_for(lambda: all(bad.sandbox.read[key] > again[key] + 1 for key in again))
    assert {line["what"] for line in logs} == {"load", "memory"}, "a later trouble is told again"
    for one in (bad, good):
        looks.remove(one.looked)


async def test_one_that_left_in_the_middle_of_a_turn_is_not_waited_for(turns: list[float]) -> None:
    """Its sandbox may be held until its processes have ended: the turn passes it over, and the others are told."""
    looks = SandboxLooks()
    first, left, last = Seen(looks), Seen(looks), Seen(looks)
    await wait_for(lambda: all(one.held for one in (first, left, last)))
    reached, go_on = threading.Event(), threading.Event()

    def wait() -> int:
        reached.set()
        go_on.wait(20)
        return 1

    first.sandbox.memory_bytes = wait
    await asyncio.to_thread(reached.wait, 20)
    looks.remove(left.looked)
    read, told = left.sandbox.read["memory"], len(last.held)
    go_on.set()
    await wait_for(lambda: len(last.held) > told + 1)
    assert left.sandbox.read["memory"] == read
    for one in (first, last):
        looks.remove(one.looked)
