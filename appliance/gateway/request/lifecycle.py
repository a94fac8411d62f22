"""One request from its admission to its settlement: what every operation on a model does around its own work.

policy -> sandboxes -> token ids -> policy with exact counts -> engine, again in the next one where an engine dies ->
charge. However the request ends, leaving its ``Lifecycle`` leaves its sandboxes, settles the ledger, makes the audit
entry and closes the trace.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Self

from appliance.common.errors import (
    ApplianceError,
    CancelledError,
    ContextLengthError,
    FeatureNotAllowedError,
    InternalError,
    InvalidRequestError,
    PayloadTooLargeError,
    PermissionDeniedError,
    QuarantinedError,
    UnavailableError,
)
from appliance.gateway.generate_request import (
    AnyRequest,
    AttestRequest,
    EmbedRequest,
    GenerateRequest,
    Principal,
    ScoreRequest,
    TokenizerRequest,
)
from appliance.gateway.request.audited_calls import AuditedCalls, Call, charge_of
from appliance.gateway.request.content import content_of
from appliance.gateway.request.follower import Outcome, note_restored
from appliance.gateway.request.ledger import Ledger, Reservation, first_access
from appliance.gateway.request.shadow import NO_SHADOW, NoShadow, ShadowRequest
from appliance.gateway.request.splitting import Prefiller
from appliance.gateway.request.suspects import Standing, Suspects
from appliance.gateway.request.tenant_counts import TenantCounts, Tokens
from appliance.gateway.request.turns import Turns
from appliance.gateway.request.waiting import Gate
from appliance.gateway.request.waking import awaken, note_use
from appliance.gateway.request.withdrawal import Admitted
from appliance.gateway.sandboxes.link import RETRY_AFTER_S
from appliance.gateway.sandboxes.model_sandboxes import EngineVisit, ModelSandboxes
from appliance.gateway.sandboxes.publications import Publications
from appliance.gateway.sandboxes.sleep_control import SleepControl
from appliance.gateway.sandboxes.stream import EngineGoneError, TokenStream
from appliance.gateway.sandboxes.tenant_sandboxes import SandboxPair, TenantSandboxes
from appliance.gateway.sandboxes.text_client import TextClient
from appliance.gateway.telemetry import names
from appliance.gateway.telemetry.attributes import told
from appliance.gateway.telemetry.request_trace import Phase, RequestTrace
from isolation.ipc import messages as wire
from policy.decision import Decision
from policy.feature import Feature
from policy.model import Priority

NO_DEADLINE_S = 3_600.0
"""Seconds until the deadline of a request that names none: nothing may live for ever."""

REPLAY_S = 9.0
"""Seconds within which a replay must have entered the next engine after a death: a client gets an answer within ten.
Once the replay runs, the request's own deadline holds again."""

MAX_ATTEMPTS = 3
"""Engines tried for one request: the first, the replay, and one more for a bystander of a second death."""

NAMING = (InvalidRequestError, FeatureNotAllowedError, PayloadTooLargeError)
"""Errors about a field of the request, which is told by the caller's name of it."""

CALLERS_FAULT = (InvalidRequestError, PermissionDeniedError)
"""Errors of requests that can never be served as they are. What the text sandbox did for one is charged to the tenant's
token rate; else it would cost the tenant one of its requests, and the sandbox as much as a prompt that is served.

No bound on the prompt's bytes would do instead. Normalisers compose characters and collapse blanks, templates trim and
leave out, one unknown token may stand for any length: a text of any size may have few tokens, and only the tokenizer
can say that it has too many. The tenant's own context bounds that work (``ledger.COUNTED_CONTEXTS``). A request that
was refused for now (429, 503) is not charged: it would have to wait for longer than it was told."""

PRIORITIES = {Priority.HIGH: wire.Priority.HIGH, Priority.NORMAL: wire.Priority.NORMAL, Priority.LOW: wire.Priority.LOW}
"""Priorities of the policy as the wire has them: the most urgent has the lowest number."""


@dataclass(slots=True)
class SessionDependencies:
    """Parts of the gateway that requests use."""

    models: Mapping[str, ModelSandboxes]
    """Shared sandboxes by model."""
    ledger: Ledger
    suspects: Mapping[str, Suspects]
    """Requests suspected of ending engines, by model."""
    next_id: Callable[[], int]
    """Draws a wire id never used before in this process."""
    audited_calls: AuditedCalls
    tenant_counts: TenantCounts = field(default_factory=TenantCounts)
    tenant_sandboxes: TenantSandboxes = field(default_factory=TenantSandboxes)
    publications: Publications = field(default_factory=Publications)
    live: set[Lifecycle] = field(default_factory=set)
    """Requests between admission and settlement."""
    record_spend: Callable[[str, str, int], Awaitable[None]] | None = None
    """Records the largest cost of a request of a tenant; None where no account is kept."""
    count: Callable[..., None] = lambda *_args, **_labels: None
    """Adds to a counter of ``names``."""
    sleep: SleepControl | None = None
    """Wakes sleeping models; None where none sleeps."""
    prefiller: Prefiller | None = None
    """Has prompts computed by other hosts; None where this host computes its own."""
    batch: str = ""
    """Batch of which the request is a line."""


_OF_USERS = GenerateRequest | EmbedRequest | ScoreRequest
"""Requests that have a priority and an end user."""


class Lifecycle:
    """Carries one request from its admission to its settlement, as a context manager."""

    def __init__(
        self,
        dependencies: SessionDependencies,
        principal: Principal,
        request: AnyRequest,
        trace: RequestTrace,
        shadow: ShadowRequest | NoShadow = NO_SHADOW,
    ) -> None:
        """The request is not kept: it holds the prompt's text."""
        self._shadow = shadow
        self.dependencies = dependencies
        self.model = dependencies.models[request.model]
        self.adapter = self.model.adapters.get(request.adapter, b"")
        """Digest of the adapter with which the model serves it, or nothing."""
        self.call = _call(request, dependencies.batch, self.adapter, self.model.runner)
        self._asked_priority = request.priority if isinstance(request, _OF_USERS) else None
        self._names, self._content = _names(request), content_of(request)
        self.passed_over = request.passed_over
        self._reservation: Reservation | None = None
        self._answered = False
        self._turns = Turns(dependencies.ledger, principal.tenant, trace, dependencies.count, self.call.end_user)
        self.principal = principal
        self.trace = trace
        self.until = self.enter_by = request.deadline or time.monotonic() + NO_DEADLINE_S
        """``until`` is the deadline, ``enter_by`` the time by which the next engine has to be entered, both in
        monotonic seconds."""
        self.outcome = Outcome(streamed=isinstance(request, GenerateRequest) and request.stream)
        self.pair = SandboxPair(self.model, self.model)
        """Sandboxes that work on the request; ``place`` chooses them."""
        self._withdrawn: ApplianceError | None = None
        self._waiting: asyncio.Task[object] | None = None
        """Task that waits in ``waiting``."""
        self._streams: Sequence[TokenStream] = ()
        self._abort: Callable[[Sequence[TokenStream]], None] = _nothing

    def __enter__(self) -> Self:
        self.dependencies.live.add(self)
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        if isinstance(error, NAMING) and error.param is not None:
            error.param = self._names.get(error.param, error.param)
        if self.call.alias and isinstance(error, UnavailableError):
            # The caller asked for the route; which models it leads to is told by answers alone.
            error.message = error.message.replace(f"the model {self.model.name} ", f"the model {self.call.alias} ")
        self._end(_reported(error))

    async def admit(self, max_tokens: int | None, choices: int = 1, *, feature: Feature | None = None) -> Reservation:
        """Take the policy's first decision, after a wait where it says so, and on allowance a concurrency slot for each
        choice.

        Raises:
            ApplianceError: the policy denies, or the wait ended without a place.
        """
        trace, ledger = self.trace, self.dependencies.ledger
        trace.begin(Phase.POLICY)
        tenant, alias = self.principal.tenant, self.call.alias
        access = first_access(tenant, self.model.name, max_tokens, choices, feature, alias, self.call.external)
        access = replace(access, batch=bool(self.call.batch), content=self._content, end_user=self.call.end_user)
        access = replace(access, adapter=self.call.adapter, asleep=self.model.sleep_state.asleep)
        if self.call.adapter:
            trace.annotate(adapter_name=self.call.adapter, adapter_digest=self.call.adapter_digest)

        def attempt(takes: bool, queued: int) -> Decision:
            found = ledger.try_admit(access, queued, takes=takes)
            if isinstance(found, Decision):
                return found
            self._reservation = found
            return found.decision

        with self._shadow.admission(access):
            await self._turns.take(Gate.ADMISSION, attempt, self.until, self.waiting)
        reservation = self._reservation
        assert reservation is not None, "an attempt that passes has admitted it"
        decision = reservation.decision
        trace.end(Phase.POLICY, policy_rule=decision.rule, policy_effect=decision.effect.value)
        trace.annotate(policy_rule=decision.rule, policy_digest=decision.policy_digest)
        trace.annotate(policy_namespace=reservation.obligations.namespace.value, runner=self.call.runner)
        return reservation

    async def reserve(
        self, reservation: Reservation, input_tokens: int, asked: int | None, room: int, *, longest: int | None = None
    ) -> None:
        """Take the policy's second decision, after a wait where it says so; see ``Reservation.reserve``.

        Raises:
            ApplianceError: the policy denies, or the wait ended without the tokens.
        """

        def attempt(takes: bool, queued: int) -> Decision:
            return reservation.try_reserve(input_tokens, asked, room, longest=longest, queued=queued, takes=takes)

        with _noting(self.trace, reservation), self._shadow.reserving(input_tokens, asked, room, longest):
            await self._turns.take(Gate.TOKENS, attempt, self.until, self.waiting)

    async def place(self, reservation: Reservation) -> None:
        """Choose the sandboxes that the tenant's class asks for, and wake those that sleep, once the policy has agreed.

        Raises:
            UnavailableError: there may be no more of the tenant's own, or the model will not be awake in time.
        """
        tenant, wanted = self.principal.tenant, reservation.obligations.isolation_class
        self.pair = self.dependencies.tenant_sandboxes.place(self.model, tenant, wanted)
        await awaken(self, self.until)

    @property
    def admitted(self) -> Admitted | None:
        """What the request was admitted with; None before that."""
        one = self._reservation
        return None if one is None else _admitted(self.principal, self.call, one, self.dependencies.ledger.region)

    @property
    def tokens(self) -> Tokens:
        """Tokens to charge up to now: input once an engine took the request up, output as it is delivered."""
        outcome = self.outcome
        charged = outcome.input_tokens if outcome.started or outcome.output_tokens else 0
        cached = outcome.cached_tokens if charged else 0
        return Tokens(self.principal.tenant, self.model.name, charged, cached, outcome.output_tokens)

    def withdraw(self, error: ApplianceError) -> None:
        """End the request with this error: what it waits for is given up, and its outputs are aborted at once, whether
        or not the caller reads."""
        if self._withdrawn is not None:
            return
        self._withdrawn = error
        if self._waiting is not None:
            self._waiting.cancel()
        for stream in self._streams:
            stream.withdrawn = error
            stream.wake.set()
        if self._streams:
            self._abort(self._streams)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Let ``withdraw`` end what the block waits for; blocks may be nested.

        Raises:
            ApplianceError: the request was withdrawn.
        """
        if self._withdrawn is not None:
            raise self._withdrawn
        task, outer = asyncio.current_task(), self._waiting
        assert task is not None, "requests run in tasks"
        self._waiting, before = task, task.cancelling()
        try:
            yield
        except asyncio.CancelledError:
            # As asyncio.timeout does: only the cancellation of ours is taken back.
            if self._withdrawn is not None and task.uncancel() <= before:
                raise self._withdrawn from None
            raise
        finally:
            self._waiting = outer

    @contextmanager
    def following(
        self, streams: Sequence[TokenStream], abort: Callable[[Sequence[TokenStream]], None]
    ) -> Iterator[None]:
        """Let ``withdraw`` end these streams, for the time of the block."""
        self._streams, self._abort = streams, abort
        try:
            yield
        finally:
            self._streams = ()

    def text_client(self) -> TextClient:
        """Make a client of the request's text sandbox."""
        return TextClient(self.pair.text, self.dependencies.next_id, self.principal.tenant)

    @contextmanager
    def encoding(self, reservation: Reservation, asked: int | None) -> Iterator[TextClient]:
        """Trace the text phase; the block adds the token ids that it gets to ``outcome.input_tokens``. ``asked`` are
        the output tokens asked for.

        Raises:
            ApplianceError: the prompt is beyond what policy or model allow; the policy's own denial comes first.
        """
        self.trace.begin(Phase.TEXT)
        client = TextClient(
            self.pair.text, self.dependencies.next_id, self.principal.tenant, reservation.most_counted()
        )
        try:
            with self.waiting():
                yield client
        except ContextLengthError:
            reservation.refuse_uncounted(client.most_counted + 1, asked)
            raise
        finally:
            self.outcome.text_tokens = client.text_tokens
        self.trace.end(Phase.TEXT, input_tokens=self.outcome.input_tokens)

    async def secure(self, reservation: Reservation) -> None:
        """Have the reserved cost recorded, where spend is limited, and keep the charge: both must survive this process.

        Raises:
            ApplianceError: it was not recorded in time, or the request was withdrawn.
        """
        record = self.dependencies.record_spend
        if reservation.reserved_cost and record is not None:
            with self.waiting():
                await record(self.call.request_id, self.principal.tenant, reservation.reserved_cost)
        begin, most = self.dependencies.audited_calls.begin, reservation.reserved_cost or None
        self.outcome.keep(begin(self.principal, self.call, reservation.decision, most, self._turns.queued_ms))

    async def limits(self, largest_id: int, param: str) -> wire.EngineReady:
        """Return what the engine can do, once its vocabulary is known to have the request's largest token id.

        Raises:
            ApplianceError: it has not, or the engine was not there in time.
        """
        with self.waiting():
            ready = await self.pair.engine.limits_by(self.until)
        self.trace.annotate(weights_form=wire.weight_word(ready.weights) or "unknown")
        _check_vocabulary(ready, largest_id, param)
        return ready

    def attempts(self, mark: bytes) -> Iterator[AbstractAsyncContextManager[EngineVisit]]:
        """Yield visits to one engine after the other until one ends well. An engine's death ends its visit without an
        error, unless some of the answer was shown; ``mark`` is the request's fingerprint.

        Raises:
            ApplianceError: the request may not be run again.
        """
        suspects = self.dependencies.suspects[self.model.name]
        for number in range(MAX_ATTEMPTS):
            standing = suspects.standing(mark, time.monotonic())
            if standing is Standing.QUARANTINED:
                raise QuarantinedError("the engine ended twice while serving this request; it will not be run again")
            if number:
                self.trace.annotate(replays=number)
            yield self._attempt(standing)
            if self._answered:
                suspects.cleared(mark)
                return
        raise UnavailableError("the engine ended again and again", retry_after_s=RETRY_AFTER_S)

    @asynccontextmanager
    async def _attempt(self, standing: Standing) -> AsyncIterator[EngineVisit]:
        suspect, alone_only = standing is not Standing.CLEAN, standing is Standing.ALONE_ONLY
        try:
            async with AsyncExitStack() as stack:
                await awaken(self, self.enter_by)
                with self.waiting():
                    entering = self.pair.engine.enter_engine(self.enter_by, suspect=suspect, alone_only=alone_only)
                    visit = await stack.enter_async_context(entering)
                self.trace.begin(Phase.QUEUE)
                yield visit
            self._answered = True
        except EngineGoneError as error:
            if (told := error.told(shown=self.outcome.emitted)) is not None:
                raise told from error
            self.enter_by = min(self.enter_by, time.monotonic() + REPLAY_S)

    def priority(self, granted: Priority) -> wire.Priority:
        """Return the less urgent of what the policy grants and what the request asks for."""
        return max(PRIORITIES[granted], self._asked_priority or wire.Priority.HIGH)

    def left_us(self) -> int:
        """Return the microseconds until the deadline, as the engine takes them."""
        return left_us(self.until)

    def _end(self, error: ApplianceError | None) -> None:
        """Settle with everybody who was told of the request."""
        self.dependencies.live.discard(self)
        parts, outcome = self.dependencies, self.outcome
        self.pair.leave()
        tokens = self.tokens
        refused = outcome.text_tokens if not tokens.input and isinstance(error, CALLERS_FAULT) else 0
        self.trace.annotate(**told(refused_tokens=refused))
        parts.tenant_counts.add(tokens, error)
        note_restored(outcome, self.trace, partial(parts.count, names.RESTORED_TOKENS, model=self.model.name))
        reservation = self._reservation
        if reservation is None:
            parts.audited_calls.denied(self.principal, self.call, _digest(parts.ledger, error), error)
        else:
            note_use(self, served=error is None or bool(tokens.input or tokens.output))
            price = reservation.cost(tokens.input, tokens.cached, tokens.output)
            charge = charge_of(tokens, price, outcome.reasoning_tokens, reserved=reservation.reserved_cost > 0)
            ended = charge, error, self._turns.queued_ms, outcome.kept
            parts.audited_calls.served(self.principal, self.call, reservation.decision, *ended)
            if downgraded := reservation.obligations.downgraded:
                parts.count(names.DOWNGRADED_REQUESTS, rule=downgraded)
            reservation.settle(tokens.input, tokens.output, refused, tokens.cached)
            self.trace.annotate(**told(policy_downgraded=downgraded, usage_cost=price, model_digest=self.model.digest))
        if differs := self._shadow.end(tokens.input, tokens.output, tokens.cached):
            self.trace.annotate(policy_shadow=differs)
        self.trace.finish(
            error=error,
            input_tokens=tokens.input,
            cached_tokens=tokens.cached,
            output_tokens=tokens.output,
            reasoning_tokens=outcome.reasoning_tokens,
            finish_reason=outcome.finish.value if outcome.finish else None,
        )


@contextmanager
def _noting(trace: RequestTrace, reservation: Reservation) -> Iterator[None]:
    """Note rule and policy of the decision that the block takes, where a reload came between the two decisions."""
    before = reservation.decision.policy_digest
    yield
    if (decision := reservation.decision).policy_digest != before:
        trace.annotate(policy_rule=decision.rule, policy_digest=decision.policy_digest)


def _digest(ledger: Ledger, error: ApplianceError | None) -> str:
    """Return the digest of the policy that denied a request, else of that in force."""
    return (error.policy or error.cut_policy if error is not None else "") or ledger.policy.digest


def _call(request: AnyRequest, batch: str, digest: bytes, runner: str) -> Call:
    """Return what the entry of a request has of it; ``digest`` is its adapter's, ``runner`` its model's."""
    names = request.model, request.operation.value, request.alias
    end_user = request.end_user if isinstance(request, _OF_USERS) else ""
    return Call(request.request_id, *names, batch, request.adapter, digest.hex(), end_user, runner)


def _admitted(principal: Principal, call: Call, reservation: Reservation, region: str) -> Admitted:
    """Return what a request was admitted with."""
    keys = reservation.namespace, reservation.group
    obligations, batch, policy = reservation.obligations, bool(call.batch), reservation.decision.policy_digest
    return Admitted(
        principal, call.model, obligations, *keys, call.alias, batch, call.adapter, region, call.external, policy
    )


def _names(request: AnyRequest) -> dict[str, str]:
    """Return the caller's names of what an error of the policy or a sandbox may be about."""
    if isinstance(request, AttestRequest):
        return {}
    if isinstance(request, TokenizerRequest):
        return dict.fromkeys(("prompt", "max_tokens"), request.prompt.param)
    if isinstance(request, EmbedRequest | ScoreRequest):
        return dict.fromkeys(("prompt", "max_tokens"), request.param)
    names = dict(request.names)
    names |= {"prompt": request.prompt.param, "max_tokens": request.max_tokens_param, "choices": request.choices_param}
    if request.tools is not None:
        names["grammar"] = request.tools.answer_param or request.tools.param
    elif request.grammar is not None:
        names["grammar"] = request.grammar.param
    return names


def left_us(until: float) -> int:
    """Return the microseconds until a deadline in monotonic seconds, as the engine takes them."""
    return min(max(1, int((until - time.monotonic()) * 1e6)), wire.MAX_DEADLINE_US)


def _nothing(_streams: Sequence[TokenStream]) -> None:
    """Abort nothing."""


def _reported(error: BaseException | None) -> ApplianceError | None:
    """Return the error that trace, counts and audit log get for what ended a request."""
    if error is None or isinstance(error, ApplianceError):
        return error
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return CancelledError("the client left before the answer was complete")
    return InternalError("a defect of the appliance")


def _check_vocabulary(ready: wire.EngineReady, largest_id: int, param: str) -> None:
    """Raises:
    InvalidRequestError: the model's vocabulary has no such id.
    """
    if largest_id >= ready.vocab_size:
        raise InvalidRequestError(f"a token id is beyond the model's vocabulary of {ready.vocab_size}", param=param)
