"""A sandbox is handed over until the gateway has it: copies are kept, repeats are bounded, nothing is restarted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from appliance.common.control import Control, HandedOver, SandboxDown, SandboxUp
from appliance.common.errors import HandOverError
from appliance.supervisor import hand_over, service
from appliance.supervisor import keeper as keeper_module
from appliance.supervisor.boot import Booted
from appliance.supervisor.hand_over import FIRST_DELAY_S, MOST_DELAY_S, MOST_REPEATS, REST_S, HandOver
from appliance.supervisor.keeper import Keeper
from tests.appliance.supervisor.test_keeper import Sandbox, make


class Copies:
    """The supervisor's own copies of a channel."""

    def __init__(self) -> None:
        self.closed = False

    def fds(self) -> tuple[int, int, int]:
        """Numbers that nobody uses."""
        return 7, 8, 9

    def close(self) -> None:
        """Note it."""
        self.closed = True


class Stage:
    """A keeper whose boots succeed at once, and what it tells the gateway."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.published: list[Control] = []
        self.copies: list[Copies] = []
        monkeypatch.setattr(keeper_module, "boot", self._boot)
        monkeypatch.setattr(keeper_module, "end", lambda _booted: None)
        self.keeper: Keeper = make(self.published)
        self.running: asyncio.Task[None]
        """Task of the keeper; begun by the fixture."""

    def _boot(self, *_: object, **__: object) -> Booted:
        self.copies.append(Copies())
        channel: Any = self.copies[-1]
        return Booted(Sandbox(), channel, None, "", {}, 0.0)  # type: ignore[arg-type]

    @property
    def offers(self) -> list[int]:
        """Generations that were handed over, each time."""
        return [one.generation for one in self.published if isinstance(one, SandboxUp)]

    def answer(self, *, whole: bool, generation: int = 1) -> None:
        """The gateway's word."""
        self.keeper.taken(HandedOver("m", "engine", generation, int(whole), most_open=64))

    async def until_offered(self, times: int) -> None:
        """Wait until it was handed over so many times."""
        async with asyncio.timeout(20):
            while len(self.offers) < times or self.keeper._ending is None:
                await asyncio.sleep(0.002)


@pytest.fixture
async def stage(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    """A keeper that has handed its sandbox over once."""
    monkeypatch.setattr(hand_over, "FIRST_DELAY_S", 0.001)
    monkeypatch.setattr(hand_over, "MOST_DELAY_S", 0.004)
    monkeypatch.setattr(hand_over, "REST_S", 0.05)
    made = Stage(monkeypatch)
    made.running = asyncio.create_task(made.keeper.run())
    await made.until_offered(1)
    yield made
    made.keeper.stop()
    await made.running


def test_repeats_come_at_growing_intervals_and_become_an_error_once() -> None:
    """The pure part: doubled up to the bound, then the error with limit and remedy, once, and rare attempts on."""
    one, delays, problems = HandOver(), [], []
    for _ in range(MOST_REPEATS + 3):
        one.sent()
        delays.append(one.cut())
        problems.append(one.problem("engine-m", 1_024))
    assert delays[0] == FIRST_DELAY_S and delays[1] == 2 * FIRST_DELAY_S
    assert max(delays[: MOST_REPEATS - 1]) == MOST_DELAY_S and delays[MOST_REPEATS - 1 :] == [REST_S] * 4
    assert sum(delays[: MOST_REPEATS - 1]) < 30
    (problem,) = [one for one in problems if one is not None]
    assert isinstance(problem, HandOverError) and problem is problems[MOST_REPEATS - 1]
    for word in ("engine-m", "all 1024", "RLIMIT_NOFILE", "LimitNOFILE", "athanor-gateway.service"):
        assert word in problem.message


async def test_copies_are_kept_until_the_gateway_has_them(stage: Stage) -> None:
    """Sent, not yet closed: what was cut off on its way is still here. Closed with the gateway's word, and a word about
    an earlier sandbox, or one that nobody waits for, does nothing."""
    assert not stage.copies[0].closed
    stage.answer(whole=True, generation=7)
    stage.keeper.offer()
    assert not stage.copies[0].closed and stage.offers == [1], "not again while the answer is due"
    stage.answer(whole=True)
    assert stage.copies[0].closed
    stage.answer(whole=False)
    await asyncio.sleep(0.02)
    assert stage.offers == [1]


async def test_what_was_cut_off_is_sent_again_and_no_sandbox_ends(stage: Stage) -> None:
    """Any number of times; the error comes once. The same sandbox is taken in the end."""
    with capture_logs() as lines:
        for times in range(1, MOST_REPEATS + 3):
            stage.answer(whole=False)
            await stage.until_offered(times + 1)
    errors = [line for line in lines if line["log_level"] == "error"]
    assert len(errors) == 1 and "LimitNOFILE" in errors[0]["problem"]
    stage.answer(whole=True)
    assert stage.copies[0].closed and len(stage.copies) == 1
    assert not any(isinstance(one, SandboxDown) for one in stage.published)
    assert (stage.keeper.life.generation, stage.keeper.life.restarts) == (1, 0)


async def test_a_gateway_that_goes_before_it_has_answered_costs_the_sandbox(stage: Stage) -> None:
    """It may have used the channel, also if it said otherwise before: the next gateway gets a fresh sandbox."""
    stage.answer(whole=False)
    stage.keeper.gateway_left()
    await stage.until_offered(2)
    assert stage.offers == [1, 2] and not stage.copies[1].closed
    stage.keeper.gateway_left()
    await stage.until_offered(3)
    assert stage.offers == [1, 2, 3]


async def test_behind_the_last_gateway_nothing_is_booted(stage: Stage) -> None:
    """The sandbox ends with it, and no other one is started that nobody would use, until the keeper is stopped or a
    gateway comes all the same. Behind that one a sandbox is booted again, as behind any other (the test before)."""
    stage.answer(whole=True)
    stage.keeper.gateway_left(last=True)
    async with asyncio.timeout(20):
        while not any(isinstance(one, SandboxDown) for one in stage.published):
            await asyncio.sleep(0.002)
    await asyncio.sleep(0.02)
    assert len(stage.copies) == 1 and stage.offers == [1]
    stage.keeper.gateway_came()
    await stage.until_offered(2)
    stage.answer(whole=True, generation=2)
    stage.keeper.gateway_left()
    await stage.until_offered(3)
    assert stage.offers == [1, 2, 3]


async def test_the_last_gateway_may_leave_at_the_moment_of_the_stop(stage: Stage) -> None:
    """The supervisor is stopped and loses its last gateway in one turn of the event loop, while a keeper waits before
    its next boot: the keeper ends all the same. One that is not stopped waits (control: the test before)."""
    stage.answer(whole=True)
    stage.keeper.fault(1, "it answers nonsense")
    async with asyncio.timeout(20):
        while not any(isinstance(one, SandboxDown) for one in stage.published):
            await asyncio.sleep(0)
    stage.keeper.stop()
    stage.keeper.gateway_left(last=True)
    async with asyncio.timeout(5):
        await stage.running
    assert len(stage.copies) == 1


def test_a_gateway_that_comes_behind_the_last_one_is_served_again() -> None:
    """The supervisor was told that no other gateway comes, and one attaches: that word holds no longer, and the keepers
    know of the gateway. A gateway that only leaves (control) changes nothing of it."""
    last, came, left = asyncio.Event(), list[str](), list[bool]()
    others: Any = SimpleNamespace(told=list, greet=list, offer=lambda: came.append("offer"), gateway_left=list)
    models: Any = SimpleNamespace(
        told=list, offer=lambda: came.append("models"), gateway_left=lambda *, last: left.append(last)
    )
    last.set()
    service._gateway_left(models, others, None, others, None, others, last=last.is_set())
    assert last.is_set()
    service._attached(others, models, others, others, last)
    service._gateway_left(models, others, None, others, None, others, last=last.is_set())
    assert (came, left) == (["offer", "models"], [True, False])


async def test_one_that_was_never_offered_waits_for_the_next_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the last: while no gateway is attached nothing is sent, so nobody can have it."""
    stage = Stage(monkeypatch)
    monkeypatch.setattr(stage.keeper, "_publish", lambda _message, _fds: False)
    running = asyncio.create_task(stage.keeper.run())
    async with asyncio.timeout(20):
        while stage.keeper._ending is None:
            await asyncio.sleep(0.002)
    stage.keeper.gateway_left()
    await asyncio.sleep(0.02)
    assert len(stage.copies) == 1 and not stage.copies[0].closed
    stage.keeper.stop()
    await running
