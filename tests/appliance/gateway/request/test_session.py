"""One request over real channels to a scripted engine: replays, limits of waiting, and what is charged."""

from __future__ import annotations

import asyncio
import contextlib
import time
from array import array
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any

import pytest

from appliance.common.control_cards import GPU_LOST, GPU_MEMORY
from appliance.common.errors import (
    ContextLengthError,
    DeadlineExceededError,
    DeterministicNotAllowedError,
    DeterministicUnavailableError,
    FeatureNotAllowedError,
    GpuLostError,
    GpuMemoryError,
    InvalidRequestError,
    QuarantinedError,
    UnavailableError,
)
from appliance.gateway.generate_request import (
    Delta,
    EmbedRequest,
    Event,
    Finished,
    GenerateRequest,
    Grammar,
    Operation,
    Principal,
    Started,
    TokenPrompt,
    Tools,
)
from appliance.gateway.request import lifecycle as lifecycle_module
from appliance.gateway.request.audit_feed import NoAuditFeed
from appliance.gateway.request.audited_calls import AuditedCalls
from appliance.gateway.request.ledger import Ledger
from appliance.gateway.request.lifecycle import Lifecycle, SessionDependencies
from appliance.gateway.request.session import Session
from appliance.gateway.request.suspects import Standing, Suspects
from appliance.gateway.sandboxes import model_sandboxes as rooms_module
from appliance.gateway.sandboxes.engine_link import EngineLink
from appliance.gateway.sandboxes.engine_loss import EngineLoss
from appliance.gateway.sandboxes.model_sandboxes import ModelSandboxes
from appliance.gateway.sandboxes.text_link import TextLink, VocabularyTable
from isolation.ipc.codec import Message
from isolation.ipc.engine import Abort, RequestFailure, StepOutput, Submit
from isolation.ipc.engine import Started as WireStarted
from isolation.ipc.grammar import NO_GRAMMAR_USER, GrammarKind, OpenGrammar
from isolation.ipc.logit_bias import LogitBias
from isolation.ipc.messages import FailureCode, Finish, Priority, Role
from isolation.ipc.sampling import Sampling
from policy.loader import Source, load_policy
from tests.appliance.gateway.pairs import ENGINE_READY, TEXT_READY, Pair, make_pair

POLICY = 'version: 1\ntenants:\n  alpha: {credentials: ["key:a"], models: ["m"]}\n'


class Quiet:
    """A trace that keeps nothing."""

    trace_id = "0" * 32
    traceparent = f"00-{'1' * 32}-{'2' * 16}-01"

    def now_ns(self) -> int:
        """The clock of a trace."""
        return 0

    def __getattr__(self, _name: str) -> Callable[..., None]:
        return lambda *_args, **_kwargs: None


class Stage:
    """One model's rooms with a scripted engine in them, and sessions on it."""

    def __init__(self, counter: Callable[[], int]) -> None:
        self.model = ModelSandboxes("m")
        self.model.table = VocabularyTable(tuple(b"%d " % index for index in range(512)), False)
        self.ledger = Ledger(load_policy([Source("p.yaml", POLICY)]), {"alpha": b"k" * 32})
        self.suspects = Suspects()
        calls = AuditedCalls(NoAuditFeed(), ())
        self.dependencies = SessionDependencies({"m": self.model}, self.ledger, {"m": self.suspects}, counter, calls)
        self.pairs: list[Pair] = []

    def grant(self, terms: str) -> None:
        """Other terms for the tenant, as YAML."""
        text = POLICY.replace('models: ["m"]', f'models: ["m"], {terms}')
        self.dependencies.ledger = Ledger(load_policy([Source("p.yaml", text)]), {"alpha": b"k" * 32})

    def boot(self) -> Pair:
        """A fresh engine."""
        pair = make_pair(Role.ENGINE, ENGINE_READY)
        self.pairs.append(pair)
        self.model.set_engine(EngineLink(pair.host, ENGINE_READY, len(self.pairs), self._ended))
        return pair

    def _ended(self, link: EngineLink, _reason: str, _fault: bool) -> None:
        self.model.set_engine(None)
        self.suspects.engine_died((stream.fingerprint for stream in link.inside), time.monotonic())

    def session(self, *, prompt: TokenPrompt = TokenPrompt(array("I", [1, 2, 3])), **options: Any) -> Session:
        """A request of three ids, unless it has another prompt."""
        request = GenerateRequest(
            request_id="req",
            operation=Operation.TEXT_COMPLETION,
            model="m",
            prompt=prompt,
            sampling=Sampling(temperature=0.0),
            **options,
        )
        return Session(self.life(request), request)

    def life(self, request: GenerateRequest | EmbedRequest) -> Lifecycle:
        """A lifecycle that is not left: what was charged stays in its outcome."""
        return Lifecycle(self.dependencies, Principal("alpha", "key:a"), request, Quiet())  # type: ignore[arg-type]

    def close(self) -> None:
        """Let every engine go."""
        for pair in self.pairs:
            pair.guest.close()


@pytest.fixture
async def stage(counter: Callable[[], int]) -> AsyncGenerator[Stage]:
    """A stage without an engine yet."""
    made = Stage(counter)
    yield made
    if made.model.engine is not None:
        made.model.engine.close()
    made.close()


async def hear(pair: Pair, kind: type[Message]) -> Any:
    """The next message of this kind at the engine."""
    async with asyncio.timeout(20):
        while True:
            for message in pair.guest.receive(1):
                if isinstance(message, kind):
                    return message
            await asyncio.sleep(0.002)


def say(pair: Pair, request: int, *tokens: int, finish: Finish = Finish.NONE, started: bool = False) -> None:
    """Tokens of one request; the last one with this finish."""
    pair.guest.send(
        StepOutput(
            array("Q", [request] * len(tokens)),
            array("I", tokens),
            bytes([0] * (len(tokens) - 1) + [finish]) if tokens else b"",
            starts=(WireStarted(request, 0, 0),) if started else (),
        )
    )


async def collect(session: Session) -> list[Event]:
    """All events."""
    return [event async for event in session.run()]


async def test_a_replay_has_the_time_that_the_request_had(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a death the next engine must be entered soon; the answer itself may take as long as it ever might."""
    monkeypatch.setattr(lifecycle_module, "REPLAY_S", 0.2)
    first = stage.boot()
    running = asyncio.ensure_future(collect(stage.session(max_tokens=2)))
    await hear(first, Submit)
    first.guest.close()
    await asyncio.sleep(0.05)
    second = stage.boot()
    submit = await hear(second, Submit)
    say(second, submit.request, started=True)
    await asyncio.sleep(0.3)
    say(second, submit.request, 5, 6, finish=Finish.LENGTH)
    events = await running
    assert [type(event) for event in events] == [Started, Delta, Finished]


async def test_started_comes_once_over_replays_and_also_unsaid(stage: Stage) -> None:
    """An engine that died after its start, and one that gives tokens without a word about it: one Started, first."""
    first = stage.boot()
    running = asyncio.ensure_future(collect(stage.session(max_tokens=1)))
    say(first, (await hear(first, Submit)).request, started=True)
    await asyncio.sleep(0.05)
    first.guest.close()
    await asyncio.sleep(0.05)
    second = stage.boot()
    say(second, (await hear(second, Submit)).request, 5, finish=Finish.LENGTH)
    assert [type(event) for event in await running] == [Started, Delta, Finished]
    lone = asyncio.ensure_future(collect(stage.session(max_tokens=1)))
    say(second, (await hear(second, Submit)).request, 5, finish=Finish.LENGTH)
    assert [type(event) for event in await lone] == [Started, Delta, Finished]


async def test_a_request_before_the_first_boot_does_not_wait_for_ever(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an engine since the start, and without a deadline of its own, it is refused after the boot's time."""
    monkeypatch.setattr(rooms_module, "BOOT_WAIT_S", 0.05)
    async with asyncio.timeout(20):
        with pytest.raises(UnavailableError):
            await collect(stage.session())


async def test_who_leaves_is_charged_for_what_was_computed(stage: Stage) -> None:
    """A caller who reads nothing and leaves pays for the prompt and for every token that came."""
    engine = stage.boot()
    session = stage.session(max_tokens=50)
    events = session.run()
    started = asyncio.ensure_future(anext(events))
    submit = await hear(engine, Submit)
    say(engine, submit.request, started=True)
    assert isinstance(await started, Started)
    say(engine, submit.request, *range(1, 31))
    await asyncio.sleep(0.05)
    await events.aclose()
    assert session.life.outcome.output_tokens == 30
    assert (await hear(engine, Abort)).request == submit.request


async def test_what_a_dead_engine_computed_is_not_charged(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing came of it, so nothing is paid."""
    monkeypatch.setattr(lifecycle_module, "REPLAY_S", 0.05)
    engine = stage.boot()
    session = stage.session(max_tokens=50)
    running = asyncio.ensure_future(collect(session))
    await hear(engine, Submit)
    engine.guest.close()
    with pytest.raises(UnavailableError):
        await running
    assert (session.life.outcome.output_tokens, session.life.outcome.started) == (0, False)


async def test_a_lost_gpu_is_named_to_the_requests_at_once(stage: Stage) -> None:
    """Not tried again, since no engine comes up on that card: a typed error that names it; nothing is charged."""
    engine = stage.boot()
    session = stage.session(max_tokens=50)
    running = asyncio.ensure_future(collect(session))
    await hear(engine, Submit)
    assert stage.model.engine is not None
    stage.model.engine.lose(EngineLoss(GPU_LOST, 2))
    with pytest.raises(GpuLostError, match="card 2"):
        await running
    assert session.life.outcome.output_tokens == 0


async def test_an_engine_above_its_share_is_tried_again_until_something_was_shown(stage: Stage) -> None:
    """As after the end of its own memory: a request that has shown nothing goes on in the next engine; one that has is
    told why it ends."""
    first = stage.boot()
    running = asyncio.ensure_future(collect(stage.session(max_tokens=2)))
    await hear(first, Submit)
    assert stage.model.engine is not None
    stage.model.engine.lose(EngineLoss(GPU_MEMORY, 0))
    second = stage.boot()
    submit = await hear(second, Submit)
    say(second, submit.request, 5, 6, finish=Finish.LENGTH, started=True)
    assert [type(event) for event in await running] == [Started, Delta, Finished]
    events = stage.session(max_tokens=9).run()
    begun = asyncio.ensure_future(anext(events))
    say(second, (await hear(second, Submit)).request, 5, started=True)
    assert isinstance(await begun, Started)
    assert isinstance(await anext(events), Delta)
    stage.model.engine.lose(EngineLoss(GPU_MEMORY, 0))
    with pytest.raises(GpuMemoryError, match="card 0"):
        await anext(events)


async def test_leaving_quickly_does_not_hide_a_killer(stage: Stage) -> None:
    """Who submits what ends the engine, and is gone before it ends, is found out at the second death all the same."""
    for _ in range(2):
        engine = stage.boot()
        task = asyncio.ensure_future(collect(stage.session(max_tokens=7)))
        await hear(engine, Submit)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        engine.guest.close()
        async with asyncio.timeout(20):
            while stage.model.engine is not None:
                await asyncio.sleep(0.002)
    stage.boot()
    with pytest.raises(QuarantinedError):
        await collect(stage.session(max_tokens=7))
    mark = next(iter(stage.suspects._records))
    assert stage.suspects.standing(mark, time.monotonic()) is Standing.QUARANTINED


async def test_an_answer_that_ends_while_it_is_written_is_whole(stage: Stage) -> None:
    """Tokens and the end that come while the last event is still being written are shown as well."""
    engine = stage.boot()
    events = stage.session(max_tokens=3).run()
    first = asyncio.ensure_future(anext(events))
    submit = await hear(engine, Submit)
    say(engine, submit.request, 5, started=True)
    got: list[Event] = [await first, await anext(events)]
    say(engine, submit.request, 6, 7, finish=Finish.LENGTH)
    await asyncio.sleep(0.05)
    got += [event async for event in events]
    assert "".join(event.text for event in got if isinstance(event, Delta)) == "5 6 7 "
    assert isinstance(got[-1], Finished) and got[-1].output_tokens == 3


@pytest.mark.parametrize(
    ("policy", "asked", "sent"),
    [
        ("normal", None, Priority.NORMAL),
        ("high", None, Priority.HIGH),
        ("low", None, Priority.LOW),
        ("normal", Priority.HIGH, Priority.NORMAL),
        ("low", Priority.HIGH, Priority.LOW),
        ("high", Priority.LOW, Priority.LOW),
        ("high", Priority.HIGH, Priority.HIGH),
    ],
)
async def test_a_request_may_lower_its_priority_and_never_raise_it(
    stage: Stage, policy: str, asked: Priority | None, sent: Priority
) -> None:
    """The engine is told the less urgent of what the policy allows and what the request asks for."""
    stage.grant(f"priority: {policy}")
    pair = stage.boot()
    task = asyncio.ensure_future(collect(stage.session(max_tokens=1, priority=asked)))
    submit = await hear(pair, Submit)
    assert submit.priority == sent
    say(pair, submit.request, 5, finish=Finish.LENGTH)
    await task


@pytest.mark.parametrize(
    ("policy", "asked", "sent"),
    [("never", False, False), ("allowed", False, False), ("allowed", True, True), ("always", False, True)],
)
async def test_the_policy_grants_the_deterministic_class(stage: Stage, policy: str, asked: bool, sent: bool) -> None:
    """A request gets it when it may and asks, or when its tenant always does."""
    stage.grant(f"deterministic: {policy}")
    pair = stage.boot()
    task = asyncio.ensure_future(collect(stage.session(max_tokens=1, deterministic=asked)))
    submit = await hear(pair, Submit)
    assert submit.deterministic is sent
    say(pair, submit.request, 5, finish=Finish.LENGTH)
    await task


async def test_biases_reach_the_engine_within_its_vocabulary(stage: Stage) -> None:
    """The engine is told the biases as they are; one of an id that it has not is a 400 that names the field."""
    pair = stage.boot()
    bias = LogitBias(array("I", [3, ENGINE_READY.vocab_size - 1]), array("f", [-100, 0.5]))
    task = asyncio.ensure_future(collect(stage.session(max_tokens=1, logit_bias=bias)))
    submit = await hear(pair, Submit)
    assert submit.logit_bias == bias
    say(pair, submit.request, 5, finish=Finish.LENGTH)
    await task
    beyond = LogitBias(array("I", [3, ENGINE_READY.vocab_size]), array("f", [1, 1]))
    with pytest.raises(InvalidRequestError, match="vocabulary") as refused:
        await collect(stage.session(logit_bias=beyond))
    assert refused.value.param == "logit_bias"


async def test_what_is_not_granted_or_cannot_be_had_is_refused(stage: Stage) -> None:
    """Asking without leave is a 403 by name; an engine that cannot is a 400 also where the policy says always."""
    stage.boot()
    with pytest.raises(DeterministicNotAllowedError, match="deterministic") as refused:
        await collect(stage.session(deterministic=True))
    stage.grant("deterministic: always")
    stage.model.capacity = replace(ENGINE_READY, deterministic=False)
    with pytest.raises(DeterministicUnavailableError, match="deterministically") as unavailable:
        await collect(stage.session())
    assert (refused.value.wire.http, refused.value.wire.code) == (403, "deterministic_not_allowed")
    assert (unavailable.value.wire.http, unavailable.value.wire.code) == (400, "deterministic_unavailable")


@pytest.mark.parametrize(
    ("granted", "answer_param", "withheld"),
    [
        ("tools: false", None, "tools"),
        ("tools: false", "response_format", "tools"),
        ("structured_output: false", "response_format", "structured output"),
        ("tools: false, structured_output: false", "response_format", "tools"),
    ],
)
async def test_tools_with_a_schema_need_both_features(
    stage: Stage, granted: str, answer_param: str | None, withheld: str
) -> None:
    """A request for both is refused by the one that its tenant has not. Control: tools alone are not refused for want
    of the other."""
    pair = stage.boot()
    stage.grant(f"features: {{{granted}}}")
    tools = Tools(b"{}", frozenset(("now",)), answer_param=answer_param)
    with pytest.raises(FeatureNotAllowedError, match=f"may not use {withheld}"):
        await collect(stage.session(tools=tools))
    stage.grant("features: {structured_output: false}")
    task = asyncio.ensure_future(collect(stage.session(tools=replace(tools, answer_param=None), max_tokens=1)))
    say(pair, (await hear(pair, Submit)).request, 5, finish=Finish.LENGTH)
    await task


async def test_grammars_of_end_users_are_on_the_tenants_account(stage: Stage) -> None:
    """With ``namespace: user`` each end user finds its own grammars alone, all of them on the tenant's one account, and
    a request that names none has a user of its own; without (control) no user is told."""
    stage.boot()
    pair = make_pair(Role.TEXT, TEXT_READY)
    stage.model.set_text(text := TextLink(pair.host, TEXT_READY, 1, lambda *_: None))
    told: list[OpenGrammar] = []
    for namespace, user in (("tenant", "ann"), ("user", "ann"), ("user", "bob"), ("user", ""), ("user", "")):
        stage.grant(f"namespace: {namespace}")
        session = stage.session(grammar=Grammar(GrammarKind.REGEX, b"a*"), end_user=user)
        task = asyncio.ensure_future(collect(session))
        told.append(await hear(pair, OpenGrammar))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert len({one.tenant for one in told}) == 1
    assert told[0].user == NO_GRAMMAR_USER
    assert len({one.user for one in told}) == 5
    assert [one.keep for one in told] == [True, True, True, False, False]
    text.close()
    pair.close()


async def test_a_prompt_that_leaves_no_room_is_blamed_on_its_own_field(stage: Stage) -> None:
    """A completion beyond the context, and an id beyond the vocabulary: ``prompt``, or what gRPC calls it."""
    stage.boot()
    for ids, kind in (([1] * ENGINE_READY.max_context, ContextLengthError), ([99_999_999], InvalidRequestError)):
        for param in ("prompt", "token_ids.ids"):
            with pytest.raises(kind) as refused:
                await collect(stage.session(prompt=TokenPrompt(array("I", ids), param)))
            assert refused.value.param == param


async def test_the_engine_knows_the_deadline_and_may_be_first_to_find_it_passed(stage: Stage) -> None:
    """What is left of the request's time goes along, and the engine's answer to it is the gateway's own error."""
    pair = stage.boot()
    task = asyncio.ensure_future(collect(stage.session(max_tokens=1, deadline=time.monotonic() + 60)))
    submit = await hear(pair, Submit)
    assert 50e6 < submit.deadline_us <= 60e6
    pair.guest.send(StepOutput(failures=(RequestFailure(submit.request, FailureCode.DEADLINE),)))
    with pytest.raises(DeadlineExceededError):
        await task
