"""A link against a guest that abuses the wire itself: the gateway's loop goes on turning for everybody else."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from appliance.gateway.sandboxes.link import LOOP_SHARE, Link
from appliance.gateway.sandboxes.probe import PERIOD_S, Probe
from isolation.ipc.codec import Message, encode
from isolation.ipc.engine import Abort, StepOutput
from isolation.ipc.errors import RingFull
from isolation.ipc.ping import Ping, Pong
from tests.appliance.gateway.pairs import Pair

EMPTY = StepOutput(array("Q"), array("I"), b"", running=1)


RINGER = """
import os, sys
while True:
    try:
        os.write(int(sys.argv[1]), b"0" * 64)
    except BlockingIOError:
        pass
"""


class Ends:
    """How a link ended."""

    def __init__(self, pair: Pair, awaited: Callable[[], bool] = lambda: True) -> None:
        self.messages: list[Message] = []
        self.ends: list[tuple[str, bool]] = []
        self.link = Link(
            pair.host, self.messages.append, lambda reason, fault: self.ends.append((reason, fault)), awaited
        )


@contextmanager
def meanwhile(work: Callable[[], None]) -> Iterator[None]:
    """Do this again and again in a thread while the block runs, at most 20 seconds."""
    stop = threading.Event()

    def run() -> None:
        end = time.monotonic() + 20.0
        while not stop.is_set() and time.monotonic() < end:
            work()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


async def test_a_guest_that_closes_its_bell_and_writes_on_does_not_hold_the_loop(engine_pair: Pair) -> None:
    """The end is the end: one batch more is read, however fast frames go on coming."""
    watched = Ends(engine_pair)
    await asyncio.sleep(0)
    frame = encode(EMPTY)
    writer = engine_pair.guest._writer

    def write() -> None:
        for _ in range(64):
            try:
                writer.push(frame)
            except RingFull:
                return

    write()
    read_fd, write_fd = engine_pair.guest._fds[1:]
    silent = os.open(os.devnull, os.O_RDWR)
    with meanwhile(write):
        began = time.monotonic()
        for fd in (read_fd, write_fd):
            os.dup2(silent, fd)
        engine_pair.guest._reader.set_asleep(asleep=True)  # So that the next frame rings, and nobody is there.
        watched.link.send(Abort(1))
        async with asyncio.timeout(1.5):
            while not watched.ends:
                await asyncio.sleep(0.001)
        assert time.monotonic() - began < 10.0
    os.close(silent)
    assert watched.ends == [("the sandbox is gone", False)]


@pytest.mark.clock
async def test_a_guest_that_rings_without_end_costs_its_share_only(engine_pair: Pair) -> None:
    """A bell with nothing behind it, rung as fast as can be, costs a quarter of the loop and not all of it."""
    watched = Ends(engine_pair)
    bell = engine_pair.guest._fds[2]
    ringer = subprocess.Popen([sys.executable, "-ISc", RINGER, str(bell)], pass_fds=(bell,))  # noqa: ASYNC220
    try:
        await asyncio.sleep(0.2)
        began, spent = time.monotonic(), time.thread_time()
        await asyncio.sleep(0.6)
        share = (time.thread_time() - spent) / (time.monotonic() - began)
    finally:
        ringer.kill()
        ringer.wait()
    assert share < 2 * LOOP_SHARE  # Loop and clock cost something as well; unbridled it is all there is.
    engine_pair.guest.send(EMPTY)
    async with asyncio.timeout(20):
        while not watched.messages:
            await asyncio.sleep(0.005)
    watched.link.close()


async def test_an_idle_link_does_not_tick(engine_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a question outstanding nothing looks at the ring; with one it is looked at ten times a second."""
    waiting = [False]
    looks = [0]
    receive = engine_pair.host.receive

    def counted(limit: int = 64) -> list[Message]:
        looks[0] += 1
        return receive(limit)

    monkeypatch.setattr(engine_pair.host, "receive", counted)
    watched = Ends(engine_pair, lambda: waiting[0])
    await asyncio.sleep(0.05)
    looks[0] = 0
    await asyncio.sleep(0.35)
    assert looks[0] == 0
    waiting[0] = True
    watched.link.send(Abort(1))
    await asyncio.sleep(0.45)
    assert looks[0] >= 2
    watched.link.close()


def probed(pair: Pair) -> Ends:
    """A link that nobody awaits anything of, and which has just sent a probe."""
    watched = Ends(pair, lambda: False)
    watched.link.look()
    watched.link.probe = Probe(time.monotonic() - PERIOD_S)
    watched.link.check_alive(30.0, idle=True)
    assert pair.guest.receive() == [Ping(1)]
    return watched


async def test_an_answer_to_a_probe_rings_no_bell(engine_pair: Pair) -> None:
    """The timer takes it, and then the bell rings for every frame again, which is the control."""
    watched, bell = probed(engine_pair), engine_pair.host._bell_in
    engine_pair.guest.send(Pong(1), urgent=False)
    assert not bell.wait(0)
    async with asyncio.timeout(20):
        while watched.link.probe.outstanding:
            assert not bell.wait(0)
            await asyncio.sleep(0.001)
    engine_pair.guest.send(EMPTY, urgent=False)
    assert bell.wait(0)
    watched.link.close()


async def test_what_is_sent_behind_a_probe_is_answered_at_once(engine_pair: Pair) -> None:
    """A request need not wait for the timer of a probe: from its frame on every answer rings."""
    watched, bell = probed(engine_pair), engine_pair.host._bell_in
    watched.link.send(Abort(1))
    engine_pair.guest.send(EMPTY, urgent=False)
    assert bell.wait(0)
    watched.link.close()


async def test_an_urgent_frame_rings_behind_a_probe(engine_pair: Pair) -> None:
    """An engine may have news of its own just then."""
    watched, bell = probed(engine_pair), engine_pair.host._bell_in
    engine_pair.guest.send(EMPTY, urgent=True)
    assert bell.wait(0)
    watched.link.close()


@pytest.mark.parametrize("lost", ["bell", "ring"])
async def test_a_guest_that_sleeps_over_a_frame_is_rung_again(
    engine_pair: Pair, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """It does not look by itself. A bell that was not rung is rung a moment later by the timer; a ring that its kernel
    has lost by the watch over engines. The controls: nothing rings before."""
    watched, writer, bell = Ends(engine_pair, lambda: False), engine_pair.host._writer, engine_pair.guest._bell_in
    assert not engine_pair.guest.arm()
    with monkeypatch.context() as patched:
        if lost == "bell":
            patched.setattr(writer, "take_sleeper", lambda *, urgent=True: False)
        watched.link.send(Abort(1))
    if lost == "bell":
        assert not bell.wait(0)
        async with asyncio.timeout(20):
            while not bell.wait(0):
                await asyncio.sleep(0.001)
    else:
        bell.drain()
        assert not bell.wait(0)
        watched.link.check_alive(30.0, idle=False)
        assert bell.wait(0)
    assert engine_pair.guest.receive() == [Abort(1)]
    watched.link.close()
