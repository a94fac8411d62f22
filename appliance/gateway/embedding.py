"""One request for embeddings: some texts, each pooled into a vector by the engine, under one decision and one charge.

The way is that of a generation (``gateway.session``): policy, exact ids, policy with counts, engine; but there is
nothing to stream, so the vectors are collected. All texts together hold one place in the tenant's concurrency and are
charged as one prompt; a bounded number of them is in the engine at a time, where they take turns with everybody's.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from dataclasses import replace
from math import fsum, sqrt

from appliance.errors import (
    ContextLengthError,
    DeadlineExceededError,
    InvalidRequestError,
    QuarantinedError,
    UnavailableError,
)
from appliance.gateway.answer import Outcome
from appliance.gateway.encoder import TextRoom
from appliance.gateway.engine_link import EngineFullError
from appliance.gateway.house import Place
from appliance.gateway.ledger import Reservation
from appliance.gateway.losses import EngineGoneError, raise_if_lost
from appliance.gateway.rooms import RETRY_AFTER_S, EngineVisit
from appliance.gateway.session import MAX_ATTEMPTS, NO_DEADLINE_S, PRIORITIES, REPLAY_S, Tools
from appliance.gateway.stream import TokenStream
from appliance.gateway.suspects import Standing, fingerprint
from appliance.request import Embeddings, EmbedRequest, Principal
from appliance.telemetry.api import Phase, RequestTrace
from isolation.ipc import messages as wire
from isolation.ipc.messages import Embed, EngineReady, Finish, Sampling, Submit
from policy.model import Determinism

MAX_TOKENS = 300_000
"""Tokens of all texts of one request, OpenAI's limit."""

MAX_NUMBERS = 1 << 22
"""Numbers of one answer: 16 MiB as they are, five times as much in JSON."""

WINDOW = 32
"""Texts of one request that are in the engine at once: enough to fill its batches, few beside its queue."""


class EmbeddingSession:
    """Runs one request. ``outcome`` is valid at any time, so that ``finally`` can settle."""

    def __init__(self, tools: Tools, principal: Principal, request: EmbedRequest, trace: RequestTrace) -> None:
        self._tools = tools
        self._principal = principal
        self._request = request
        self._trace = trace
        self._until = request.deadline or time.monotonic() + NO_DEADLINE_S
        self._vectors: list[array[float] | None] = [None] * len(request.inputs)
        self.outcome = Outcome()
        self.reservation: Reservation | None = None
        self.place = Place(tools.rooms, tools.rooms)
        """Where it is worked on; left when the request is over."""

    async def run(self) -> Embeddings:
        """The vectors.

        Raises:
            ApplianceError: typed, at any point.
        """
        if self._request.dimensions is not None and not self._tools.rooms.truncates:
            raise InvalidRequestError("this model's vectors have one length; leave dimensions out", param="dimensions")
        texts = await self._encode()
        self._admit(texts, await self.place.engine.limits_by(self._until))
        try:
            async with asyncio.timeout(self._until - time.monotonic()):
                await self._through_engines(texts)
        except TimeoutError:
            raise DeadlineExceededError("the request's deadline passed before its answer was complete") from None
        vectors = [self._cut(vector) for vector in self._vectors if vector is not None]
        assert len(vectors) == len(texts), "a visit ends well when it has all vectors"
        return Embeddings(tuple(vectors), self.outcome.input_tokens)

    async def _encode(self) -> list[array[int]]:
        """First decision, concurrency slot, then exact token ids."""
        trace, request, tools = self._trace, self._request, self._tools
        trace.begin(Phase.POLICY)
        self.reservation = tools.ledger.admit(self._principal.tenant, request.model, 0)
        decision = self.reservation.decision
        trace.end(Phase.POLICY, policy_rule=decision.rule, policy_effect=decision.effect.value)
        trace.annotate(policy_rule=decision.rule, policy_digest=decision.policy_digest)
        assert decision.obligations is not None
        if decision.obligations.deterministic is Determinism.ALWAYS:
            raise InvalidRequestError(
                "this tenant's answers are to be the same bits in any batch, and vectors are not computed so; ask the "
                "operator for a tenant of another class",
                param="model",
            )
        self.place = tools.house.place(tools.rooms, self._principal.tenant, decision.obligations.isolation_class)
        trace.begin(Phase.TEXT)
        room = TextRoom(self.place.text, tools.next_id, self._principal.tenant)
        texts: list[array[int]] = []
        for text in request.inputs:
            texts.append(await room.encode(text, self._until))
            self.outcome.input_tokens += len(texts[-1])
            if self.outcome.input_tokens > MAX_TOKENS:
                raise InvalidRequestError(
                    f"the texts have more than {MAX_TOKENS} tokens together; send them in several requests",
                    param="input",
                )
        # The text may be megabytes, and is not needed any more.
        self._request = replace(request, inputs=())
        trace.end(Phase.TEXT, input_tokens=self.outcome.input_tokens)
        return texts

    def _admit(self, texts: list[array[int]], ready: EngineReady) -> None:
        """Second decision, with exact counts; reserves tokens."""
        if max(map(max, texts)) >= ready.vocab_size:
            raise InvalidRequestError(
                f"a token id is beyond the model's vocabulary of {ready.vocab_size}", param="input"
            )
        longest, most = max(map(len, texts)), ready.max_context - 1
        if longest > most:
            raise ContextLengthError(
                f"this model takes texts of {most} tokens; one has {longest}",
                param="input",
                details={"max_tokens": str(most), "prompt_tokens": str(longest)},
            )
        assert self.reservation is not None
        self.reservation.reserve(self.outcome.input_tokens, 0, 0, longest=longest)

    async def _through_engines(self, texts: list[array[int]]) -> None:
        """One engine after the other, should one die, until all vectors are there."""
        suspects, mark = self._tools.suspects, self._mark(texts)
        enter_by = self._until
        for attempt in range(MAX_ATTEMPTS):
            standing = suspects.standing(mark, time.monotonic())
            if standing is Standing.QUARANTINED:
                raise QuarantinedError("the engine ended twice while serving this request; it will not be run again")
            if attempt:
                self._trace.annotate(replays=attempt)
            try:
                async with self.place.engine.enter_engine(
                    enter_by, suspect=standing is not Standing.CLEAN, alone_only=standing is Standing.ALONE_ONLY
                ) as visit:
                    await self._visit(visit, texts, mark)
            except EngineGoneError:
                enter_by = min(enter_by, time.monotonic() + REPLAY_S)
            else:
                suspects.cleared(mark)
                return
        raise UnavailableError("the engine ended again and again", retry_after_s=RETRY_AFTER_S)

    async def _visit(self, visit: EngineVisit, texts: list[array[int]], mark: bytes) -> None:
        """All texts without a vector through one engine, some at a time."""
        self._trace.begin(Phase.QUEUE)
        self._begun = False
        todo = [place for place, vector in enumerate(self._vectors) if vector is None]
        inside: dict[int, TokenStream] = {}
        wake = asyncio.Event()
        try:
            while todo or inside:
                while todo and len(inside) < WINDOW:
                    try:
                        stream = visit.engine.embed(self._message(texts[todo[0]]), mark)
                    except EngineFullError as error:
                        if inside:
                            break
                        raise UnavailableError("the engine's queue is full", retry_after_s=RETRY_AFTER_S) from error
                    stream.wake = wake
                    inside[todo.pop(0)] = stream
                    raise_if_lost(stream)
                await wake.wait()
                wake.clear()
                self._harvest(visit, inside)
        finally:
            for stream in inside.values():
                visit.engine.abort(stream)
        self._trace.end(Phase.PREFILL)

    def _harvest(self, visit: EngineVisit, inside: dict[int, TokenStream]) -> None:
        """Take the vectors that have come."""
        for place, stream in list(inside.items()):
            raise_if_lost(stream)
            if stream.started is not None and not self._begun:
                self.outcome.started = self._begun = True
                self._trace.end(Phase.QUEUE)
                self._trace.begin(Phase.PREFILL)
            if stream.finish is not Finish.NONE:
                assert stream.vector is not None, "the link ends no stream without its vector"
                self.outcome.started = True
                self._check_size(stream.vector)
                self._vectors[place] = stream.vector
                visit.passed()
                del inside[place]

    def _check_size(self, vector: array[float]) -> None:
        if len(vector) * len(self._vectors) > MAX_NUMBERS:
            raise InvalidRequestError(
                f"{len(self._vectors)} vectors of {len(vector)} numbers are too many for one answer; "
                f"at most {MAX_NUMBERS // len(vector)} texts are taken at a time",
                param="input",
            )

    def _message(self, text: array[int]) -> Embed:
        assert self.reservation is not None
        obligations = self.reservation.decision.obligations
        assert obligations is not None
        left = int((self._until - time.monotonic()) * 1e6)
        return Embed(
            request=self._tools.next_id(),
            namespace=self.reservation.namespace,
            token_ids=text,
            weight=obligations.weight,
            priority=max(PRIORITIES[obligations.priority], self._request.priority or wire.Priority.HIGH),
            deadline_us=min(max(1, left), wire.MAX_DEADLINE_US),
        )

    def _mark(self, texts: list[array[int]]) -> bytes:
        """What the request is known by, should it kill an engine; texts are framed by their lengths."""
        framed = array("I")
        for text in texts:
            framed.append(len(text))
            framed.extend(text)
        asked = Submit(0, bytes(wire.NAMESPACE_KEY_BYTES), framed, 1, Sampling(temperature=0.0))
        return fingerprint(self._principal.tenant, self._request.model, asked)

    def _cut(self, vector: array[float]) -> array[float]:
        """The first numbers of a vector, as many as were asked for, brought to unit length."""
        wanted = self._request.dimensions
        if wanted is None:
            return vector
        if wanted > len(vector):
            raise InvalidRequestError(f"this model's vectors have {len(vector)} numbers", param="dimensions")
        first = vector[:wanted]
        length = sqrt(fsum(value * value for value in first))
        return array("f", (value / length for value in first)) if length else first
