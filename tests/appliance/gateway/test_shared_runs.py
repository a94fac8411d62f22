"""A run of a piece of work is shared by those who ask for it before it begins."""

from __future__ import annotations

import asyncio

import pytest

from appliance.gateway.shared_runs import SharedRuns


class _Gated:
    """Work that stands still until it is let go, and gives the number of its run."""

    def __init__(self) -> None:
        self.begun, self.gate = 0, asyncio.Semaphore(0)

    async def __call__(self) -> int:
        self.begun += 1
        number = self.begun
        await self.gate.acquire()
        return number


async def _turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_many_calls_make_two_runs() -> None:
    """The first call begins at once; two hundred that come meanwhile share one run, which begins after it."""
    work = _Gated()
    runs = SharedRuns(work)
    first = asyncio.create_task(runs.run())
    await _turns()
    assert not runs.waits
    others = [asyncio.create_task(runs.run()) for _ in range(200)]
    await _turns()
    assert (work.begun, runs.waits) == (1, True)
    work.gate.release()
    work.gate.release()
    assert await first == 1
    assert set(await asyncio.gather(*others)) == {2}
    assert (work.begun, runs.waits) == (2, False)


async def test_a_call_after_the_start_of_a_run_gets_another() -> None:
    """A run reads what is there when it begins, so a later call is not answered by it."""
    work = _Gated()
    runs = SharedRuns(work)
    work.gate.release()
    assert await runs.run() == 1
    work.gate.release()
    assert await runs.run() == 2


async def test_a_caller_that_leaves_takes_no_run_along() -> None:
    """The run goes on for the others when one of its callers is cancelled."""
    work = _Gated()
    runs = SharedRuns(work)
    leaves, stays = asyncio.create_task(runs.run()), asyncio.create_task(runs.run())
    await _turns()
    leaves.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaves
    work.gate.release()
    assert await stays == 1


async def test_a_failure_reaches_every_caller_and_no_later_run() -> None:
    """All who share a run get its error, and the next run begins anew."""
    outcomes = iter((ValueError("broken"), 7))

    async def work() -> int:
        found = next(outcomes)
        if isinstance(found, ValueError):
            raise found
        return found

    runs = SharedRuns(work)
    results = await asyncio.gather(runs.run(), runs.run(), return_exceptions=True)
    assert [type(one) for one in results] == [ValueError, ValueError]
    assert await runs.run() == 7
