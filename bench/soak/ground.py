"""What a fault may lay hands on, and the shape of a fault."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from bench.soak.collector import Collector
from bench.soak.served import Served

Act = Callable[["Ground"], Awaitable[str]]
"""Does the harm, lets it last, and undoes what would not go by itself (a full disk, a bad file), also when it fails.
Gives what showed meanwhile that the harm was done, for a fault that does nothing is survived by everybody; empty when
nothing showed it, which is a breach."""


LOOK_S = 0.3
"""Between two looks for a sign of harm."""


@dataclass(frozen=True, slots=True)
class Ground:
    """The appliance and what surrounds it."""

    served: Served
    collector: Collector
    draw: random.Random
    """Of this fault alone; seeded by the run's seed, the fault's name and its turn."""
    clock: Callable[[float], None] | None = None
    """Sets how many seconds the host processes' calendar clock is off; None where that cannot be done here."""

    async def last(self, least_s: float, most_s: float) -> None:
        """Let some time pass under load."""
        await asyncio.sleep(self.draw.uniform(least_s, most_s))

    async def until(self, shows: Callable[[], Awaitable[str]], timeout_s: float) -> str:
        """What shows that the harm was done, as soon as it does; empty when it does not in time."""
        deadline = asyncio.get_running_loop().time() + timeout_s * self.served.patience
        while True:
            found = await shows()
            if found or asyncio.get_running_loop().time() > deadline:
                return found
            await asyncio.sleep(LOOK_S)

    async def tell_operator(self, wish: dict[str, Any]) -> dict[str, Any]:
        """Say something to the supervisor's operator socket.

        Raises:
            OSError: it does not listen.
            ValueError: it does not answer as it should.
        """
        reader, writer = await asyncio.open_unix_connection(self.served.run_dir / "operator.sock")
        try:
            writer.write(json.dumps(wish).encode() + b"\n")
            async with asyncio.timeout(20):
                return dict(json.loads(await reader.readline()))
        finally:
            writer.close()


@dataclass(frozen=True, slots=True)
class Fault:
    """One way to do harm."""

    name: str
    says: str
    """What is done, in a line."""
    act: Act
    may: frozenset[str] = frozenset()
    """What requests may hear meanwhile besides right answers; nothing for harm that must not be felt."""
    needs: Callable[[Ground], str] = lambda _ground: ""
    """Why this machine cannot do it; empty when it can."""
