"""Loops that sleep until the next multiple of their period wake a process together."""

from __future__ import annotations

import asyncio
import time

import uvloop

from appliance.common.aligned_sleep import LEAST_PART, aligned_sleep, until_next

PERIODS_S = (0.05, 0.1, 0.2)
"""Each divides the next."""

RUN_S = 0.8


def test_a_sleep_ends_at_a_multiple_and_neither_at_once_nor_late() -> None:
    """Wherever it begins, it ends at a multiple of the period, after 0.1 to 1.1 periods; a timer that ended a moment
    too early does not make it end again at once."""
    for period_s in (0.5, 1.0, 2.0, 5.0):
        for step in range(200):
            now = 7.0 * period_s + step * period_s / 200
            sleep_s = until_next(now, period_s)
            assert LEAST_PART * period_s - 1e-9 <= sleep_s <= (1 + LEAST_PART) * period_s + 1e-9
            ends = (now + sleep_s) / period_s
            assert abs(ends - round(ends)) < 1e-9
        assert until_next(9.999 * period_s, period_s) > period_s


async def _wake_ups(sleep: object) -> tuple[int, int]:
    """Run loops of three periods beside each other; returns how often they ran, and in how many milliseconds."""
    ran: list[int] = []

    async def loop(period_s: float) -> None:
        while True:
            await sleep(period_s)  # type: ignore[operator]
            ran.append(round(asyncio.get_running_loop().time() * 1_000))

    tasks = []
    for period_s in PERIODS_S:
        tasks.append(asyncio.create_task(loop(period_s)))
        await asyncio.sleep(0.013)  # they do not begin together
    await asyncio.sleep(RUN_S)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return len(ran), len(set(ran))


def test_loops_of_several_periods_share_their_wake_ups() -> None:
    """In the gateway's kind of event loop, loops of 20, 10 and 5 looks a second wake it hardly more often than the
    first alone; with plain sleeps they do (control)."""
    began = time.monotonic()
    for attempt in range(5):  # A machine that is busy parts timers that are due together.
        ran, woken = uvloop.run(_wake_ups(aligned_sleep))
        if woken <= 0.75 * ran:
            break
    assert attempt < 4, f"{woken} wake-ups for {ran} looks in {time.monotonic() - began:.1f} s"
    ran, woken = uvloop.run(_wake_ups(asyncio.sleep))
    assert woken > 0.85 * ran
