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
from dataclasses import dataclass, field, replace

from appliance.errors import (
    ContextLengthError,
    InvalidRequestError,
    PermissionDeniedError,
    QuarantinedError,
    UnavailableError,
)
from appliance.gateway.answer import Answer, Course, Outcome
from appliance.gateway.assembler import Assembler
from appliance.gateway.choices import Choices
from appliance.gateway.decoding import RemoteAssembler
from appliance.gateway.encoder import TextRoom
from appliance.gateway.engine_link import EngineFullError, EngineLink
from appliance.gateway.grammars import GrammarRun
from appliance.gateway.house import House, Place
from appliance.gateway.ledger import Ledger, Reservation
from appliance.gateway.losses import EngineGoneError
from appliance.gateway.output import LocalText, RemoteText
from appliance.gateway.prompt_report import MAX_NUMBERS, PromptReport
from appliance.gateway.publications import Publications
from appliance.gateway.rooms import RETRY_AFTER_S, EngineVisit, ModelRooms
from appliance.gateway.stream import TokenStream
from appliance.gateway.suspects import Standing, Suspects, fingerprint
from appliance.request import Event, GenerateRequest, Principal, Sink, TokenPrompt
from appliance.telemetry.api import Phase, RequestTrace
from isolation.ipc import messages as wire
from isolation.ipc.messages import EngineReady, Submit
from policy.decision import Decision, Obligations
from policy.model import Determinism, Priority, Retention

NO_DEADLINE_S = 3_600.0
"""Deadline of a request that names none: nothing may live for ever."""

REPLAY_S = 9.0
"""After an engine's death a replay must have entered the next one within this time: a client hears within ten
seconds. Once it runs, its own deadline holds again."""

MAX_ATTEMPTS = 3
"""Engines tried for one request: the first, the replay, and one more for a bystander of a second death."""


PRIORITIES = {
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
    house: House = field(default_factory=House)
    publications: Publications = field(default_factory=Publications)


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
        self.outcome = Outcome()
        self.reservation: Reservation | None = None
        self.place = Place(tools.rooms, tools.rooms)
        """Where it is worked on; left when the request is over."""

    async def run(self, sink: Sink | None = None) -> AsyncGenerator[Event]:
        """The request's events; deltas go into the sink instead, where there is one and the text can be decoded here.

        Raises:
            ApplianceError: typed, at any point.
        """
        token_ids = await self._encode()
        ready = await self.place.engine.limits_by(self._until)
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
            grammar = await self._follow(enter_by)
            try:
                async with (
                    self.place.engine.enter_engine(
                        enter_by,
                        suspect=standing is not Standing.CLEAN,
                        alone_only=standing is Standing.ALONE_ONLY,
                    ) as visit,
                    aclosing(self._visit(visit, submit, mark, sink, grammar)) as events,
                ):
                    async for event in events:
                        yield event
                self._tools.suspects.cleared(mark)
                return
            except EngineGoneError as error:
                if self.outcome.emitted:
                    raise UnavailableError(
                        "the engine ended while it answered; the same request may be sent again",
                        retry_after_s=RETRY_AFTER_S,
                    ) from error
                enter_by = min(enter_by, time.monotonic() + REPLAY_S)
            finally:
                if grammar is not None:
                    grammar.close()
        raise UnavailableError("the engine ended again and again", retry_after_s=RETRY_AFTER_S)

    async def _encode(self) -> array[int]:
        """First decision, concurrency slot, then exact token ids."""
        trace, request = self._trace, self._request
        trace.begin(Phase.POLICY)
        self.reservation = self._tools.ledger.admit(
            self._principal.tenant,
            request.model,
            request.max_tokens,
            request.choices,
            structured=request.grammar is not None,
        )
        decision = self.reservation.decision
        trace.end(Phase.POLICY, policy_rule=decision.rule, policy_effect=decision.effect.value)
        trace.annotate(policy_rule=decision.rule, policy_digest=decision.policy_digest)
        assert decision.obligations is not None
        # Not before the policy has agreed: nobody boots sandboxes by asking for what it may not have.
        self.place = self._tools.house.place(
            self._tools.rooms, self._principal.tenant, decision.obligations.isolation_class
        )
        trace.begin(Phase.TEXT)
        room = TextRoom(self.place.text, self._tools.next_id, self._principal.tenant)
        token_ids = await room.encode(request.prompt, self._until)
        # From here on, and for a replay, the ids are enough; the text may be megabytes.
        self._request = replace(request, prompt=TokenPrompt(token_ids))
        self.outcome.input_tokens = len(token_ids)
        trace.end(Phase.TEXT, input_tokens=len(token_ids))
        return token_ids

    def _admit(self, token_ids: array[int], ready: EngineReady) -> Decision:
        """Second decision, with exact counts; reserves tokens."""
        if max(token_ids) >= ready.vocab_size:
            raise InvalidRequestError(
                f"a token id is beyond the model's vocabulary of {ready.vocab_size}", param="prompt"
            )
        numbers = len(token_ids) * (1 + self._request.prompt_logprobs)
        if numbers > MAX_NUMBERS:
            raise InvalidRequestError(
                f"the log-probabilities of this prompt are {numbers} numbers; at most {MAX_NUMBERS} are given. Ask for "
                "fewer alternatives, or send a shorter prompt",
                param="prompt_logprobs",
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
            group=self.reservation.group,
            token_ids=token_ids,
            max_tokens=self.reservation.grant,
            sampling=request.sampling,
            stop_ids=request.stop_ids,
            ignore_eos=request.ignore_eos,
            retain=obligations.retention is not Retention.NONE,
            logprobs=request.logprobs,
            weight=obligations.weight,
            prompt_logprobs=request.prompt_logprobs,
            choices=request.choices,
            deterministic=self._deterministic(obligations),
            priority=max(PRIORITIES[obligations.priority], request.priority or wire.Priority.HIGH),
            structured=request.grammar is not None,
        )

    async def _follow(self, until: float) -> GrammarRun | None:
        """Have the request's grammar compiled, where it has one."""
        grammar = self._request.grammar
        if grammar is None:
            return None
        assert self.reservation is not None
        room = TextRoom(self.place.text, self._tools.next_id, self._principal.tenant)
        obligations = self.reservation.decision.obligations
        keep = obligations is not None and obligations.retention is not Retention.NONE
        return await room.follow(grammar, self.reservation.namespace, until, keep=keep)

    def _deterministic(self, obligations: Obligations) -> bool:
        """Whether the request runs in the deterministic class. Fails closed: nobody gets less than was promised."""
        granted, asked = obligations.deterministic, self._request.deterministic
        if granted is Determinism.NEVER and asked:
            raise PermissionDeniedError("this tenant may not ask for deterministic answers", param="deterministic")
        wanted = asked or granted is Determinism.ALWAYS
        ready = self.place.engine.capacity
        if wanted and ready is not None and not ready.deterministic:
            mend = "leave deterministic out, or ask for another model" if asked else "ask for another model"
            raise InvalidRequestError(
                f"this model cannot be computed deterministically on this machine; {mend}",
                param="deterministic" if asked else "model",
            )
        return wanted

    async def _visit(
        self, visit: EngineVisit, submit: Submit, mark: bytes, sink: Sink | None, grammar: GrammarRun | None
    ) -> AsyncGenerator[Event]:
        """One run in one engine."""
        self._trace.begin(Phase.QUEUE)
        # Nobody else draws an id in between: those of the choices follow each other. A grammar's run has drawn its own.
        ids = [grammar.request] if grammar is not None else [self._tools.next_id() for _ in range(submit.choices)]
        try:
            streams = visit.engine.submit_all(
                replace(submit, request=ids[0], deadline_us=self._left_us(), public=self._public(visit.engine, submit)),
                mark,
                every_step=self._fixed_cadence(),
                grammar=grammar,
            )
        except EngineFullError as error:
            raise UnavailableError("the engine's queue is full", retry_after_s=RETRY_AFTER_S) from error
        timer = asyncio.get_running_loop().call_later(
            max(0.0, self._until - time.monotonic()), _expire, streams
        )
        answer: Answer | Choices
        course = Course(visit, self.outcome, self._trace)
        prompt = self._prompt_report(submit.token_ids, streams[0])
        if len(streams) == 1:
            answer = Answer(streams[0], self._output_text(), self.outcome, course, prompt)
            run = answer.events(sink)
        else:
            texts = [self._output_text() for _ in streams]
            answer = Choices(streams, texts, course, self.outcome, visit.engine.abort, prompt)
            run = answer.events()
        try:
            async with aclosing(run) as events:
                async for event in events:
                    yield event
        finally:
            timer.cancel()
            visit.engine.abort_all(streams)
            answer.charge_unread()

    def _public(self, engine: EngineLink, submit: Submit) -> bytes:
        """The key of the public prefix that the request shall begin with in this engine; empty for none."""
        assert self.reservation is not None
        obligations = self.reservation.decision.obligations
        # Whoever wants the prompt scored has it computed from its start, and its choices follow that.
        scored = submit.prompt_logprobs >= 0
        names = obligations.public_prefixes if obligations is not None and not scored else ()
        return self._tools.publications.choose(names, submit.token_ids, engine) if names else b""

    def _fixed_cadence(self) -> bool:
        """Whether the tenant's class wants each step's token at that step, whatever the others do."""
        assert self.reservation is not None
        obligations = self.reservation.decision.obligations
        return obligations is not None and obligations.isolation_class.pads

    def _left_us(self) -> int:
        """Microseconds until the deadline, as the engine takes them."""
        left = int((self._until - time.monotonic()) * 1e6)
        return min(max(1, left), wire.MAX_DEADLINE_US)

    def _prompt_report(self, token_ids: array[int], stream: TokenStream) -> PromptReport | None:
        request = self._request
        if not request.echo and stream.scores is None:
            return None
        text = self._output_text(stops=()) if request.echo else None
        return PromptReport(token_ids, stream.scores, self.place.text.table, text)

    def _output_text(self, stops: tuple[str, ...] | None = None) -> LocalText | RemoteText:
        rooms = self.place.text
        table, stops = rooms.table, self._request.stop if stops is None else stops
        if table is None or (rooms.text is not None and not rooms.text.ready.exact_vocabulary):
            room = TextRoom(rooms, self._tools.next_id, self._principal.tenant)
            return RemoteText(RemoteAssembler(room.decode, stops), table)
        return LocalText(Assembler(table, stops), table)


def _expire(streams: list[TokenStream]) -> None:
    for stream in streams:
        stream.expired = True
        stream.wake.set()
