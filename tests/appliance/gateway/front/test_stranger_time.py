"""What strangers send over HTTP/2 is read within a share of the event loop's time, in turns of their networks."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator

import pytest

from appliance.gateway.front import stranger_time as module
from appliance.gateway.front.allowance import Rate
from appliance.gateway.front.starts import Waiting
from appliance.gateway.front.stranger_time import MOST_BEGINNING, MOST_OF_ONE, StrangerTime
from bench import stranger_frames as frames
from tests.appliance.gateway.front.support import Running, serving

NETWORKS, CALLS = 64, 100
"""Of strangers that flood: as many health checks on one connection of each, in one segment."""

PIECE_CALLS = 4
"""Health checks in one piece, at most."""

NEWCOMER_S = 1.0
"""Longest wait of a newcomer's health check beside them, in seconds of this process's time, which serves and asks: a
busy machine adds none. 0.34 on two busy cores."""


class Clock:
    """Time that only reading takes, and that a test lets pass."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Stage:
    """A queue, what was read, and the requests that wait to begin."""

    def __init__(self, share: Rate = module.SHARE) -> None:
        self.clock = Clock()
        self.done: list[str] = []
        self.beginning = Waiting()
        self.queue = StrangerTime(self.beginning, self.clock, share)

    def ask(self, network: str, seconds: float = 0.0, name: str = "") -> None:
        """A piece of this network, whose reading takes so long."""

        def read() -> bool:
            self.clock.now += seconds
            self.done.append(name or network)
            return True

        self.queue.ask(network, read)

    def wait_to_begin(self, network: str, requests: int) -> None:
        """So many requests of a network wait to begin."""
        for _ in range(requests):
            self.beginning.add(network, lambda: True)


async def test_what_is_quick_is_read_at_once() -> None:
    """Pieces are read when they come while there is time left, and the queue asks nothing of the loop."""
    stage = Stage(Rate(burst=1, per_s=0.1))
    for number in range(10):
        stage.ask("a", 0.1, str(number))
    assert len(stage.done) == 10 and not stage.queue.waiting and not stage.queue._armed


async def test_time_that_is_used_up_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece that took ten seconds of one allowed is paid for before the next; then networks take turns."""
    monkeypatch.setattr(module, "TURN_S", 100.0)
    stage = Stage(Rate(burst=1, per_s=1_000))
    stage.ask("a", 10.0, "long")
    for network in "aaabc":
        stage.ask(network)
    assert stage.done == ["long"] and stage.queue.waiting == 5
    await asyncio.sleep(0.05)
    assert stage.done == ["long"], "the clock stands still: nothing comes back"
    stage.clock.now += 1.0
    await asyncio.sleep(0.05)
    assert stage.done == ["long", *"abcaa"]


async def test_a_turn_is_short() -> None:
    """One turn reads for ``TURN_S`` and one piece more, whatever waits; the next turn goes on."""
    stage = Stage(Rate(burst=100, per_s=1))
    stage.queue._waiting.add("first", lambda: True)  # so that the others queue behind it
    for number in range(10):
        stage.ask(str(number), module.TURN_S * 0.6)
    stage.queue._turn()
    assert len(stage.done) == 2
    while stage.queue.waiting:
        await asyncio.sleep(0.02)
    assert stage.done == list(map(str, range(10)))


async def test_a_network_with_requests_that_wait_is_not_read() -> None:
    """At ``MOST_OF_ONE`` of its own, or at ``MOST_BEGINNING`` of all if it has one; a newcomer is read all the same,
    and the others when their requests have begun."""
    stage = Stage()
    stage.wait_to_begin("a", MOST_OF_ONE - 1)
    stage.ask("a", name="a with few")
    stage.wait_to_begin("a", 1)
    stage.ask("a", name="a with many")
    stage.wait_to_begin("b", MOST_BEGINNING)
    stage.wait_to_begin("c", 1)
    stage.ask("c", name="c beside many")
    stage.ask("newcomer")
    await asyncio.sleep(3 * module.LOOK_S)
    assert stage.done == ["a with few", "newcomer"] and stage.queue.waiting == 2
    while stage.beginning.begin():
        pass
    await asyncio.sleep(3 * module.LOOK_S)
    assert stage.done[2:] == ["a with many", "c beside many"]


async def test_a_piece_that_fails_leaves_the_others_their_turn() -> None:
    """Whatever a piece raises, its time is charged and those behind it are read."""
    stage = Stage()

    def fails() -> bool:
        raise RuntimeError("a defect")

    stage.queue._waiting.add("a", fails)
    stage.ask("b")
    with pytest.raises(RuntimeError):
        stage.queue._turn()
    await asyncio.sleep(3 * module.LOOK_S)
    assert stage.done == ["b"] and not stage.queue.waiting


@contextlib.asynccontextmanager
async def flooded(running: Running) -> AsyncIterator[None]:
    """Strangers of ``NETWORKS`` addresses have sent their calls, and read no answer."""
    block = frames.grpc_headers(frames.HEALTH_CHECK, secure=False)
    calls = b"".join(frames.call(stream, block) for stream in itertools.islice(frames.streams(), CALLS))
    writers = []
    for number in range(NETWORKS):
        _, writer = await asyncio.open_connection(
            "127.0.0.1", running.front_ends.grpc_port, local_addr=(f"127.0.1.{number + 1}", 0)
        )
        writer.write(frames.opening((4, 0)) + calls)
        writers.append(writer)
    try:
        yield
    finally:
        for writer in writers:
            writer.transport.abort()


async def test_a_flood_of_calls_waits_in_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of health checks from many networks, each within its allowance: few more than ``MOST_BEGINNING``, of
    each network a piece, are ever read and not begun. Control: without the bounds more are, sooner or later."""
    most = MOST_BEGINNING + NETWORKS * PIECE_CALLS
    assert await most_waiting(most, 3.0) <= most
    monkeypatch.setattr(module, "MOST_BEGINNING", 1 << 30)
    monkeypatch.setattr(module, "MOST_OF_ONE", 1 << 30)
    assert await most_waiting(most, 30.0) > most


async def most_waiting(enough: int, seconds: float) -> int:
    """The most requests of strangers that waited to begin in the first seconds of a flood, or more than enough."""
    async with serving() as running, flooded(running):
        most, end = 0, time.monotonic() + seconds
        while most <= enough and time.monotonic() < end:
            most = max(most, len(running.front_ends.starts.strangers))
            await asyncio.sleep(0.002)
        return most


async def test_a_newcomer_passes_a_flood() -> None:
    """Beside it a health check from an address that nobody knows is answered soon, over a connection of its own: its
    calls neither wait for others' nor are they read behind them."""
    async with serving() as running, flooded(running):
        await asyncio.sleep(0.5)
        async with asyncio.timeout(20):
            while not running.front_ends.starts.strangers:  # The flood has something waiting, now and then.
                await asyncio.sleep(0)
        slowest = 0.0
        for number in range(5):
            begun = time.process_time()
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", running.front_ends.grpc_port, local_addr=(f"127.0.2.{number + 1}", 0)
            )
            block = frames.grpc_headers(frames.HEALTH_CHECK, secure=False)
            writer.write(frames.opening() + frames.call(1, block))
            answer = b""
            async with asyncio.timeout(30):
                while not any(stream == 1 for _, _, stream, _ in frames.split_frames(answer)):
                    answer += await reader.read(4_096)
            slowest = max(slowest, time.process_time() - begun)
            writer.transport.abort()
        assert slowest < NEWCOMER_S
