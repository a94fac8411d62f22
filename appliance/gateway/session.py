"""One request from its first decision to its last token: the only place that knows the whole story.

policy -> text -> policy with exact counts -> engine -> text of tokens -> charge. Whatever happens, ``run`` ends with
compute stopped, the ledger settled and the trace closed.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

from appliance.errors import ContextLengthError, InvalidRequestError, QuarantinedError, UnavailableError
from appliance.gateway.assembler import Assembler
from appliance.gateway.decoding import RemoteAssembler
from appliance.gateway.encoder import TextRoom
from appliance.gateway.engine_link import EngineFullError, EngineLink, TokenStream
from appliance.gateway.ledger import Ledger, Reservation
from appliance.gateway.losses import EngineGoneError, raise_if_lost
from appliance.gateway.output import OutputText
from appliance.gateway.rooms import BOOT_WAIT_S, RETRY_AFTER_S, EngineVisit, ModelRooms
from appliance.gateway.suspects import Standing, Suspects, fingerprint
from appliance.request import Event, Finished, FinishReason, GenerateRequest, Principal, Started
from appliance.telemetry.api import Phase, RequestTrace
from isolation.ipc import messages as wire
from isolation.ipc.messages import EngineReady, Finish, Submit
from policy.decision import Decision
from policy.model import Priority, Retention

NO_DEADLINE_S = 3_600.0
"""Deadline of a request that names none: nothing may live for ever."""

REPLAY_S = 9.0
"""After an engine's death a replay must have entered the next one within this time: a client hears within ten
seconds. Once it runs, its own deadline holds again."""

MAX_ATTEMPTS = 3
"""Engines tried for one request: the first, the replay, and one more for a bystander of a second death."""


_PRIORITIES = {
    Priority.HIGH: wire.Priority.HIGH,
    Priority.NORMAL: wire.Priority.NORMAL,
    Priority.LOW: wire.Priority.LOW,
}
"""The policy's words as the wire has them: the most urgent has the lowest number."""


@dataclass(slots=True)
class Tools:
    """What a session uses of the gateway."""

    rooms: ModelRooms
    ledger: Ledger
    suspects: Suspects
    next_id: Callable[[], int]


@dataclass(slots=True)
class Outcome:
    """What the trace and the ledger are told at the end."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    finish: FinishReason | None = None


class Session:
    """Runs one request. ``outcome`` is valid at any time, so that ``finally`` can settle."""

    def __init__(
        self, tools: Tools, principal: Principal, request: GenerateRequest, trace: RequestTrace
    ) -> None:
        self._tools = tools
        self._principal = principal
        self._request = request
        self._trace = trace
        self._until = request.deadline or time.monotonic() + NO_DEADLINE_S
        self.started = False
        self._emitted = False
        self.outcome = Outcome()
        self.reservation: Reservation | None = None

    async def run(self) -> AsyncGenerator[Event]:
        """The request's events.

        Raises:
            ApplianceError: typed, at any point.
        """
        token_ids = await self._encode()
        ready = await self._limits()
        decision = self._admit(token_ids, ready)
        submit = self._submit(token_ids, decision)
        mark = fingerprint(self._principal.tenant, self._request.model, submit)
        enter_by = self._until
        for attempt in range(MAX_ATTEMPTS):
            standing = self._tools.suspects.standing(mark, time.monotonic())
            if standing is Standing.QUARANTINED:
                raise QuarantinedError(
                    "the engine ended twice while serving this request; it will not be run again"
                )
            if attempt:
                self._trace.annotate(replays=attempt)
            try:
                async with (
                    self._tools.rooms.enter_engine(
                        enter_by,
                        suspect=standing is not Standing.CLEAN,
                        alone_only=standing is Standing.ALONE_ONLY,
                    ) as visit,
                    aclosing(self._visit(visit, submit, mark)) as events,
                ):
                    async for event in events:
                        yield event
                self._tools.suspects.cleared(mark)
                return
            except EngineGoneError as error:
                if self._emitted:
                    raise UnavailableError(
                        "the engine ended while it answered; the same request may be sent again",
                        retry_after_s=RETRY_AFTER_S,
                    ) from error
                enter_by = min(enter_by, time.monotonic() + REPLAY_S)
        raise UnavailableError("the engine ended again and again", retry_after_s=RETRY_AFTER_S)

    async def _encode(self) -> array[int]:
        """First decision, concurrency slot, then exact token ids."""
        trace, request = self._trace, self._request
        trace.begin(Phase.POLICY)
        self.reservation = self._tools.ledger.admit(self._principal.tenant, request.model, request.max_tokens)
        decision = self.reservation.decision
        trace.end(Phase.POLICY, policy_rule=decision.rule, policy_effect=decision.effect.value)
        trace.annotate(policy_rule=decision.rule, policy_digest=decision.policy_digest)
        trace.begin(Phase.TEXT)
        room = TextRoom(self._tools.rooms, self._tools.next_id, self._principal.tenant)
        token_ids = await room.encode(request.prompt, self._until)
        self.outcome.input_tokens = len(token_ids)
        trace.end(Phase.TEXT, input_tokens=len(token_ids))
        return token_ids

    async def _limits(self) -> EngineReady:
        """What the engine can do; waits for the first boot."""
        rooms = self._tools.rooms
        if rooms.capacity is None:
            await rooms.wait_ready(min(self._until, time.monotonic() + BOOT_WAIT_S))
        if rooms.capacity is None:
            raise UnavailableError("the model is starting", retry_after_s=RETRY_AFTER_S)
        return rooms.capacity

    def _admit(self, token_ids: array[int], ready: EngineReady) -> Decision:
        """Second decision, with exact counts; reserves tokens."""
        if max(token_ids) >= ready.vocab_size:
            raise InvalidRequestError(
                f"a token id is beyond the model's vocabulary of {ready.vocab_size}", param="prompt"
            )
        room = ready.max_context - len(token_ids)
        asked = self._request.max_tokens
        if room < 1 or (asked is not None and asked > room):
            raise ContextLengthError(
                f"this model's context is {ready.max_context} tokens; the request has {len(token_ids)} in the "
                f"prompt" + (f" and asks for {asked} more" if asked is not None else ""),
                param="messages" if self._request.operation.value == "chat" else "prompt",
                details={"max_tokens": str(ready.max_context), "prompt_tokens": str(len(token_ids))},
            )
        assert self.reservation is not None
        return self.reservation.reserve(len(token_ids), asked, room)

    def _submit(self, token_ids: array[int], decision: Decision) -> Submit:
        request, obligations = self._request, decision.obligations
        assert self.reservation is not None
        assert obligations is not None
        return Submit(
            request=0,
            namespace=self.reservation.namespace,
            token_ids=token_ids,
            max_tokens=self.reservation.grant,
            sampling=request.sampling,
            stop_ids=request.stop_ids,
            ignore_eos=request.ignore_eos,
            retain=obligations.retention is not Retention.NONE,
            logprobs=request.logprobs,
            weight=obligations.weight,
            priority=max(_PRIORITIES[obligations.priority], request.priority or wire.Priority.HIGH),
        )

    async def _visit(self, visit: EngineVisit, submit: Submit, mark: bytes) -> AsyncGenerator[Event]:
        """One run in one engine."""
        self._trace.begin(Phase.QUEUE)
        began_ns = time.time_ns()
        try:
            stream = visit.engine.submit(
                replace(submit, request=self._tools.next_id(), deadline_us=self._left_us()), mark
            )
        except EngineFullError as error:
            raise UnavailableError("the engine's queue is full", retry_after_s=RETRY_AFTER_S) from error
        timer = asyncio.get_running_loop().call_later(
            max(0.0, self._until - time.monotonic()), _expire, stream
        )
        try:
            async with aclosing(self._follow(stream, visit, began_ns)) as events:
                async for event in events:
                    yield event
        finally:
            timer.cancel()
            visit.engine.abort(stream)
            self._charge_unread(stream)

    async def _follow(
        self, stream: TokenStream, visit: EngineVisit, began_ns: int
    ) -> AsyncGenerator[Event]:
        """The stream's tokens as events, until it ends."""
        text = self._output_text(visit.engine)
        first = True
        while True:
            if not stream.wake.is_set():
                await stream.wake.wait()
            token_ids, logprobs = stream.take()
            # As of this moment: while an event is written, the next frame may bring more tokens and the end.
            finish = stream.finish
            if (stream.started is not None or token_ids) and not self.started:
                yield self._note_start(stream, began_ns)
            if token_ids:
                if first:
                    first = False
                    self._first_token(visit, stream)
                delta, used = await text.push(token_ids, logprobs, hide_last=finish is Finish.STOP)
                self.outcome.output_tokens += used
                if text.stopped is None and finish is not Finish.NONE:
                    delta = replace(delta, text=delta.text + await text.finish())
                self._emitted = True
                yield delta
            if text.stopped is not None or finish is not Finish.NONE:
                yield self._finished(finish, text.stopped)
                return
            raise_if_lost(stream)

    def _left_us(self) -> int:
        """Microseconds until the deadline, as the engine takes them."""
        left = int((self._until - time.monotonic()) * 1e6)
        return min(max(1, left), wire.MAX_DEADLINE_US)

    def _output_text(self, engine: EngineLink) -> OutputText:
        text = self._tools.rooms.text
        room = TextRoom(self._tools.rooms, self._tools.next_id, self._principal.tenant)
        table = self._tools.rooms.table
        if table is None or (text is not None and not text.ready.exact_vocabulary):
            return OutputText(RemoteAssembler(room.decode, self._request.stop), table)
        return OutputText(Assembler(table, self._request.stop), table)

    def _note_start(self, stream: TokenStream, began_ns: int) -> Started:
        # An engine that gives tokens without a word about their start has cached nothing and queued nothing.
        told = stream.started or wire.Started(stream.request, 0, 0)
        self.started = True
        now_ns = time.time_ns()
        scheduled_ns = min(now_ns, began_ns + told.queue_us * 1_000)
        cached = min(told.cached_tokens, self.outcome.input_tokens)
        self.outcome.cached_tokens = cached
        self._trace.end(Phase.QUEUE, at_ns=scheduled_ns)
        self._trace.begin(Phase.PREFILL, at_ns=scheduled_ns)
        return Started(self.outcome.input_tokens, cached)

    def _first_token(self, visit: EngineVisit, stream: TokenStream) -> None:
        visit.passed()
        self._trace.end(Phase.PREFILL, cached_tokens=self.outcome.cached_tokens)
        self._trace.first_token()
        self._trace.begin(Phase.DECODE)

    def _charge_unread(self, stream: TokenStream) -> None:
        """What the engine computed for a caller who left, or did not read, is charged as well; what a dead engine
        computed, or what came behind a stop string, is not."""
        if self.outcome.finish is None and stream.engine_gone is None:
            self.outcome.output_tokens = max(self.outcome.output_tokens, stream.received)
            self.started = self.started or stream.started is not None

    def _finished(self, finish: Finish, stopped: str | None) -> Finished:
        length = stopped is None and finish is Finish.LENGTH
        self.outcome.finish = FinishReason.LENGTH if length else FinishReason.STOP
        self._trace.end(Phase.DECODE, output_tokens=self.outcome.output_tokens)
        return Finished(
            self.outcome.finish,
            self.outcome.input_tokens,
            self.outcome.cached_tokens,
            self.outcome.output_tokens,
            stopped,
        )


def _expire(stream: TokenStream) -> None:
    stream.expired = True
    stream.wake.set()
