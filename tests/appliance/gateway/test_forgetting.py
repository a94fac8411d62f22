"""The gateway's own leftovers: the event loop's buffer."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import weakref

from appliance.gateway import forgetting
from policy.loader import Source, load_policy

SCRIPT = """
import asyncio, os, re, socket, sys, uvloop
from appliance.gateway.forgetting import Washer
from isolation.ipc.sweeping import overwrite_cached

TURNED = bytes(range(216, 200, -1)) + b"egassem-neddih-yrev-a"  # Nothing that looks for it is a copy of it.

def found():
    count = 0
    memory = os.open("/proc/self/mem", os.O_RDONLY)
    for line in open("/proc/self/maps"):
        span, mode, name = re.match(r"(\\S+) (\\S+) \\S+ \\S+ \\S+ *(.*)", line).groups()
        if mode[0] == "r" and not name.startswith("[v"):
            start, end = (int(part, 16) for part in span.split("-"))
            for at in range(start, end, 1 << 20):
                try:
                    piece = os.pread(memory, min((1 << 20) + 64, end - at), at)
                except OSError:
                    continue
                count += piece[::-1].count(TURNED)
                del piece
    return count

async def main():
    here, there = socket.socketpair()
    heard = asyncio.Event()
    class Listener(asyncio.Protocol):
        def data_received(self, data):
            heard.set()
    await asyncio.get_running_loop().create_connection(Listener, sock=here)
    there.sendall(bytes(9_000) + TURNED[::-1])
    await heard.wait()
    before = found()
    washer = Washer()
    await washer.open()
    size = washer.wash()
    await asyncio.sleep(0.2)
    overwrite_cached()
    after = found()
    washer.close()
    washer.close()
    there.close()
    print(size, before, after)

uvloop.run(main())
"""


async def test_the_loops_buffer_is_filled_with_zeros() -> None:
    """A body lies in uvloop's buffer after it was handled, and no longer after a wash; in a process of its own, with
    the environment that the launcher gives."""
    from isolation.gvisor.environment import WIPING_LATER

    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SCRIPT, stdout=-1, env={"PATH": "/usr/bin:/bin", **dict(WIPING_LATER)}
    )
    output, _ = await process.communicate()
    size, before, after = map(int, output.split())
    assert size == forgetting.BUFFER_BYTES
    assert before > after == 0


async def test_rounds_are_made_while_somebody_wants_them(monkeypatch) -> None:
    """Young garbage is collected and the pipe written to, round after round, and not at all when nobody wants it; the
    pipe is gone at the end."""
    monkeypatch.setattr(forgetting, "PERIOD_S", 0.01)
    rounds: list[int] = []
    monkeypatch.setattr(forgetting.Washer, "wash", lambda _self: rounds.append(1) or 0)
    gc.collect()  # What others left in cycles would close its descriptors in these rounds.
    before = len(os.listdir("/proc/self/fd"))
    wanted = False
    task = asyncio.create_task(forgetting.keep_forgetting(lambda: wanted))
    await asyncio.sleep(0.1)
    assert not rounds
    wanted = True
    counts = gc.get_stats()[1]["collections"]
    async with asyncio.timeout(20):
        while len(rounds) < 3:
            await asyncio.sleep(0.01)
    assert gc.get_stats()[1]["collections"] > counts
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert len(os.listdir("/proc/self/fd")) == before


class Knot:
    """Something that holds itself."""

    def __init__(self) -> None:
        self.itself = self


def test_what_grew_old_in_use_is_collected_too() -> None:
    """An object that was in use at two looks and is let go in a cycle is gone after the next look; a look at the young
    alone leaves it (control). What a whole look took of processor time is waited for a hundred times as long, and
    meanwhile the young alone are looked at."""
    clock, spent = iter((100.0, 100.0, 200.0, 200.05, 205.0, 205.1, 205.1)), iter((0.0, 0.0, 7.0, 7.05, 8.0, 8.0))
    collector, knot = forgetting.Collector(lambda: next(clock), lambda: next(spent)), Knot()
    gone = weakref.ref(knot)
    gc.collect(1)
    gc.collect(1)
    del knot
    gc.collect(1)
    assert gone() is not None
    assert collector.collect() == 2
    assert gone() is None
    assert [collector.collect() for _ in range(3)] == [2, 1, 2]


def test_a_look_on_a_busy_machine_delays_no_other() -> None:
    """A look that works for 10 ms and lasts 3 s, since others have the processor, is followed by a whole one at the
    next round; one that works for 3 s is not (control)."""
    for worked, generation in ((0.01, 2), (3.0, 1)):
        clock, spent = iter((100.0, 103.0, 105.0, 105.0)), iter((0.0, worked, 9.0, 9.0))
        collector = forgetting.Collector(lambda times=clock: next(times), lambda times=spent: next(times))
        assert [collector.collect(), collector.collect()] == [2, generation]


POLICY = """\
version: 1
tenants:
  quiet: {credentials: ["key:q"], models: ["*"], retention: none}
  loud: {credentials: ["key:l"], models: ["*"]}
"""


def test_a_policy_that_needs_overwriting_is_refused_without_it() -> None:
    """Switched off, or on in a process whose environment does not do it (this one), each tenant of whom nothing may
    stay is named, and a policy without one is none the worse; where it is done both are fine."""
    policy = load_policy([Source("policy.yaml", POLICY)])
    harmless = load_policy([Source("policy.yaml", POLICY.replace(", retention: none", ""))])
    for problem in (forgetting.wiping_problem(wanted=False), forgetting.wiping_problem(wanted=True)):
        assert problem
        (said,) = forgetting.unforgettable(policy, problem)
        assert "'quiet'" in said
        assert problem in said
        assert not forgetting.unforgettable(harmless, problem)
    assert not forgetting.unforgettable(policy, "")
