"""Passes over an engine's streams: what goes at once, what waits for the next pass, and that nothing is left behind."""

from __future__ import annotations

import asyncio

import pytest

from appliance.gateway import cadence
from appliance.gateway.delivery import Delivery
from appliance.gateway.stream import TokenStream


class Shelf:
    """A delivery, and streams that note when they are handed on."""

    def __init__(self, live: int) -> None:
        self.delivery = Delivery(lambda: live)
        self.passes: list[int] = []

    def stream(self, number: int) -> TokenStream:
        """A stream that notes its number."""
        made = TokenStream(number, 100)
        made.deliver = lambda: self.passes.append(number)
        return made


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which the pass after the first one is a long time off."""
    monkeypatch.setattr(cadence, "MOST_S", 30.0)
    monkeypatch.setattr(cadence, "CHUNK_S", 10.0)
    return


async def turn() -> None:
    """Two turns of the loop: whatever was planned for at once has run."""
    for _ in range(4):
        await asyncio.sleep(0)


@pytest.mark.usefixtures("slow")
async def test_an_urgent_stream_does_not_wait_for_the_pass() -> None:
    """While the next pass is far off, a hurried stream is handed on in the next turn, the others stay."""
    shelf = Shelf(live=2)
    plain, urgent = shelf.stream(1), shelf.stream(2)
    shelf.delivery.add(plain)
    shelf.delivery.plan()
    async with asyncio.timeout(5):
        while shelf.passes != [1]:
            await asyncio.sleep(0)
    shelf.delivery.add(plain)
    shelf.delivery.hurry(urgent)
    shelf.delivery.plan()
    await turn()
    assert shelf.passes == [1, 2]
    assert plain.due and not urgent.due


@pytest.mark.usefixtures("slow")
async def test_a_lone_stream_is_handed_on_at_each_frame() -> None:
    """Where two streams would wait for half a minute, one waits for nothing, frame after frame."""
    shelf = Shelf(live=1)
    stream = shelf.stream(1)
    for frames in range(1, 6):
        shelf.delivery.add(stream)
        shelf.delivery.plan()
        async with asyncio.timeout(5):
            while len(shelf.passes) < frames:
                await asyncio.sleep(0)


async def test_a_pass_takes_all_that_is_due_once() -> None:
    """Streams added over several frames are handed on together, each once, and may be added again."""
    shelf = Shelf(live=3)
    streams = [shelf.stream(number) for number in range(3)]
    for stream in streams:
        shelf.delivery.add(stream)
        shelf.delivery.plan()
    async with asyncio.timeout(5):
        while len(shelf.passes) < 3:
            await asyncio.sleep(0.001)
    assert shelf.passes == [0, 1, 2] and not any(stream.due for stream in streams)
    shelf.delivery.add(streams[0])
    shelf.delivery.plan()
    async with asyncio.timeout(5):
        while len(shelf.passes) < 4:
            await asyncio.sleep(0.001)
    assert shelf.passes == [0, 1, 2, 0]


async def test_a_stream_without_a_callback_is_woken() -> None:
    """A session that waits gets its event in place of a call."""
    shelf = Shelf(live=1)
    stream = TokenStream(1, 100)
    shelf.delivery.hurry(stream)
    shelf.delivery.plan()
    async with asyncio.timeout(5):
        await stream.wake.wait()
