"""Where requests are worked on: shared rooms, own rooms, and what the supervisor is asked for."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.common.control import Control, Release, SandboxDown, Want
from appliance.common.control_models import ModelRest, WakeModel
from appliance.common.errors import InvalidRequestError, NoPlaceLeftError
from appliance.common.residency import IDLE_S
from appliance.gateway.generate_request import EmbedRequest, TextPrompt
from appliance.gateway.request.embedding import EmbeddingSession
from appliance.gateway.sandboxes.engine_link import EngineLink
from appliance.gateway.sandboxes.model_sandboxes import ModelSandboxes
from appliance.gateway.sandboxes.sleep_control import SleepControl
from appliance.gateway.sandboxes.sleep_decisions import SleepDecisions
from appliance.gateway.sandboxes.tenant_sandboxes import ASK_AGAIN_S, TenantSandboxes
from isolation.ipc.engine import StepOutput, Submit
from isolation.ipc.grammar import Advance
from isolation.ipc.messages import Role
from isolation.ipc.sampling import Sampling
from policy.loader import Source, load_policy
from policy.model import IsolationClass
from tests.appliance.gateway.pairs import ENGINE_READY, Pair
from tests.appliance.gateway.request.test_session import Stage
from tests.appliance.gateway.sandboxes.test_attached import LIMITS, GatewayEnd, Scripted, until
from tests.appliance.gateway.sandboxes.test_grammars import Bench

SHARED, STRICT, DEDICATED = IsolationClass.SHARED, IsolationClass.STRICT, IsolationClass.DEDICATED


class Told:
    """A house with a clock of the test's, and what it told the supervisor."""

    def __init__(self) -> None:
        self.said: list[Control] = []
        self.now = 0.0
        self.house = TenantSandboxes(LIMITS, self.said.append, lambda: self.now)
        self.shared = ModelSandboxes("m")


@pytest.fixture
def told() -> Told:
    """An empty house."""
    return Told()


def test_each_class_has_its_place(told: Told) -> None:
    """Shared tenants need nobody; strict ones have their own text beside the shared engine, dedicated ones both."""
    place = told.house.place(told.shared, "a", SHARED)
    assert place.engine is place.text is told.shared
    assert told.said == []
    strict = told.house.place(told.shared, "b", STRICT)
    assert strict.engine is told.shared
    assert strict.text is not told.shared
    dedicated = told.house.place(told.shared, "c", DEDICATED)
    assert dedicated.engine is dedicated.text
    assert dedicated.engine not in (told.shared, strict.text)
    assert told.said == [Want("m", "b"), Want("m", "c")]
    assert told.house.place(told.shared, "c", DEDICATED).engine is dedicated.engine


def test_what_does_not_come_is_asked_for_again(told: Told) -> None:
    """Once a second, however many requests wait."""
    for _ in range(10):
        told.house.place(told.shared, "b", STRICT)
    told.now += ASK_AGAIN_S
    told.house.place(told.shared, "b", STRICT)
    assert told.said == [Want("m", "b")] * 2


def test_who_goes_for_another_is_released(told: Told) -> None:
    """The longest idle one's rooms are gone, and the supervisor hears of it before it hears of the next."""
    told.house.place(told.shared, "b", DEDICATED).leave()
    told.now = IDLE_S
    told.house.place(told.shared, "c", DEDICATED)
    assert told.said == [Want("m", "b"), Release("m", "b"), Want("m", "c")]
    assert told.house.find("m", "b") is None
    with pytest.raises(NoPlaceLeftError) as caught:
        told.house.place(told.shared, "b", DEDICATED)
    assert caught.value.retry_after_s == IDLE_S
    assert "'c'" not in caught.value.message


def test_a_place_is_left_once(told: Told) -> None:
    """A second leave frees nobody else's place."""
    first, second = (told.house.place(told.shared, "b", DEDICATED) for _ in range(2))
    first.leave()
    first.leave()
    told.now = IDLE_S
    with pytest.raises(NoPlaceLeftError):
        told.house.place(told.shared, "c", DEDICATED)
    second.leave()
    told.now += IDLE_S
    assert told.house.place(told.shared, "c", DEDICATED)


def test_without_a_house_nobody_is_served_as_less() -> None:
    """Where there may be no sandboxes of single tenants, whose class asks for some is refused."""
    with pytest.raises(NoPlaceLeftError):
        TenantSandboxes().place(ModelSandboxes("m"), "b", STRICT)


async def test_a_refusal_reaches_who_waits(told: Told) -> None:
    """The supervisor says no: a waiting request hears so at once; when it has left, the next one asks anew."""
    place = told.house.place(told.shared, "b", STRICT)
    waiting = asyncio.ensure_future(place.text.wait_text(time.monotonic() + 30))
    await asyncio.sleep(0)
    told.house.refuse("m", "b", "not granted")
    async with asyncio.timeout(20):
        with pytest.raises(NoPlaceLeftError):
            await waiting
    place.leave()
    assert told.house.find("m", "b") is None
    told.house.place(told.shared, "b", STRICT)
    assert told.said == [Want("m", "b"), Release("m", "b"), Want("m", "b")]


@pytest.fixture
async def supervisor(tmp_path: Path) -> AsyncGenerator[Scripted]:
    """A scripted supervisor that listens."""
    made = Scripted(tmp_path / "control.sock")
    yield made
    made.close()


def test_a_release_is_said_before_channels_close(told: Told) -> None:
    """A sandbox whose channel closes ends by itself, and is started again unless the supervisor knows better."""
    order: list[object] = []
    house = TenantSandboxes(LIMITS, order.append)
    place = house.place(told.shared, "b", DEDICATED)
    link: Any = SimpleNamespace(close=lambda: order.append("closed"))
    place.engine.engine = place.engine.text = link
    place.leave()
    house.reconsider(load_policy([Source("p.yaml", "version: 1\ntenants: {}\n")]))
    assert order == [Want("m", "b"), Release("m", "b"), "closed", "closed"]


async def test_a_tenants_sandboxes_come_into_its_own_rooms(
    supervisor: Scripted, tmp_path: Path, counter: Callable[[], int], told: Told
) -> None:
    """Over the real control socket: wanted, handed over, lost and released; the shared rooms see nothing of it."""
    gateway = GatewayEnd(tmp_path / "control.sock", counter, told.shared)
    house = gateway.own
    task = asyncio.create_task(gateway.sandboxes.run())
    await supervisor.attach()
    await until(lambda: gateway.attached)
    place = house.place(told.shared, "b", DEDICATED)
    assert await supervisor.hear() == Want("m", "b")
    supervisor.up(Role.ENGINE, tenant="b")
    await until(lambda: place.engine.engine is not None)
    assert told.shared.engine is None
    assert place.engine.records["engine"].state == "ready"
    supervisor.up(Role.ENGINE, tenant="nobody")
    supervisor.say(SandboxDown("m", "text", 1, 0, "failed", "no tokenizer", 0.5, "b"))
    await until(lambda: place.engine.failed)
    assert told.shared.failed is False
    place.leave()
    house.reconsider(load_policy([Source("p.yaml", "version: 1\ntenants: {}\n")]))
    assert await supervisor.hear() == Release("m", "b")
    assert gateway.sandboxes.every == (told.shared,)
    assert place.engine.engine is None
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_strict_request_waits_for_its_own_text_sandbox(counter: Callable[[], int]) -> None:
    """A session of a strict tenant asks for its text sandbox only once the policy has agreed, and not the shared
    one's; it is always deterministic."""
    stage = Stage(counter)
    said: list[Control] = []
    stage.dependencies.tenant_sandboxes = TenantSandboxes(LIMITS, said.append)
    stage.grant("class: strict, kv: {reservation: 10%}, limits: {concurrency: 1}")
    stage.boot()
    session = stage.session()
    events = session.run()
    first = asyncio.ensure_future(anext(events))
    await until(lambda: bool(said))
    assert said == [Want("m", "alpha")]
    assert session.life.pair.engine is stage.model
    assert session.life.pair.text is stage.dependencies.tenant_sandboxes.find("m", "alpha")
    with pytest.raises(Exception, match="running"):
        await anext(stage.session().run())
    assert len(said) == 1
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    session.life.pair.leave()
    stage.model.engine.close()
    stage.close()


async def test_limits_of_a_model_that_begins_asleep_reach_a_tenant_s_own_text_sandbox(
    counter: Callable[[], int],
) -> None:
    """A tenant with a text sandbox of its own asks first: the limits that the shared engine announces when it wakes are
    known to that sandbox afterwards, so its tokenizer is told the context; before the wake (the control) nobody knows
    them."""
    stage = Stage(counter)
    said: list[Control] = []
    stage.dependencies.tenant_sandboxes = TenantSandboxes(LIMITS, said.append)
    stage.grant("class: strict, kv: {reservation: 10%}, limits: {concurrency: 1}")
    sleep = SleepControl(SleepDecisions({"m": stage.model}, lambda: True), said.append, lambda _: 0)
    stage.dependencies.sleep = sleep
    sleep.take(ModelRest("m", "asleep", "", 1, 0, "while_used", 60_000))
    session = stage.session()
    first = asyncio.ensure_future(anext(session.run()))
    await until(lambda: WakeModel("m", "request", "alpha") in said)
    own = stage.dependencies.tenant_sandboxes.find("m", "alpha")
    assert own is not None
    assert own.capacity is None
    stage.boot()
    stage.model.text = object()  # type: ignore[assignment]
    stage.model._tell()
    await until(lambda: own.capacity is not None)
    assert own.capacity == ENGINE_READY
    stage.model.text = None
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    session.life.pair.leave()
    stage.model.engine.close()
    stage.close()


async def test_vectors_are_refused_to_who_must_have_the_same_bits(counter: Callable[[], int]) -> None:
    """Vectors are computed in batches of any shape: a strict tenant is told so instead of getting less."""
    stage = Stage(counter)
    stage.dependencies.tenant_sandboxes = TenantSandboxes(LIMITS)
    stage.grant("class: strict, kv: {reservation: 10%}")
    request = EmbedRequest(request_id="r", model="m", inputs=(TextPrompt("x"),))
    session = EmbeddingSession(stage.life(request), request)
    with pytest.raises(InvalidRequestError, match="same bits"):
        await session.run()


async def test_each_text_sandbox_hears_of_its_own_requests_tokens(engine_pair: Pair) -> None:
    """Two structured requests of one engine, each with its grammar in another text sandbox: the step's tokens go to the
    sandbox that follows them, and the masks of both to the engine."""
    link = EngineLink(engine_pair.host, ENGINE_READY, 1, lambda *_: None)
    homes = Bench(), Bench()
    submit = Submit(0, b"k" * 32, array("I", [1]), 4, Sampling(temperature=0.0), structured=True)
    for request, home in zip((5, 6), homes, strict=True):
        link.submit(replace(submit, request=request), b"", grammar=await home.opened(request))
    engine_pair.guest.send(StepOutput(array("Q", [5, 6]), array("I", [7, 8]), bytes(2)))
    await until(lambda: all(isinstance(home.sent[-1], Advance) for home in homes))
    assert [home.sent[-1] for home in homes] == [
        Advance(array("Q", [5]), array("I", [7])),
        Advance(array("Q", [6]), array("I", [8])),
    ]
    link.close()


def test_sandboxes_of_a_model_that_is_taken_away_hold_no_place(told: Told) -> None:
    """Idle ones and one in use are released once, a policy that comes into force meets none of them, and their places
    are free again, all three."""
    policy = load_policy([Source("p.yaml", 'version: 1\ntenants:\n  a: {credentials: ["key:a"], models: ["other"]}\n')])
    idle, used = (told.house.place(told.shared, name, STRICT) for name in ("a", "b"))
    idle.leave()
    told.house.end_model("m")
    assert told.house.resident == ()
    assert sorted(one.tenant for one in told.said if isinstance(one, Release)) == ["a", "b"]
    told.house.reconsider(policy)
    used.leave()
    told.now = 2 * IDLE_S
    for name in ("c", "d", "e"):
        told.house.place(told.shared, name, STRICT)
    assert sorted(one.tenant for one in told.said if isinstance(one, Release)) == ["a", "b"]
