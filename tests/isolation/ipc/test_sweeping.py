"""Freed memory is overwritten: in programs of their own, with the environments that the appliance gives, and their
controls without a sweep."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from isolation.gvisor.environment import SWEPT, WIPING, WIPING_LATER, guest_environment
from isolation.ipc.sweeping import PERIOD_S, Rounds

ROOT = Path(__file__).resolve().parents[3]

FREED = """
import ctypes, random, sys
from isolation.ipc.errors import SweepError
from isolation.ipc.sweeping import Sweeper, check_overwriting, overwrite_cached

HEAD = sys.getsizeof(b"") - 1
draw = random.Random(5)

def freed(sizes):
    # Objects of all sizes in random order with others between them that stay, freed in another random order.
    made = [(draw.randbytes(8) * (size // 8 + 1))[:size] for size in sizes]
    kept = [bytearray(draw.randrange(20, 300)) for _ in range(500)]
    pairs = [(one, bytearray(40)) for one in made]
    where = tuple([(id(one) + HEAD, len(one), bytes(255 - byte for byte in one[:8])) for one in made])
    draw.shuffle(made)
    del pairs[::2]
    made.clear()
    pairs = tuple([stays for _, stays in pairs])  # A list would have room to spare, with what was there before.
    return where, (kept, pairs)

def left(where):
    # What is looked for is kept with its bits turned, so that no copy of it is found.
    count = 0
    for place, size, turned in where:
        memory = ctypes.string_at(place, size)
        there = memory.translate(TURN).count(turned)
        count += there > 0
    return count

TURN = bytes(range(255, -1, -1))
"""

SWEEPS = (
    FREED
    + """
sweeper = Sweeper()
sizes = [draw.choice((9, 40, 200, 479, 500, 1000, 1500, 3000, 20000, 300000)) for _ in range(400)]
for _ in range(3):
    where, stays = freed(sizes)
    before = left(where)
    sweeper.sweep()
    print(before, left(where))
"""
)

GROWS = """
import array, os
from isolation.ipc.sweeping import Sweeper

sweeper = Sweeper()
ends = array.array("Q", bytes(8 * 90))
reads, writes = os.pipe()
for turn in range(len(ends)):
    for size in (100, 900, 3_000, 40_000):
        os.write(writes, bytes(size))
        os.read(reads, 1 << 18)
    [bytes(size) for size in range(0, 3_000, 7)]
    sweeper.sweep()
    ends[turn], _ = sweeper._top()
print(*(later - one for one, later in zip(ends[59:], ends[60:])))
"""
"""How far the part of the heap that is in use grows from one sweep to the next, from the sixtieth on."""

LATER = (
    FREED
    + """
check_overwriting()
where, stays = freed([draw.randrange(8, 3000) for _ in range(2000)])
before = left(where)
overwrite_cached()
print(before, left(where))
"""
)

REFUSED = (
    FREED
    + """
try:
    {call}
except SweepError as error:
    print(error)
"""
)


def said(script: str, environment: dict[str, str]) -> list[list[str]]:
    """The words of each line that a script writes."""
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT, check=True, timeout=60)
    return [line.split() for line in ended.stdout.splitlines()]


def swept() -> dict[str, str]:
    """The environment of a text sandbox's program."""
    return dict(guest_environment(threads=1, extra=SWEPT))


def test_a_sweep_leaves_nothing_of_what_was_freed() -> None:
    """Of 400 objects of 9 bytes to 300 kB some hundred are still readable after they were freed, which is the control,
    and none after a sweep; three times over."""
    rounds = [tuple(map(int, line)) for line in said(SWEEPS, swept())]
    assert len(rounds) == 3
    assert all(before > 100 for before, _ in rounds)
    assert not any(after for _, after in rounds)


def test_sweeps_do_not_make_the_heap_grow() -> None:
    """A sweep takes nothing for good. (Each took 138 kB: a small piece from the top of the heap stayed with the thread
    and held the rest below it; and again on Python 3.13, which has two numbers at once where 3.11 has one.)"""
    [steps] = said(GROWS, swept())
    assert len(steps) == 30
    assert sum(map(int, steps)) < 4_096, steps


def test_what_is_kept_for_a_thread_is_overwritten() -> None:
    """Where the C library overwrites what is freed, the pieces that it keeps are readable, and then not."""
    ((before, after),) = [tuple(map(int, line)) for line in said(LATER, dict(WIPING_LATER))]
    assert before > 20
    assert not after


@pytest.mark.parametrize("missing", ["PYTHONMALLOC", "GLIBC_TUNABLES"])
def test_overwriting_is_tried_and_not_assumed(missing: str) -> None:
    """A process without one of the two variables is told so; with both, also those that keep nothing, it is content."""
    script = REFUSED.format(call="check_overwriting()")
    (words,) = said(script, {name: value for name, value in WIPING_LATER if name != missing})
    assert "not overwritten" in " ".join(words)
    assert not said(script, dict(WIPING_LATER))
    assert not said(script, dict(WIPING))


def test_a_sweeper_refuses_a_heap_that_it_would_not_reach() -> None:
    """Objects in Python's own pools are none of the C library's; with the right environment nothing is said."""
    script = REFUSED.format(call="Sweeper()")
    (words,) = said(script, {**swept(), "PYTHONMALLOC": "pymalloc"})
    assert "not all in the heap" in " ".join(words)
    assert not said(script, swept())


def test_the_gateways_unit_has_the_environment_that_it_is_tried_with() -> None:
    """Unit files are written by hand; each has the variables of the launcher, the supervisor's those that keep
    nothing."""
    for unit, wanted in (("gateway", WIPING_LATER), ("supervisor", WIPING)):
        text = (ROOT / "systemd" / f"athanor-{unit}.service").read_text()
        (line,) = [line for line in text.splitlines() if "PYTHONMALLOC" in line]
        assert dict(part.split("=", 1) for part in line.partition("=")[2].split()) == dict(wanted)


def test_rounds_come_after_work_and_not_oftener_than_promised() -> None:
    """Idle there is none; the first is due a period after work, however much work follows, and then again."""
    now, swept_at = [100.0], []
    rounds = Rounds(lambda: swept_at.append(now[0]), lambda: now[0])
    rounds.turn()
    assert rounds.left_s(10.0) == 10.0
    for tenth in range(100):
        now[0] = 100.0 + tenth / 10
        if tenth < 50:
            rounds.worked()
        rounds.turn()
        assert rounds.left_s(10.0) <= PERIOD_S or rounds.left_s(10.0) == 10.0
    assert len(swept_at) == 3
    assert all(later - one >= PERIOD_S for one, later in pairwise(swept_at))
    assert swept_at[-1] <= 104.9 + PERIOD_S
    assert rounds.left_s(10.0) == 10.0
