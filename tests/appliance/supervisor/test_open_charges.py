"""A gateway that ends: what it had served is charged once, when its process is gone and not before."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import pytest

from appliance.common.audit.entry import Entry
from appliance.common.control import Control
from appliance.common.control_charges import ChargesUp, KeepCharges
from appliance.common.usage.open_charges import GATEWAY_LOST, OUTPUT, OpenCharges
from appliance.supervisor.open_charges import MAX_MEMORIES, ChargeKeeper
from policy.model import Price
from tests.appliance.common.audit.entries import filled


class House:
    """A keeper, and gateways that it hands memory to."""

    def __init__(self) -> None:
        self.recorded: list[Entry] = []
        self.handed: list[tuple[int, int]] = []
        self.takes = True
        self.keeper = ChargeKeeper(self.publish, self.recorded.append)

    def publish(self, message: Control, fds: tuple[int, ...]) -> bool:
        """Take the memory as a gateway's socket would."""
        assert isinstance(message, ChargesUp)
        if self.takes:
            self.handed.append((os.dup(fds[0]), os.dup(fds[1])))
        return self.takes

    def hand(self, charges: OpenCharges) -> None:
        """Give a gateway its memory."""
        self.keeper.open(KeepCharges())
        charges.use(*self.handed.pop())

    async def outcomes(self, count: int) -> list[tuple[object, object]]:
        """Requests and outcomes recorded, once they are so many."""
        async with asyncio.timeout(10):
            while len(self.recorded) < count:
                await asyncio.sleep(0.005)
        await asyncio.sleep(0.02)
        return [(one.fields["request"], one.fields["outcome"]) for one in self.recorded]


@pytest.fixture
async def house() -> AsyncIterator[House]:
    """A keeper, closed at the end."""
    made = House()
    yield made
    made.keeper.close()


def opened(charges: OpenCharges, name: str) -> None:
    """A request that streams."""
    charge = charges.open(
        filled("request", request=name, outcome=GATEWAY_LOST), Price(input=1, cached_input=1, output=1), None
    )
    charge.show(3, 0)
    charge.words[OUTPUT] = 2


def kill(charges: OpenCharges) -> None:
    """Close what the kernel closes of a process that ends."""
    os.close(charges._alive)
    charges._alive = -1


async def test_an_ended_gateway_is_charged_once(house: House) -> None:
    """After the end of its process and of its socket, in either order; an entry that had come is not made again."""
    for first in ("socket", "process"):
        house.recorded.clear()
        charges = OpenCharges()
        house.hand(charges)
        opened(charges, f"cut {first}")
        opened(charges, f"told {first}")
        house.keeper.note(filled("request", request=f"told {first}"))
        if first == "socket":
            house.keeper.gateway_left()
            await asyncio.sleep(0.05)
            assert house.recorded == [], "its process may live"
            kill(charges)
        else:
            kill(charges)
            await asyncio.sleep(0.05)
            assert house.recorded == [], "what it sent may not have been read"
            house.keeper.gateway_left()
        assert await house.outcomes(1) == [(f"cut {first}", GATEWAY_LOST)]
        house.keeper.gateway_left()
        assert len(house.recorded) == 1


async def test_a_gateway_that_was_detached_and_comes_again_is_not_charged(house: House) -> None:
    """It lives, moves what runs into new memory, and that is charged at its end, once. Memory that no gateway takes
    is forgotten, and of many only some are kept."""
    charges = OpenCharges()
    house.hand(charges)
    opened(charges, "runs")
    house.keeper.gateway_left()
    house.hand(charges)
    await asyncio.sleep(0.05)
    assert house.recorded == []
    house.keeper.gateway_left()
    kill(charges)
    assert await house.outcomes(1) == [("runs", GATEWAY_LOST)]
    house.takes, before = False, len(os.listdir("/proc/self/fd"))
    house.keeper.open(KeepCharges())
    await asyncio.sleep(0.05)
    assert len(os.listdir("/proc/self/fd")) == before
    house.takes = True
    for _ in range(2 * MAX_MEMORIES):
        house.keeper.open(KeepCharges())
    assert len(house.keeper._memories) == MAX_MEMORIES
    for pair in house.handed:
        for fd in pair:
            os.close(fd)
