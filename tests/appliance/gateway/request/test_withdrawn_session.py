"""A request that the policy withdraws: it ends at once, wherever it is, and shows nothing more."""

from __future__ import annotations

import asyncio

import pytest

from appliance.common.errors import PolicyChangedError
from appliance.gateway.generate_request import Started
from isolation.ipc.engine import Abort, Submit
from isolation.ipc.messages import Finish
from tests.appliance.gateway.request.test_session import Stage, collect, hear, say

WITHDRAWN = PolicyChangedError("changed")


async def test_a_withdrawn_request_ends_while_it_streams(stage: Stage) -> None:
    """With the error, at once, and in the engine too; what came before was shown and is charged."""
    engine = stage.boot()
    session = stage.session(max_tokens=50)
    running = asyncio.ensure_future(collect(session))
    submit = await hear(engine, Submit)
    say(engine, submit.request, 1, 2, 3, started=True)
    await asyncio.sleep(0.05)
    session.life.withdraw(WITHDRAWN)
    session.life.withdraw(PolicyChangedError("twice"))
    with pytest.raises(PolicyChangedError, match="^changed$"):
        await running
    assert (await hear(engine, Abort)).request == submit.request
    assert session.life.outcome.output_tokens == 3


@pytest.mark.parametrize("choices", [1, 2])
async def test_a_withdrawn_request_shows_nothing_that_was_not_read(stage: Stage, choices: int) -> None:
    """Its caller reads slowly: tokens that came meanwhile, the end among them, are never shown."""
    engine = stage.boot()
    session = stage.session(max_tokens=50, choices=choices)
    events = session.run()
    started = asyncio.ensure_future(anext(events))
    submit = await hear(engine, Submit)
    say(engine, submit.request, started=True)
    assert isinstance(await started, Started)
    say(engine, submit.request, *range(1, 31), finish=Finish.LENGTH)
    await asyncio.sleep(0.05)
    session.life.withdraw(WITHDRAWN)
    with pytest.raises(PolicyChangedError):
        await anext(events)


async def test_a_withdrawn_request_stops_waiting_for_an_engine(stage: Stage) -> None:
    """No engine is there; the request would wait for a minute. Its task goes on: the cancellation was ours."""
    session = stage.session()

    async def caller() -> str:
        try:
            await collect(session)
        except PolicyChangedError:
            await asyncio.sleep(0)
            return "told"
        return "served"

    task = asyncio.ensure_future(caller())
    await asyncio.sleep(0.05)
    assert not task.done()
    session.life.withdraw(WITHDRAWN)
    async with asyncio.timeout(5):
        assert await task == "told"
    assert not task.cancelling()


async def test_who_leaves_a_withdrawn_request_has_left(stage: Stage) -> None:
    """A cancellation of the caller's beside ours stays one."""
    session = stage.session()
    task = asyncio.ensure_future(collect(session))
    await asyncio.sleep(0.05)
    task.cancel()
    session.life.withdraw(WITHDRAWN)
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_request_that_was_withdrawn_between_two_waits_begins_none(stage: Stage) -> None:
    """Nothing of it reaches the engine."""
    engine = stage.boot()
    session = stage.session()
    session.life.withdraw(WITHDRAWN)
    with pytest.raises(PolicyChangedError):
        await collect(session)
    assert not [message for message in engine.guest.receive(8) if isinstance(message, Submit)]
