"""Requests for embeddings: some texts, each pooled into a vector by the engine, under one decision and one charge.

There is nothing to stream, so the vectors are collected. All texts together take one concurrency slot and are charged
as one prompt; a bounded number of them is in the engine at a time, where they take turns with other requests.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from math import fsum, sqrt

from appliance.common.errors import (
    ContextLengthError,
    DeadlineExceededError,
    DeterministicUnavailableError,
    InvalidRequestError,
    UnavailableError,
)
from appliance.gateway.generate_request import Embeddings, EmbedRequest
from appliance.gateway.request.ledger import Reservation
from appliance.gateway.request.lifecycle import Lifecycle
from appliance.gateway.request.suspects import fingerprint
from appliance.gateway.sandboxes.engine_link import EngineFullError
from appliance.gateway.sandboxes.link import RETRY_AFTER_S
from appliance.gateway.sandboxes.model_sandboxes import EngineVisit
from appliance.gateway.sandboxes.stream import TokenStream
from appliance.gateway.sandboxes.text_client import TextClient
from appliance.gateway.telemetry.request_trace import Phase
from isolation.ipc import messages as wire
from isolation.ipc.embed import Embed
from isolation.ipc.engine import Submit
from isolation.ipc.messages import EngineReady, Finish
from isolation.ipc.sampling import Sampling
from policy.feature import Feature
from policy.model import Determinism

MAX_TOKENS = 300_000
"""Tokens of all texts of one request, OpenAI's limit."""

MAX_NUMBERS = 1 << 22
"""Numbers of one answer: 16 MiB as they are, five times as much in JSON."""

WINDOW = 32
"""Texts of one request that are in the engine at once: enough to fill its batches, few beside its queue."""


class VectorSession(ABC):
    """Collects one vector of the engine for each of some texts."""

    def __init__(self, life: Lifecycle, param: str) -> None:
        """``param`` is the caller's name of the texts."""
        self.life = life
        self._param = param
        self._vectors: list[array[float] | None] = []
        self._begun = False

    @abstractmethod
    def texts(self, client: TextClient) -> AsyncGenerator[array[int]]:
        """Give the token ids of each text that gets a vector."""

    async def collect(self, *, feature: Feature) -> list[array[float]]:
        """Return the vectors, in the order of the texts; ``feature`` is what the tenant needs for it.

        Raises:
            ApplianceError: typed, at any point.
        """
        life = self.life
        reservation = await life.admit(0, feature=feature)
        if reservation.obligations.deterministic is Determinism.ALWAYS:
            raise DeterministicUnavailableError(
                "this tenant's answers are to be the same bits in any batch, and vectors are not computed so; ask the "
                "operator for a tenant of another class",
                param="model",
            )
        await life.place(reservation)
        texts = await self._encode(reservation)
        self._vectors = [None] * len(texts)
        await self._reserve(reservation, texts, await life.limits(max(map(max, texts)), self._param))
        await life.secure(reservation)
        mark = self._mark(texts)
        try:
            with life.waiting():
                async with asyncio.timeout(life.until - time.monotonic()):
                    for attempt in life.attempts(mark):
                        async with attempt as visit:
                            await self._visit(visit, reservation, texts, mark)
        except TimeoutError:
            raise DeadlineExceededError("the request's deadline passed before its answer was complete") from None
        vectors = [vector for vector in self._vectors if vector is not None]
        assert len(vectors) == len(texts), "a visit ends well when it has all vectors"
        return vectors

    async def _encode(self, reservation: Reservation) -> list[array[int]]:
        """Get the token ids of all texts."""
        outcome, texts = self.life.outcome, []
        with self.life.encoding(reservation, 0) as client:
            async with aclosing(self.texts(client)) as found:
                async for ids in found:
                    texts.append(ids)
                    outcome.input_tokens += len(ids)
                    if outcome.input_tokens > MAX_TOKENS:
                        raise InvalidRequestError(
                            f"the texts have more than {MAX_TOKENS} tokens together; send them in several requests",
                            param=self._param,
                        )
        return texts

    async def _reserve(self, reservation: Reservation, texts: list[array[int]], ready: EngineReady) -> None:
        """Take the second decision, with exact counts, which reserves tokens."""
        longest, most = max(map(len, texts)), ready.max_context - 1
        if longest > most:
            raise ContextLengthError(
                f"this model takes texts of at most {most} tokens; one has {longest}",
                param=self._param,
                details={"max_input_tokens": str(most), "input_tokens": str(longest)},
            )
        await self.life.reserve(reservation, self.life.outcome.input_tokens, 0, 0, longest=longest)

    async def _visit(self, visit: EngineVisit, reservation: Reservation, texts: list[array[int]], mark: bytes) -> None:
        """Send all texts without a vector through one engine, some at a time."""
        self._begun = False
        todo = [index for index, vector in enumerate(self._vectors) if vector is None]
        inside: dict[int, TokenStream] = {}
        wake = asyncio.Event()
        try:
            while todo or inside:
                while todo and len(inside) < WINDOW:
                    try:
                        stream = visit.engine.embed(self._message(reservation, texts[todo[0]]), mark)
                    except EngineFullError as error:
                        if inside:
                            break
                        raise UnavailableError("the engine's queue is full", retry_after_s=RETRY_AFTER_S) from error
                    stream.wake = wake
                    inside[todo.pop(0)] = stream
                    stream.raise_if_lost()
                await wake.wait()
                wake.clear()
                self._harvest(visit, inside)
        finally:
            for stream in inside.values():
                visit.engine.abort(stream)
        self.life.trace.end(Phase.PREFILL)

    def _harvest(self, visit: EngineVisit, inside: dict[int, TokenStream]) -> None:
        """Take the vectors that have come."""
        outcome, trace = self.life.outcome, self.life.trace
        for index, stream in list(inside.items()):
            stream.raise_if_lost()
            if stream.started is not None and not self._begun:
                outcome.started = self._begun = True
                trace.end(Phase.QUEUE)
                trace.begin(Phase.PREFILL)
            if stream.finish is not Finish.NONE:
                assert stream.vector is not None, "the link ends no stream without its vector"
                outcome.started = True
                self._check_size(stream.vector)
                self._vectors[index] = stream.vector
                visit.passed()
                del inside[index]

    def _check_size(self, vector: array[float]) -> None:
        if len(vector) * len(self._vectors) > MAX_NUMBERS:
            raise InvalidRequestError(
                f"{len(self._vectors)} vectors of {len(vector)} numbers are too many for one answer; "
                f"at most {MAX_NUMBERS // len(vector)} texts are taken at a time",
                param=self._param,
            )

    def _message(self, reservation: Reservation, text: array[int]) -> Embed:
        life, obligations = self.life, reservation.obligations
        return Embed(
            request=life.dependencies.next_id(),
            namespace=reservation.namespace,
            token_ids=text,
            weight=obligations.weight,
            priority=life.priority(obligations.priority),
            deadline_us=life.left_us(),
        )

    def _mark(self, texts: list[array[int]]) -> bytes:
        """Return the request's fingerprint; texts are framed by their lengths."""
        framed = array("I")
        for text in texts:
            framed.append(len(text))
            framed.extend(text)
        asked = Submit(0, bytes(wire.NAMESPACE_KEY_BYTES), framed, 1, Sampling(temperature=0.0))
        return fingerprint(self.life.principal.tenant, self.life.model.name, asked)


class EmbeddingSession(VectorSession):
    """Runs one request for embeddings."""

    def __init__(self, life: Lifecycle, request: EmbedRequest) -> None:
        super().__init__(life, request.param)
        self._request = request

    async def run(self) -> Embeddings:
        """Return the vectors.

        Raises:
            ApplianceError: typed, at any point.
        """
        if self._request.dimensions is not None and not self.life.model.truncates:
            raise InvalidRequestError("this model's vectors have one length; leave dimensions out", param="dimensions")
        vectors = [self._cut(vector) for vector in await self.collect(feature=Feature.EMBEDDINGS)]
        return Embeddings(tuple(vectors), self.life.outcome.input_tokens)

    async def texts(self, client: TextClient) -> AsyncGenerator[array[int]]:
        """Give the token ids of each text."""
        for text in self._request.inputs:
            yield await client.encode(text, self.life.until)
        # The texts may be megabytes, and are not needed any more.
        self._request = replace(self._request, inputs=())

    def _cut(self, vector: array[float]) -> array[float]:
        """Return as many of a vector's first numbers as were asked for, brought to unit length."""
        wanted = self._request.dimensions
        if wanted is None:
            return vector
        if wanted > len(vector):
            raise InvalidRequestError(f"this model's vectors have {len(vector)} numbers", param="dimensions")
        first = vector[:wanted]
        length = sqrt(fsum(value * value for value in first))
        return array("f", (value / length for value in first)) if length else first
