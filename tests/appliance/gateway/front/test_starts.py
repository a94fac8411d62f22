"""Requests begin in turns of their owners: many of one caller never delay another caller's few."""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest

from appliance.gateway.front import starts as module
from appliance.gateway.front.allowance import Rate
from appliance.gateway.front.starts import REQUESTS_A_TURN, STRANGERS, Starts
from bench import stranger_frames as frames
from tests.appliance.gateway.front.support import serving

CONNECTIONS, CALLS = 4, 60
"""Of the tenant that floods: as many calls on each connection, in one segment."""


async def test_owners_take_turns() -> None:
    """Behind ten requests of one owner, each of two others' is begun in the next turn; nothing is left over."""
    queue, begun = Starts(time.monotonic, 2), []

    def ask(owner: str) -> None:
        queue.ask(owner, lambda: begun.append(owner) is None, stranger=False)

    for owner in "aaaaaaaaaabc":
        ask(owner)
    assert begun == ["a", "a"] and queue.waiting == 10
    await asyncio.sleep(0)
    assert begun[2:] == ["a", "b"]
    await asyncio.sleep(0)
    assert begun[4:] == ["c", "a"]
    while queue.waiting:
        await asyncio.sleep(0)
    assert sorted(begun) == sorted("aaaaaaaaaabc")


async def test_a_turn_begins_few() -> None:
    """However many ask, a turn begins ``REQUESTS_A_TURN``; requests whose caller has left do not count."""
    queue, begun = Starts(time.monotonic), []
    for number in range(40):
        queue.ask("a", lambda number=number: bool(number % 2) and begun.append(number) is None, stranger=False)
    counts = [len(begun)]
    while queue.waiting:
        await asyncio.sleep(0)
        counts.append(len(begun))
    assert max(after - before for before, after in itertools.pairwise(counts)) <= REQUESTS_A_TURN
    assert begun == list(range(1, 40, 2))


async def test_an_idle_queue_asks_nothing_of_the_loop() -> None:
    """Behind the last request the queue looks once more, to begin its count anew, and then rests."""
    queue = Starts(time.monotonic, 1)
    queue.ask("a", lambda: True, stranger=False)
    for _ in range(3):
        await asyncio.sleep(0)
    assert not queue._armed
    begun: list[str] = []
    queue.ask("a", lambda: begun.append("now") is None, stranger=False)
    assert begun == ["now"], "a request that comes alone waits for no turn"


async def test_strangers_share_a_rate_and_tenants_do_not_wait_for_it() -> None:
    """Requests of many networks without a credential begin at their rate, a newcomer's behind one of each; a tenant's
    begin meanwhile, in the turn in which they came."""
    queue, begun = Starts(time.monotonic, strangers=Rate(burst=2, per_s=100)), []

    def ask(owner: str, *, stranger: bool) -> None:
        queue.ask(owner, lambda: begun.append(owner) is None, stranger=stranger)

    start = time.monotonic()
    for owner in "aaaaaaaaaaaaabb":
        ask(owner, stranger=True)
    await asyncio.sleep(0)
    ask("new", stranger=True)
    ask("/tenant", stranger=False)
    assert begun == ["a", "a", "/tenant"]
    while queue.waiting:
        await asyncio.sleep(0.005)
        ask("/tenant", stranger=False)
    strangers = [owner for owner in begun if owner != "/tenant"]
    assert strangers[2:5] == ["a", "b", "new"] and len(strangers) == 16
    assert time.monotonic() - start >= 14 / 100 - 0.01


@pytest.mark.parametrize("bounded", [True, False], ids=["in turns", "all at once"])
async def test_a_tenants_flood_of_calls_passes_nobody(monkeypatch, bounded) -> None:
    """While one tenant's calls come by the hundred in one segment on each of its connections, another tenant's call
    and request begin behind few of them. Control: where all begin at once, they begin behind most of them."""
    monkeypatch.setattr(module.Starts.__init__, "__defaults__", (REQUESTS_A_TURN if bounded else 10**6, STRANGERS))
    async with serving() as running:
        order: list[str] = []
        models = running.service.models
        monkeypatch.setattr(running.service, "models", lambda who: (order.append(who.tenant), models(who))[1])
        port, http = running.front_ends.grpc_port, running.front_ends.http_port
        flood = [await calls(port, running.key) for _ in range(CONNECTIONS)]
        other = await calls(port, running.other_key)
        request = f"GET /v1/models HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {running.other_key}\r\n\r\n".encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", http)
        writer.write(request)
        await reader.readline()
        order.clear()
        for number, one in enumerate((*flood, other)):
            one(CALLS if number < CONNECTIONS else 1)
        writer.write(request)
        async with asyncio.timeout(20):
            while len(order) < CONNECTIONS * CALLS + 2:
                await asyncio.sleep(0.01)
        last = max(place for place, tenant in enumerate(order) if tenant == "globex")
        assert last < CALLS if bounded else last > 2 * CALLS, last


async def calls(port: int, key: str):
    """A connection on which one call was answered; gives a function that sends so many more in one segment."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    block = frames.grpc_headers("/athanor.inference.v1.InferenceService/ListModels", ("authorization", f"Bearer {key}"))
    streams = frames.streams()
    writer.write(frames.opening() + frames.call(next(streams), block))
    await asyncio.sleep(0.1)
    return lambda number: writer.write(b"".join(frames.call(next(streams), block) for _ in range(number)))
