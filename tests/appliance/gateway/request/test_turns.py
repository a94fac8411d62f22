"""Waits of requests as their lifecycles have them: counted, audited, traced, and ended by a withdrawal."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from appliance.common.audit.entry import Entry
from appliance.common.control_models import ModelRest
from appliance.common.errors import (
    ApplianceError,
    DeadlineExceededError,
    FeatureNotAllowedError,
    ModelRemovedError,
    RateLimitedError,
    UnauthenticatedError,
    UnavailableError,
)
from appliance.common.usage.open_charges import OpenCharge
from appliance.gateway.generate_request import Principal
from appliance.gateway.request.audit_feed import NoAuditFeed
from appliance.gateway.request.audited_calls import AuditedCalls
from appliance.gateway.request.lifecycle import Lifecycle
from appliance.gateway.request.service import GatewayService
from appliance.gateway.sandboxes.model_sandboxes import ModelSandboxes
from appliance.gateway.sandboxes.sleep_control import SleepControl
from appliance.gateway.sandboxes.sleep_decisions import SleepDecisions
from tests.appliance.gateway.request.test_embedding import QuietTelemetry
from tests.appliance.gateway.request.test_lifecycle import REQUEST
from tests.appliance.gateway.request.test_session import Quiet, Stage

QUEUE = "limits: {concurrency: {at_once: 1, exceeded: queue}, max_queue_s: 1}"


class Feed(NoAuditFeed):
    """A feed that keeps the entries."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[dict[str, str | int]] = []
        self.counted: list[dict[str, str | int]] = []

    def add(self, kind: str, **fields: str | int) -> None:
        """Keep it."""
        self.entries.append({"kind": kind, **fields})

    def count(self, kind: str, **fields: str | int) -> None:
        """Keep what is counted."""
        self.counted.append({"kind": kind, **fields})

    def end(self, one: Entry, charge: OpenCharge) -> None:
        """Keep that of a request that ended."""
        del charge
        self.add(one.kind, **one.fields)


class Trace(Quiet):
    """A trace that keeps what is annotated."""

    def __init__(self) -> None:
        self.own: dict[str, Any] = {}

    def annotate(self, **words: Any) -> None:
        """Keep it."""
        self.own |= words


class Scene:
    """Lifecycles on a stage with a limit, whose counts and entries are kept."""

    def __init__(self, stage: Stage, terms: str = QUEUE) -> None:
        stage.grant(terms)
        self.feed, self.counted = Feed(), Counter[tuple[str, ...]]()
        self.dependencies = stage.dependencies
        self.dependencies.audited_calls = AuditedCalls(self.feed, ("m",))
        self.dependencies.count = self._count

    def _count(self, name: str, **labels: str) -> None:
        self.counted[(name.rpartition(".")[2], *labels.values())] += 1

    def life(self, **options: Any) -> Lifecycle:
        """A lifecycle of one request."""
        request = replace(REQUEST, **options)
        return Lifecycle(self.dependencies, Principal("alpha", "key:a"), request, Trace())  # type: ignore[arg-type]

    async def run(self, life: Lifecycle, *, hold: asyncio.Event | None = None) -> None:
        """Admit a request, hold it for a while, and end it."""
        with life:
            await life.admit(5)
            if hold is not None:
                await hold.wait()


async def test_a_wait_is_counted_audited_and_traced(stage: Stage) -> None:
    """A request that waited says for how long in its entry and its trace, and counts as admitted; one that did not wait
    has zero and none (control)."""
    scene, hold = Scene(stage), asyncio.Event()
    first, second = scene.life(), scene.life()
    running = asyncio.ensure_future(scene.run(first, hold=hold))
    await asyncio.sleep(0)
    waiting = asyncio.ensure_future(scene.run(second))
    await asyncio.sleep(0.05)
    assert len(scene.dependencies.ledger.lines) == 1
    hold.set()
    await asyncio.gather(running, waiting)
    assert scene.counted == {("queued_requests", "concurrency", "admitted"): 1}
    entries = scene.feed.entries
    assert [one["kind"] for one in entries] == ["request", "request"]
    assert entries[0]["queued_ms"] == 0
    assert 40 <= int(entries[1]["queued_ms"]) <= 1_000
    assert "policy_queued_ms" not in first.trace.own  # type: ignore[attr-defined]
    assert second.trace.own["policy_queued_ms"] == entries[1]["queued_ms"]  # type: ignore[attr-defined]


async def test_waits_that_end_without_a_place(stage: Stage) -> None:
    """One that waits as long as it may is refused with the time to try again, one whose deadline passes ends with that,
    one whose client leaves is gone: each is counted, and none has an entry of a request."""
    scene, hold = Scene(stage), asyncio.Event()
    running = asyncio.ensure_future(scene.run(scene.life(), hold=hold))
    await asyncio.sleep(0)
    lives = [scene.life(), scene.life(deadline=time.monotonic() + 0.1), scene.life()]
    jobs = [asyncio.ensure_future(scene.run(life)) for life in lives]
    await asyncio.sleep(0)
    jobs[2].cancel()
    late, expired, left = await asyncio.gather(*jobs, return_exceptions=True)
    assert (type(late), type(expired)) == (RateLimitedError, DeadlineExceededError)
    assert isinstance(late, ApplianceError) and late.retry_after_s is not None
    assert isinstance(left, asyncio.CancelledError)
    ends = {("queued_requests", "concurrency", end): number for end, number in (("refused", 2), ("cancelled", 1))}
    assert scene.counted == ends
    assert scene.feed.entries == []
    assert scene.dependencies.ledger.concurrency("alpha") == 1
    hold.set()
    await running


async def test_a_withdrawn_credential_ends_a_wait(stage: Stage) -> None:
    """A key that is revoked while its request waits for admission ends the wait at once; under a key that holds the
    wait goes on (control)."""
    scene, hold = Scene(stage), asyncio.Event()
    ledger = scene.dependencies.ledger
    service = GatewayService({"m": stage.model}, ledger, QuietTelemetry())  # type: ignore[arg-type]
    service.dependencies.live = scene.dependencies.live
    running = asyncio.ensure_future(scene.run(scene.life(), hold=hold))
    await asyncio.sleep(0)
    waiting = asyncio.ensure_future(scene.run(scene.life()))
    await asyncio.sleep(0)
    service.end_withdrawn(lambda _credential: True)
    await asyncio.sleep(0)
    assert len(ledger.lines) == 1
    service.end_withdrawn(lambda _credential: False)
    with pytest.raises(UnauthenticatedError):
        await waiting
    assert len(ledger.lines) == 0
    hold.set()
    await running


async def test_tokens_wait_for_a_refund(stage: Stage) -> None:
    """The second decision waits too, with the request's slot taken, and goes on when another request gives back what it
    did not use. A request that is downgraded says so in its entry and is counted."""
    limits = "tokens_per_minute: {rate: 100, exceeded: queue}, concurrency: {at_once: 1, exceeded: downgrade}"
    scene = Scene(stage, f"limits: {{{limits}, max_output_tokens: 100, max_queue_s: 60}}")
    ledger = scene.dependencies.ledger
    with scene.life() as one:
        await one.reserve(await one.admit(50), 20, 50, 100)

        async def second() -> None:
            with scene.life() as two:
                reservation = await two.admit(50)
                await two.reserve(reservation, 20, 50, 100)
                assert reservation.grant == 50

        job = asyncio.ensure_future(second())
        await asyncio.sleep(0.02)
        assert (len(ledger.lines), ledger.concurrency("alpha")) == (1, 2)
    await job
    assert [one["downgraded"] for one in scene.feed.entries] == ["", "concurrency"]
    assert scene.counted == {
        ("queued_requests", "tokens_per_minute", "admitted"): 1,
        ("downgraded_requests", "concurrency"): 1,
    }


async def test_a_model_that_falls_asleep_behind_the_decision_is_refused_by_its_rule(stage: Stage) -> None:
    """A tenant that may not wake models is admitted while the model is awake, and refused when it sleeps then: error,
    span and entry name the rule and the digest, as those of every denial; a model that stays awake serves it (control).
    """
    scene = Scene(stage, "features: {wake: false}")
    models = {"m": stage.model}
    control = SleepControl(SleepDecisions(models, lambda: True, available=lambda: 8 << 30), lambda _: None, lambda _: 0)
    scene.dependencies.sleep = control
    with scene.life() as served:
        await served.place(await served.admit(5))
    refused = scene.life()
    with pytest.raises(FeatureNotAllowedError) as caught, refused:
        reservation = await refused.admit(5)
        control.take(ModelRest("m", "asleep", "", 1 << 30, 0, "while_used", 60_000))
        await refused.place(reservation)
    rule, digest = "tenants.alpha.features.wake", scene.dependencies.ledger.policy.digest
    assert caught.value.details == {"rule": "features.wake", "policy": digest}
    assert (caught.value.rule, caught.value.policy) == (rule, digest)
    assert [one["kind"] for one in scene.feed.entries] == ["request"] and len(scene.feed.counted) == 1
    assert {"rule": rule, "policy": digest}.items() <= scene.feed.counted[0].items()


@pytest.mark.parametrize(
    ("alias", "again", "told"),
    [("", False, ModelRemovedError), ("", True, UnavailableError), ("route", False, UnavailableError)],
    ids=["for good", "again", "by a route"],
)
async def test_one_that_waits_for_a_sleeping_model_is_told_that_it_goes(
    stage: Stage, alias: str, again: bool, told: type[ApplianceError]
) -> None:
    """A request whose model is taken away while it waits for the wake gets the error of the next one in the same turn
    of the loop: 404 for good; 503 where the name is served again, by the model or by the route, whose name alone it is
    told. While the model stays it waits (the control)."""
    scene, models = Scene(stage, ""), {"m": stage.model}
    control = SleepControl(SleepDecisions(models, lambda: True, available=lambda: 8 << 30), lambda _: None, lambda _: 0)
    control.take(ModelRest("m", "asleep", "", 1 << 30, 0, "while_used", 60_000))
    scene.dependencies.sleep = control

    async def wait() -> None:
        with (life := scene.life()):
            reservation = await life.admit(5)
            life.call = replace(life.call, alias=alias)
            await life.place(reservation)

    task = asyncio.ensure_future(wait())
    await asyncio.sleep(0.01)
    assert not task.done() and stage.model.sleep_state.waking, "the control"
    stage.model.leave(again=again)
    with pytest.raises(ApplianceError) as caught:
        await asyncio.wait_for(task, 5.0)
    assert type(caught.value) is told
    assert f"the model {alias or 'm'} is being" in str(caught.value)


async def test_the_end_of_a_request_is_told_to_those_that_wait_for_room(stage: Stage) -> None:
    """A request that was admitted and ends has those that wait for its model's place look; while it runs (the control)
    they do not."""
    scene, models = Scene(stage, ""), {"m": stage.model}
    control = SleepControl(SleepDecisions(models, lambda: True, available=lambda: 8 << 30), lambda _: None, lambda _: 0)
    scene.dependencies.sleep = control
    waiter = control.waits.enter(ModelSandboxes("other"), "t")
    with scene.life() as life:
        await life.place(await life.admit(5))
        assert not waiter.told, "the control"
    assert waiter.told
