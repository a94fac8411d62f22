"""The fence between a flag and the look behind it, and why a plain store and load do not do."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from isolation.ipc import memory_order
from isolation.ipc.errors import UnsupportedMachineError
from isolation.ipc.memory_order import fence, require_total_store_order

ROUNDS = 100_000
BUDGET_S = 4.0
PAGE_BYTES = 4096

FLAG = {"a": 0, "b": 16}
SAW = {"a": 32, "b": 48}
ARRIVED = {"a": 64, "b": 80}
OTHER = {"a": "b", "b": "a"}


def play(words: memoryview, me: str, fenced: bool) -> tuple[int, int]:
    """Rounds of: both raise their flag, then look at the other's. How often did both see nothing,
    in how many rounds?"""
    other = OTHER[me]
    my_flag, its_flag, its_place = FLAG[me], FLAG[other], ARRIVED[other]
    both_blind = 0
    deadline = time.monotonic() + BUDGET_S
    turn = 0
    while turn < ROUNDS and time.monotonic() < deadline:
        turn += 1
        words[ARRIVED[me]] = 3 * turn
        while words[its_place] < 3 * turn:
            if time.monotonic() > deadline:
                return both_blind, turn
        words[my_flag] = turn
        if fenced:
            fence()
        words[SAW[me]] = 2 * turn + (words[its_flag] >= turn)
        words[ARRIVED[me]] = 3 * turn + 1
        while words[its_place] < 3 * turn + 1:
            if time.monotonic() > deadline:
                return both_blind, turn
        if me == "a" and words[SAW["a"]] == words[SAW["b"]] == 2 * turn:
            both_blind += 1
        words[ARRIVED[me]] = 3 * turn + 2
        while words[its_place] < 3 * turn + 2:
            if time.monotonic() > deadline:
                return both_blind, turn
    return both_blind, turn


def second(memfd: int, fenced: bool) -> None:
    """The second process."""
    with mmap.mmap(memfd, PAGE_BYTES) as shared, memoryview(shared).cast("Q") as words:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[1:2])
        play(words, "b", fenced)


def both_blind(root: Path, fenced: bool) -> tuple[int, int]:
    """``play`` in two processes, each on a core of its own."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("two processes run at once on two cores only")
    memfd = os.memfd_create("flags")
    os.ftruncate(memfd, PAGE_BYTES)
    code = f"from tests.isolation.ipc.test_memory import second; second({memfd}, {fenced})"
    other = subprocess.Popen([sys.executable, "-c", code], cwd=root, pass_fds=[memfd])
    try:
        with mmap.mmap(memfd, PAGE_BYTES) as shared, memoryview(shared).cast("Q") as words:
            os.sched_setaffinity(0, cores[:1])
            return play(words, "a", fenced)
    finally:
        os.sched_setaffinity(0, cores)
        os.close(memfd)
        assert other.wait(2 * BUDGET_S) == 0


def test_with_a_fence_two_flags_never_miss_each_other(root):
    """In 100,000 rounds of the race that decides about a bell, never do both sides see nothing."""
    misses, rounds = both_blind(root, fenced=True)
    assert misses == 0
    assert rounds > 10


def test_without_a_fence_they_do(root):
    """The control: on the same machine the same race without the fence is lost now and then."""
    misses, rounds = both_blind(root, fenced=False)
    if not misses:
        pytest.skip(f"this machine reordered nothing in {rounds} rounds")
    assert misses < rounds


def test_other_machines_are_refused(monkeypatch):
    """A processor with a weaker memory order is refused by name; this one is accepted."""
    require_total_store_order()
    fields = tuple(os.uname())[:4]
    monkeypatch.setattr(memory_order.os, "uname", lambda: os.uname_result((*fields, "aarch64")))
    with pytest.raises(UnsupportedMachineError, match="aarch64"):
        require_total_store_order()
