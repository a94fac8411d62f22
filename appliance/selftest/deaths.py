"""SIGKILL of each process at random moments under load: later answers, recovery times and leftovers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from dataclasses import dataclass, field

from appliance.selftest.real_appliance import ROLES, RealAppliance, complete

PROMPT, TOKENS = "The furnace keeps", 24
"""Prompt and output length of the repeated request; greedy, so that its only right answer is known."""

STREAMS = 4
"""Number of requests running when a process dies."""

GIVE_UP_S = 60.0
SAVED = 2
"""Number of sandboxes started from checkpoints: engine and text."""

SAVING_S = 60.0
SETTLE_S = 20.0
"""Seconds after which nothing of a dead process may remain."""


@dataclass(slots=True)
class Deaths:
    """Results of all kills."""

    kills: dict[str, int] = field(default_factory=dict)
    recovery_s: list[tuple[float, str]] = field(default_factory=list)
    """Seconds from each kill to the next right answer, and the role that was killed."""
    wrong: int = 0
    """Number of answers with status 200 and a wrong text."""
    untyped: int = 0
    """Number of answers that are neither right, nor a typed, retryable error, nor a closed connection."""
    left: list[str] = field(default_factory=list)
    answered: int = 0
    boots: int = 0
    """Number of boots of both sandboxes counted by the appliance itself."""

    @property
    def slowest_s(self) -> float:
        """Return the longest recovery in seconds."""
        return max((seconds for seconds, _ in self.recovery_s), default=0.0)


async def kill_again_and_again(appliance: RealAppliance, kills: int, seed: int) -> Deaths:
    """Kill processes in turn, each at a random moment of the load, and wait for each recovery."""
    draw = random.Random(seed)
    status, right = await complete(appliance, PROMPT, TOKENS, GIVE_UP_S)
    assert status == 200, "the control: it serves before anything dies"
    await _until_saved(appliance)
    before = await _settled(appliance)
    booted = sum((await appliance.generations()).values())
    found = Deaths()
    stop = asyncio.Event()
    load = [asyncio.create_task(_load(appliance, found, right, stop)) for _ in range(STREAMS)]
    try:
        for number in range(kills):
            # The supervisor is last of the four: its death resets the count of boots.
            role = ROLES[number % len(ROLES)]
            if role == "supervisor":
                found.boots += sum((await appliance.generations()).values()) - booted
                booted = len(ROLES) // 2
            await asyncio.sleep(draw.uniform(0.05, 1.0))
            await _kill(appliance, role)
            found.kills[role] = found.kills.get(role, 0) + 1
            found.recovery_s.append((await _recovered(appliance, right), role))
    finally:
        stop.set()
        await asyncio.gather(*load)
    found.left = await _left(appliance, before)
    found.boots += sum((await appliance.generations()).values()) - booted
    return found


async def _load(appliance: RealAppliance, found: Deaths, right: str, stop: asyncio.Event) -> None:
    """Send the request without a pause; every response must be the right answer or a typed error."""
    while not stop.is_set():
        status, text = await complete(appliance, PROMPT, TOKENS)
        if status == 200:
            found.answered += 1
            found.wrong += text != right
        else:
            found.untyped += status not in (0, 503, 504)
            await asyncio.sleep(0.02)


async def _recovered(appliance: RealAppliance, right: str) -> float:
    """Return the seconds from now to an answer for a request sent after now."""
    began = time.monotonic()
    while time.monotonic() - began < GIVE_UP_S:
        status, text = await complete(appliance, PROMPT, TOKENS)
        if status == 200 and text == right:
            return time.monotonic() - began
        await asyncio.sleep(0.02)
    return float("inf")


async def _kill(appliance: RealAppliance, role: str) -> None:
    """Kill a process that lives. One of a dead supervisor may end between the look and the kill: look again then."""
    while True:
        with contextlib.suppress(ProcessLookupError):
            os.kill(await _living(appliance, role), signal.SIGKILL)
            return


async def _living(appliance: RealAppliance, role: str) -> int:
    deadline = time.monotonic() + GIVE_UP_S
    while True:
        try:
            return await appliance.pid(role)
        except LookupError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.05)


async def _until_saved(appliance: RealAppliance) -> None:
    """Wait until the checkpoints exist that a long-running machine has, because a template would change the census.
    Where none can be made, the wait is bounded."""
    for _ in range(round(SAVING_S / 0.1) if appliance.saved_in is not None else 0):
        if len(appliance.checkpoints()) >= SAVED:
            return
        await asyncio.sleep(0.1)


async def _settled(appliance: RealAppliance) -> list[str]:
    """Return the census once it has been stable for half a second."""
    last, since = appliance.census(), time.monotonic()
    while time.monotonic() - since < 0.5:
        await asyncio.sleep(0.1)
        now = appliance.census()
        if len(now) != len(last):
            last, since = now, time.monotonic()
    return last


async def _left(appliance: RealAppliance, before: list[str]) -> list[str]:
    """Return what exists in excess of the first census, after dead processes had time to disappear."""
    deadline = time.monotonic() + SETTLE_S
    now = appliance.census()
    while len(now) > len(before) and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
        now = appliance.census()
    return sorted(set(now) - set(before)) if len(now) > len(before) else []
