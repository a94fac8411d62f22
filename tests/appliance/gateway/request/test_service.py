"""The service over real channels to scripted sandboxes: what it holds on to, and what it counts."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from array import array
from collections.abc import Callable
from dataclasses import replace

import pytest

from appliance.common.audit.entry import Entry, from_wire
from appliance.common.control import Audited
from appliance.common.errors import (
    CancelledError,
    IntegrityError,
    InvalidRequestError,
    ModelNotFoundError,
    UnavailableError,
)
from appliance.common.live_requests import DrainStatus
from appliance.common.status import Counts
from appliance.gateway.generate_request import (
    CallContext,
    Delta,
    Finished,
    GenerateRequest,
    Operation,
    Principal,
    TextPrompt,
)
from appliance.gateway.request.audit_feed import AuditFeed, NoAuditFeed
from appliance.gateway.request.audited_calls import AuditedCalls
from appliance.gateway.request.operator_drain import OperatorDrain, check_taking
from appliance.gateway.request.service import GatewayService
from appliance.gateway.sandboxes.text_link import TextLink
from appliance.gateway.telemetry.tracer import TelemetrySettings, open_telemetry
from appliance.gateway.watch.live_work import LiveWork
from appliance.gateway.watch.picker_page import ADAPTERS, KV_USAGE, QUEUED, RUNNING, picker_page
from isolation.ipc.engine import Abort, RequestFailure, StepOutput, Submit
from isolation.ipc.messages import FailureCode, Finish
from isolation.ipc.sampling import Sampling
from isolation.ipc.text import Encode, Encoded
from tests.appliance.gateway.pairs import TEXT_READY, Pair
from tests.appliance.gateway.request.test_session import Stage, hear, say

ALPHA = Principal("alpha", "key:a")
CALL = CallContext("POST /v1/completions", "http")


class Text(str):
    """A text that can be watched."""

    __slots__ = ("__weakref__",)


@pytest.fixture
async def service(stage: Stage, text_pair: Pair, counter: Callable[[], int]) -> GatewayService:
    """A service with one model, an engine and a text sandbox."""
    link = TextLink(text_pair.host, TEXT_READY, 1, lambda *_: None)
    link.table = stage.model.table
    stage.model.set_text(link)
    return GatewayService({"m": stage.model}, stage.ledger, open_telemetry(TelemetrySettings(version="0")))


def request(prompt: str, **options: object) -> GenerateRequest:
    """A completion of this text."""
    return GenerateRequest(
        request_id="req_1",
        operation=Operation.TEXT_COMPLETION,
        model="m",
        prompt=TextPrompt(prompt),
        sampling=Sampling(temperature=0.0),
        **options,  # type: ignore[arg-type]
    )


async def test_the_prompt_s_text_goes_when_its_ids_are_there(
    service: GatewayService, stage: Stage, text_pair: Pair
) -> None:
    """While an answer streams nobody in the gateway holds the text any more; the answer is complete all the same."""
    engine = stage.boot()
    text = Text("a long prompt")
    seen = weakref.ref(text)
    events = service.generate(ALPHA, request(text, max_tokens=2), CALL)
    del text
    first = asyncio.ensure_future(anext(events))
    job = await hear(text_pair, Encode)
    assert seen() is not None and job.source == b"a long prompt"
    text_pair.guest.send(Encoded(job.request, array("I", [1, 2, 3])))
    submit = await hear(engine, Submit)
    say(engine, submit.request, 5, started=True)
    await first
    gc.collect()
    assert seen() is None
    say(engine, submit.request, 6, finish=Finish.LENGTH)
    rest = [event async for event in events]
    assert "".join(event.text for event in rest if isinstance(event, Delta)) == "5 6 "
    assert isinstance(rest[-1], Finished)
    assert service.tenant_counts.of("alpha") == Counts(ok=1, input_tokens=3, output_tokens=2)


async def test_mistakes_are_counted_with_their_tenant(service: GatewayService) -> None:
    """A request for no model of ours, and one that never became a session; a stranger's is in the sum alone."""
    wrong = GenerateRequest(
        request_id="req_2",
        operation=Operation.TEXT_COMPLETION,
        model="none",
        prompt=TextPrompt("x"),
        sampling=Sampling(),
    )
    with pytest.raises(ModelNotFoundError) as refused:
        await anext(service.generate(ALPHA, wrong, CALL))
    assert refused.value.details == {"model": "none"}
    service.record_refusal(CALL, InvalidRequestError("not JSON"), Principal("alpha", "key:alpha-1"))
    service.record_refusal(CALL, InvalidRequestError("a stranger's"), None)
    assert service.tenant_counts.of("alpha") == Counts(invalid=2)
    assert service.tenant_counts.now()[1] == Counts(invalid=3)


class Supervisor:
    """Takes every message of a feed."""

    def __init__(self) -> None:
        self.taken: list[Audited] = []

    def send(self, message: Audited) -> bool:
        """Take it."""
        self.taken.append(message)
        return True

    def entries(self, kind: str) -> list[Entry]:
        """What came of a kind."""
        return [one for message in self.taken for one in map(from_wire, message.entries) if one.kind == kind]


async def test_an_integrity_failure_is_typed_counted_and_audited(
    service: GatewayService, stage: Stage, text_pair: Pair
) -> None:
    """The engine says that a block was not the request's: the caller gets a typed, retryable error, the log an entry of
    the request, with its listener, and one of the engine, each once."""
    supervisor = Supervisor()
    feed = AuditFeed(supervisor.send)
    service.dependencies.audited_calls = service._audited_calls = AuditedCalls(feed, service.model_sandboxes)
    caller = replace(ALPHA, listener="own-http-unix")
    engine = stage.boot()
    answer = asyncio.ensure_future(anext(service.generate(caller, request("hello", max_tokens=2), CALL)))
    job = await hear(text_pair, Encode)
    text_pair.guest.send(Encoded(job.request, array("I", [1, 2, 3])))
    submit = await hear(engine, Submit)
    engine.guest.send(StepOutput(failures=(RequestFailure(submit.request, FailureCode.INTEGRITY),)))
    with pytest.raises(IntegrityError) as caught:
        await answer
    assert caught.value.retry_after_s
    assert (caught.value.wire.grpc, caught.value.wire.code) == ("INTERNAL", "integrity_failure")
    link = stage.model.engine
    assert link is not None
    for _ in range(2):
        service.take_integrity(stage.model, link)
    feed.flush()
    (served,), (failed,) = supervisor.entries("request"), supervisor.entries("integrity")
    assert served.fields["listener"] == caller.listener
    assert (served.fields["tenant"], served.fields["outcome"]) == ("alpha", "INTEGRITY_FAILURE")
    assert (failed.fields["count"], failed.fields["generation"]) == (1, link.generation)


async def test_no_request_is_taken_that_cannot_be_accounted_for(service: GatewayService, stage: Stage) -> None:
    """While the supervisor says that it refuses for want of a log, requests get UNAVAILABLE; afterwards they go on."""
    stage.boot()
    feed = AuditFeed(lambda _: False)
    service.dependencies.audited_calls = service._audited_calls = AuditedCalls(feed, service.model_sandboxes)
    feed.refuses = True
    with pytest.raises(UnavailableError, match="accounted for"):
        await anext(service.generate(ALPHA, request("hello"), CALL))
    feed.refuses = False
    going = asyncio.ensure_future(anext(service.generate(ALPHA, request("hello"), CALL)))
    await asyncio.sleep(0.05)
    assert not going.done()
    going.cancel()
    await asyncio.gather(going, return_exceptions=True)


async def test_the_operator_sees_and_ends_a_request(service: GatewayService, stage: Stage, text_pair: Pair) -> None:
    """A request that runs is listed without its content, under its caller's tenant alone; ended, its caller has a typed
    error at once, the engine is told, and the list is empty. Another id ends nothing (control)."""
    work, engine = LiveWork(service), stage.boot()
    events = service.generate(ALPHA, request("a secret prompt", max_tokens=9), CALL)
    first = asyncio.ensure_future(anext(events))
    job = await hear(text_pair, Encode)
    assert [one.state for one in work.requests().requests] == ["waiting"]
    text_pair.guest.send(Encoded(job.request, array("I", [1, 2, 3])))
    submit = await hear(engine, Submit)
    say(engine, submit.request, 5, started=True)
    await first
    (one,) = work.requests("alpha").requests
    assert (one.id, one.model, one.credential, one.state) == ("req_1", "m", ALPHA.credential, "running")
    assert (one.input_tokens, one.output_tokens >= 0) == (3, True) and "secret" not in repr(one)
    assert work.requests("beta").requests == () and work.cancel("req_2") is None
    assert work.cancel("req_1") is not None
    with pytest.raises(CancelledError, match="operator"):
        while True:
            await anext(events)
    assert (await hear(engine, Abort)).request == submit.request
    assert work.requests().requests == ()


async def test_a_picker_sees_where_requests_are(service: GatewayService, stage: Stage, text_pair: Pair) -> None:
    """A request waits until an engine computes it, runs then, and is gone at its end; a model that is not served has no
    page. The share of KV is that of the engine's last step."""
    show, engine = picker_page(service), stage.boot()
    running = service.generate(ALPHA, request("hello", max_tokens=2), CALL)
    first = asyncio.ensure_future(anext(running))
    job = await hear(text_pair, Encode)
    assert show("n") is None and show("m") == show("")
    assert f"\n{QUEUED} 1\n" in str(show("m")) and f"\n{RUNNING} 0\n" in str(show("m"))
    text_pair.guest.send(Encoded(job.request, array("I", [1, 2, 3])))
    submit = await hear(engine, Submit)
    say(engine, submit.request, 5, started=True)
    await first
    assert f"\n{QUEUED} 0\n" in str(show("m")) and f"\n{RUNNING} 1\n" in str(show("m"))
    assert f"\n{KV_USAGE} " in str(show("m")) and ADAPTERS not in str(show("m"))
    say(engine, submit.request, 6, finish=Finish.LENGTH)
    assert [event async for event in running]
    assert f"\n{RUNNING} 0\n" in str(show("m"))


def test_a_drain_takes_requests_until_its_notice_is_over() -> None:
    """Readiness changes at once and refusals begin after the notice, which a second order does not prolong. Control:
    without a notice they begin at once."""
    drain, audited = OperatorDrain(notice_s=1_000.0), AuditedCalls(NoAuditFeed(), {})
    drain.set(True, time.monotonic() - 10.0)
    before = drain.refuses_at
    drain.set(True, time.monotonic())
    assert drain.begun and drain.refuses_at == before
    check_taking(drain, audited)
    drain.set(False, 0.0)
    drain.notice_s = 0.0
    drain.set(True, time.monotonic())
    with pytest.raises(UnavailableError):
        check_taking(drain, audited)


async def test_a_drain_refuses_new_requests_and_lets_others_run(
    service: GatewayService, stage: Stage, text_pair: Pair
) -> None:
    """A request that runs is answered to its end during a drain, one that comes is told when to come back, and after
    the drain one that comes is taken (control)."""
    work, engine = LiveWork(service), stage.boot()
    running = service.generate(ALPHA, request("hello", max_tokens=2), CALL)
    first = asyncio.ensure_future(anext(running))
    job = await hear(text_pair, Encode)
    assert work.drain(True) == DrainStatus(draining=True, running=1)
    with pytest.raises(UnavailableError) as refused:
        await anext(service.generate(ALPHA, request("again"), CALL))
    assert refused.value.retry_after_s
    text_pair.guest.send(Encoded(job.request, array("I", [1, 2, 3])))
    submit = await hear(engine, Submit)
    say(engine, submit.request, 5, started=True)
    await first
    say(engine, submit.request, 6, finish=Finish.LENGTH)
    assert isinstance([event async for event in running][-1], Finished)
    assert work.drain(None).draining and not work.drain(False).draining
    taken = asyncio.ensure_future(anext(service.generate(ALPHA, request("again"), CALL)))
    await hear(text_pair, Encode)
    taken.cancel()
