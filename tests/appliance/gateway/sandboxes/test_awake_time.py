"""Waits that count only the time in which this process ran."""

from __future__ import annotations

import asyncio
import time

import pytest

from appliance.gateway.sandboxes.awake_time import SLICE_S, AwakeTime


async def _answered(after_s: float, ended: list[str]) -> int:
    try:
        await asyncio.sleep(after_s)
    except asyncio.CancelledError:
        ended.append("cancelled")
        raise
    return 7


async def test_a_process_that_stood_still_waits_on() -> None:
    """The loop stands still for longer than the whole bound, and the answer that was due meanwhile is taken. Control:
    ``asyncio.timeout`` gives up."""
    loop = asyncio.get_running_loop()
    for bounded in (True, False):
        loop.call_later(0.01, time.sleep, 3 * SLICE_S)
        if bounded:
            assert await AwakeTime(2.5 * SLICE_S).wait(_answered(2.9 * SLICE_S, []), time.monotonic() + 60) == 7
        else:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(2.5 * SLICE_S):
                    await asyncio.gather(_answered(2.9 * SLICE_S, []), _after(2))


async def _after(turns: int) -> None:
    for _ in range(turns):
        await asyncio.sleep(0.1)


async def test_a_wait_ends_and_leaves_nothing() -> None:
    """The bound holds over several waits, so does a moment in time, and what was waited for is cancelled; so it is when
    the waiting itself is."""
    ended: list[str] = []
    bound = AwakeTime(0.2)
    assert await bound.wait(_answered(0.05, ended), time.monotonic() + 60) == 7
    for waited in (bound, AwakeTime(60)):
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            await waited.wait(_answered(30, ended), began + 0.3)
        assert time.monotonic() - began < 5
    task = asyncio.ensure_future(AwakeTime(60).wait(_answered(30, ended), time.monotonic() + 60))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["cancelled"] * 3


async def test_an_error_of_the_work_is_its_own() -> None:
    """What is waited for raises, and the wait raises it."""

    async def broken() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await AwakeTime(1).wait(broken(), time.monotonic() + 1)
