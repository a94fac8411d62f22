"""Tasks that run as long as a process serves: their end is told."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

import pytest
from structlog.testing import capture_logs

from appliance.common.kept_tasks import kept


async def _breaks() -> None:
    raise ValueError("broken")


async def _returns() -> None:
    await asyncio.sleep(0)


async def _cancels() -> None:
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("work", "why", "logged"),
    [
        (_breaks, "the work failed: ValueError('broken')", True),
        (_returns, "the work failed: it ended, and it should not have", False),
        (_cancels, "the work failed: it ended, and it should not have", False),
    ],
    ids=["breaks", "returns", "cancels"],
)
async def test_a_task_that_ends_is_told(work: object, why: str, logged: bool) -> None:
    """By an error, which is logged with its place, by a return and by a cancellation of its own: once each."""
    told: list[str] = []
    assert callable(work)
    found: Coroutine[None, None, None] = work()
    with capture_logs() as lines:
        with kept({"the work": found}, told.append):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)
    assert told == [why]
    assert [line["task"] for line in lines] == ["the work"] * logged


async def test_the_end_of_the_block_is_no_failure() -> None:
    """The control: what runs until then is cancelled, and nobody is told."""
    told: list[str] = []
    cancelled = asyncio.Event()

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with kept({"the work": waits()}, told.append):
        await asyncio.sleep(0.01)
    await asyncio.wait_for(cancelled.wait(), 5)
    await asyncio.sleep(0)
    assert told == []
