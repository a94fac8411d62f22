"""Requests for scores: documents against queries, or texts against a classifier's labels, under one decision and one
charge.

A model that embeds scores a pair by the cosine of its two vectors, and each text is computed once. A classifier reads
each pair as one text: the score is the probability of its one label, or of the last of several.
"""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import replace
from math import exp, fsum, sqrt
from operator import mul

from appliance.common.errors import PayloadTooLargeError
from appliance.gateway.generate_request import ChatPrompt, ScoreOperation, ScoreRequest, Scores, TextPrompt
from appliance.gateway.request.embedding import VectorSession
from appliance.gateway.request.lifecycle import Lifecycle
from appliance.gateway.sandboxes.text_client import TextClient
from policy.feature import Feature

NUMBERS_A_TURN = 1 << 16
"""Numbers that are multiplied in one turn of the loop: some milliseconds."""

MAX_PAIR_BYTES = 16 << 20
"""Bytes of all pairs of one request that a chat template writes, each with its query. A body of 4 MB may have a query
of nearly that and two thousand documents."""

QUERY, DOCUMENT = "query", "document"
"""Roles of the two messages of which a chat template makes a pair, as in vLLM's templates for scores."""


class ScoringSession(VectorSession):
    """Runs one request for scores."""

    def __init__(self, life: Lifecycle, request: ScoreRequest) -> None:
        super().__init__(life, request.param)
        self._request = request
        self._compares = life.model.runner == "embed"
        self._queries, self._documents = len(request.queries), len(request.documents)

    async def run(self) -> Scores:
        """Return a score for each document, or its probability of each label.

        Raises:
            ApplianceError: typed, at any point.
        """
        operation = self._request.operation
        vectors = await self.collect(feature=Feature.RERANK)
        used = self.life.outcome.input_tokens
        if self._compares:
            return Scores(tuple([(score,) async for score in self._cosines(vectors)]), used)
        classes = [probabilities(vector) for vector in vectors]
        if operation is ScoreOperation.CLASSIFY:
            names = self.life.model.labels
            labels = [names[at] if at < len(names) else f"LABEL_{at}" for at in range(len(classes[0]))]
            return Scores(tuple(classes), used, tuple(labels))
        return Scores(tuple((one[-1],) for one in classes), used)

    async def texts(self, client: TextClient) -> AsyncGenerator[array[int]]:
        """Give the token ids of each text that is computed: of queries and documents, of pairs, or of what is
        classified."""
        request, until = self._request, self.life.until
        if self.life.model.templated and request.queries:
            _check_size(request)
        # The texts may be megabytes, and are not needed any more when all have been given.
        self._request = replace(request, queries=(), documents=())
        if self._compares or not request.queries:
            for text in request.queries + request.documents:
                yield await client.encode(text, until)
            return
        last, query = None, array("I")
        for at, document in enumerate(request.documents):
            asked = request.queries[at if len(request.queries) > 1 else 0]
            if self.life.model.templated:
                yield await client.encode(_conversation(asked, document), until)
                continue
            if asked is not last:
                last, query = asked, await client.encode(asked, until)
            yield query + await client.encode(document, until)

    async def _cosines(self, vectors: Sequence[array[float]]) -> AsyncIterator[float]:
        """Give the cosine of each document's vector and its query's."""
        queries, documents = vectors[: self._queries], vectors[self._queries :]
        lengths = [_length(vector) for vector in queries]
        done = 0
        for at, document in enumerate(documents):
            asked = at if len(queries) > 1 else 0
            scale = lengths[asked] * _length(document)
            yield min(1.0, max(-1.0, fsum(map(mul, queries[asked], document)) / scale)) if scale else 0.0
            done += 2 * len(document)
            if done > NUMBERS_A_TURN:
                done = 0
                await asyncio.sleep(0)


def probabilities(numbers: Sequence[float]) -> tuple[float, ...]:
    """Return the probability of each label from the head's numbers: of one label its logistic function, of several
    their softmax."""
    if len(numbers) == 1:
        (number,) = numbers
        # Neither branch overflows.
        return (1 / (1 + exp(-number)) if number >= 0 else exp(number) / (1 + exp(number)),)
    most = max(numbers)
    raised = [exp(number - most) for number in numbers]
    total = fsum(raised)
    return tuple(one / total for one in raised)


def _length(vector: array[float]) -> float:
    return sqrt(fsum(map(mul, vector, vector)))


def _check_size(request: ScoreRequest) -> None:
    queries = sum(len(one.text.encode()) for one in request.queries)
    size = queries * (len(request.documents) if len(request.queries) == 1 else 1)
    size += sum(len(one.text.encode()) for one in request.documents)
    if size > MAX_PAIR_BYTES:
        raise PayloadTooLargeError(
            f"the pairs of query and document are {size} bytes of text; at most {MAX_PAIR_BYTES} are taken. Send a "
            "shorter query, or fewer documents at once",
            param=request.param,
        )


def _conversation(query: TextPrompt, document: TextPrompt) -> ChatPrompt:
    """Return a pair as the text sandbox takes it for the model's chat template."""
    messages = [{"role": QUERY, "content": query.text}, {"role": DOCUMENT, "content": document.text}]
    return ChatPrompt(json.dumps({"messages": messages}, ensure_ascii=False).encode(), document.param)
