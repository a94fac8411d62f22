"""What strangers send over HTTP/2 is read within a share of the event loop's time, in turns of their networks."""

from __future__ import annotations

import asyncio
import time

import pytest

from appliance.gateway.front import stranger_time as module
from appliance.gateway.front.allowance import Rate
from appliance.gateway.front.stranger_time import MOST_BEGINNING, StrangerTime
from bench import stranger_frames as frames
from tests.appliance.gateway.front.support import serving

CONNECTIONS, CALLS = 8, 200
"""Of the stranger that floods: as many health checks on each connection, in one segment."""


class Clock:
    """Time that only reading takes, and that a test lets pass."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def reader(clock: Clock, done: list[str], name: str, seconds: float = 0.0):
    """A piece of this name, whose reading takes so long."""

    def read() -> bool:
        clock.now += seconds
        done.append(name)
        return True

    return read


async def test_what_is_quick_is_read_at_once() -> None:
    """Pieces are read when they come while there is time left, and the queue asks nothing of the loop."""
    clock, done = Clock(), []
    queue = StrangerTime(lambda: 0, clock, Rate(burst=1, per_s=0.1))
    for number in range(10):
        queue.ask("a", reader(clock, done, str(number), 0.1))
    assert len(done) == 10 and not queue.waiting and not queue._armed


async def test_time_that_is_used_up_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece that took ten seconds of one allowed is paid for before the next; then networks take turns."""
    monkeypatch.setattr(module, "TURN_S", 100.0)
    clock, done = Clock(), []
    queue = StrangerTime(lambda: 0, clock, Rate(burst=1, per_s=1_000))
    queue.ask("a", reader(clock, done, "long", 10.0))
    for name in "aaabc":
        queue.ask(name, reader(clock, done, name))
    assert done == ["long"] and queue.waiting == 5
    await asyncio.sleep(0.05)
    assert done == ["long"], "the clock stands still: nothing comes back"
    clock.now += 1.0
    await asyncio.sleep(0.05)
    assert done == ["long", *"abcaa"]


async def test_a_turn_is_short() -> None:
    """One turn reads for ``TURN_S`` and one piece more, whatever waits; the next turn goes on."""
    clock, done, beginning = Clock(), [], [MOST_BEGINNING]
    queue = StrangerTime(lambda: beginning[0], clock, Rate(burst=100, per_s=1))
    for number in range(10):
        queue.ask(str(number), reader(clock, done, str(number), module.TURN_S * 0.6))
    beginning[0] = 0
    queue._turn()
    assert len(done) == 2
    while queue.waiting:
        await asyncio.sleep(0.02)
    assert done == list(map(str, range(10)))


async def test_nothing_is_read_while_enough_waits_to_begin() -> None:
    """What is read becomes requests, each of which takes memory until it begins: at ``MOST_BEGINNING`` reading stops,
    and goes on when they are fewer."""
    clock, done, beginning = Clock(), [], [MOST_BEGINNING]
    queue = StrangerTime(lambda: beginning[0], clock)
    queue.ask("a", reader(clock, done, "a"))
    await asyncio.sleep(3 * module.LOOK_S)
    assert done == []
    beginning[0] -= 1
    await asyncio.sleep(3 * module.LOOK_S)
    assert done == ["a"]


async def test_a_piece_that_fails_leaves_the_others_their_turn() -> None:
    """Whatever a piece raises, its time is charged and those behind it are read."""
    clock, done, beginning = Clock(), [], [MOST_BEGINNING]
    queue = StrangerTime(lambda: beginning[0], clock)

    def fails() -> bool:
        raise RuntimeError("a defect")

    queue.ask("a", fails)
    queue.ask("b", reader(clock, done, "b"))
    beginning[0] = 0
    with pytest.raises(RuntimeError):
        queue._turn()
    await asyncio.sleep(3 * module.LOOK_S)
    assert done == ["b"] and not queue.waiting


async def test_a_flood_of_calls_waits_in_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of health checks from one network: a few more than ``MOST_BEGINNING`` are ever read and not begun.
    Control: without the bound, more than twice as many are."""
    assert await most_waiting() <= MOST_BEGINNING + CONNECTIONS * 16
    monkeypatch.setattr(module, "MOST_BEGINNING", 1 << 30)
    assert await most_waiting() > 2 * (MOST_BEGINNING + CONNECTIONS * 16)


async def most_waiting() -> int:
    """The most requests of strangers that waited to begin during a second of a flood within its allowance."""
    async with serving() as running:
        shared = running.front_ends._grpc_shared
        # A single network's flood would be ended by its own allowance; that of many networks would not.
        shared.strangers._rate = Rate(burst=1e9, per_s=1e9)
        block = frames.grpc_headers(frames.HEALTH_CHECK, secure=False)
        calls = b"".join(frames.call(2 * number + 1, block) for number in range(CALLS))
        writers = []
        for _ in range(CONNECTIONS):
            _, writer = await asyncio.open_connection("127.0.0.1", running.front_ends.grpc_port)
            writer.write(frames.opening() + calls)
            writers.append(writer)
        most, end = 0, time.monotonic() + 1.0
        while time.monotonic() < end:
            most = max(most, shared.opened.starts.strangers_waiting)
            await asyncio.sleep(0.002)
        for writer in writers:
            writer.transport.abort()
        return most
