"""Passes over an engine's streams: what goes at once, what waits for the next pass, and that nothing is left behind."""

from __future__ import annotations

import asyncio

import pytest

from appliance.gateway.sandboxes import flush_interval
from appliance.gateway.sandboxes.delivery import Delivery
from appliance.gateway.sandboxes.stream import TokenStream


class Shelf:
    """A delivery, and streams that note when they are handed on."""

    def __init__(self, live: int) -> None:
        self.delivery = Delivery(lambda: live, self._look)
        self.passes: list[int] = []
        self.looks: list[bool] = []
        self.frames: list[TokenStream] = []
        """What the next look finds."""

    def _look(self) -> None:
        """Take the frames that are there, as a link does; notes whether the engine is then asked to ring for each."""
        for stream in self.frames:
            self.delivery.add(stream)
            self.delivery.plan()
        self.frames = []
        self.looks.append(self.delivery.will_look)

    def stream(self, number: int) -> TokenStream:
        """A stream that notes its number."""
        made = TokenStream(number, 100)
        made.deliver = lambda: self.passes.append(number)
        return made


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which the pass after the first one is a long time off."""
    monkeypatch.setattr(flush_interval, "MOST_S", 30.0)
    monkeypatch.setattr(flush_interval, "CHUNK_S", 10.0)
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
    async with asyncio.timeout(20):
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
        async with asyncio.timeout(20):
            while len(shelf.passes) < frames:
                await asyncio.sleep(0)


async def test_a_pass_takes_all_that_is_due_once() -> None:
    """Streams added over several frames are handed on together, each once, and may be added again."""
    shelf = Shelf(live=3)
    streams = [shelf.stream(number) for number in range(3)]
    for stream in streams:
        shelf.delivery.add(stream)
        shelf.delivery.plan()
    async with asyncio.timeout(20):
        while len(shelf.passes) < 3:
            await asyncio.sleep(0.001)
    assert shelf.passes == [0, 1, 2] and not any(stream.due for stream in streams)
    shelf.delivery.add(streams[0])
    shelf.delivery.plan()
    async with asyncio.timeout(20):
        while len(shelf.passes) < 4:
            await asyncio.sleep(0.001)
    assert shelf.passes == [0, 1, 2, 0]


async def test_passes_follow_each_other_and_look_until_nothing_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first pass the engine need not ring: the next one takes what is there by itself. One that finds
    nothing is the last, and leaves the engine asked to ring."""
    monkeypatch.setattr(flush_interval, "MOST_S", 0.002)
    monkeypatch.setattr(flush_interval, "CHUNK_S", 1.0)
    shelf = Shelf(live=2)
    stream = shelf.stream(1)
    shelf.delivery.add(stream)
    shelf.delivery.plan()
    assert not shelf.delivery.will_look  # The first pass comes at once.
    for turns in range(1, 4):
        async with asyncio.timeout(20):
            while len(shelf.passes) < turns:
                await asyncio.sleep(0)
        assert shelf.delivery.will_look
        shelf.frames = [stream] if turns < 3 else []
    async with asyncio.timeout(20):
        while shelf.delivery.will_look:
            await asyncio.sleep(0.001)
    assert shelf.passes == [1, 1, 1]
    assert shelf.looks[-1] is False and shelf.looks.count(False) == 1


async def test_a_lone_stream_never_lets_the_engine_be_silent() -> None:
    """Its passes come at once, so nobody looks, and the engine rings for each frame."""
    shelf = Shelf(live=1)
    stream = shelf.stream(1)
    for frames in range(1, 4):
        shelf.delivery.add(stream)
        shelf.delivery.plan()
        assert not shelf.delivery.will_look
        async with asyncio.timeout(20):
            while len(shelf.passes) < frames:
                await asyncio.sleep(0)
    assert shelf.looks == []


async def test_a_stream_without_a_callback_is_woken() -> None:
    """A session that waits gets its event in place of a call."""
    shelf = Shelf(live=1)
    stream = TokenStream(1, 100)
    shelf.delivery.hurry(stream)
    shelf.delivery.plan()
    async with asyncio.timeout(20):
        await stream.wake.wait()
