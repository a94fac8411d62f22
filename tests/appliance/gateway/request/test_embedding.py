"""Requests for embeddings over real channels to a scripted engine: windows, lies, replays, limits and charges."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from appliance.common.errors import (
    ContextLengthError,
    DeadlineExceededError,
    FeatureNotAllowedError,
    InternalError,
    InvalidRequestError,
    QuarantinedError,
    UnavailableError,
)
from appliance.gateway.generate_request import (
    CallContext,
    Embeddings,
    EmbedRequest,
    GenerateRequest,
    Operation,
    Principal,
    TokenPrompt,
)
from appliance.gateway.request import embedding as embedding_module
from appliance.gateway.request.embedding import WINDOW, EmbeddingSession
from appliance.gateway.request.service import GatewayService
from isolation.ipc.embed import Embed, Embedding
from isolation.ipc.engine import Abort, RequestFailure, Started, StepOutput
from isolation.ipc.messages import FailureCode, Finish, Priority
from isolation.ipc.sampling import Sampling
from tests.appliance.gateway.pairs import Pair
from tests.appliance.gateway.request.test_session import Quiet, Stage, hear


@pytest.fixture
async def stage(counter: Callable[[], int]) -> AsyncGenerator[Stage]:
    """A stage without an engine yet, of a model that embeds."""
    made = Stage(counter)
    made.model.runner, made.model.truncates = "embed", True
    yield made
    if made.model.engine is not None:
        made.model.engine.close()
    made.close()


def session(stage: Stage, *texts: int, **options: Any) -> EmbeddingSession:
    """A request for texts of so many ids each."""
    inputs = tuple(TokenPrompt(array("I", [place + 1] * length)) for place, length in enumerate(texts))
    request = EmbedRequest(request_id="req", model="m", inputs=inputs, **options)
    return EmbeddingSession(stage.life(request), request)


def give(pair: Pair, request: int, *values: float) -> None:
    """A vector and the end of its request."""
    pair.guest.send(Embedding(request, array("f", values)))
    end(pair, request)


def end(pair: Pair, request: int) -> None:
    """The end alone."""
    pair.guest.send(
        StepOutput(array("Q", [request]), array("I", [0]), bytes([Finish.LENGTH]), starts=(Started(request, 0, 0),))
    )


async def serve(pair: Pair, count: int) -> list[Embed]:
    """Answer so many texts: their first id and their length."""
    heard = []
    for _ in range(count):
        heard.append(await hear(pair, Embed))
        give(pair, heard[-1].request, heard[-1].token_ids[0], len(heard[-1].token_ids))
    return heard


async def test_vectors_in_the_order_of_the_texts(stage: Stage) -> None:
    """More texts than the window: never more in the engine at once, all answered, counted as one prompt."""
    pair = stage.boot()
    running = session(stage, *[3] * (WINDOW + 10), priority=Priority.LOW)
    task = asyncio.ensure_future(running.run())
    first = [await hear(pair, Embed) for _ in range(WINDOW)]
    await asyncio.sleep(0.05)
    assert pair.guest.receive(100) == []
    assert {one.priority for one in first} == {Priority.LOW}
    for one in reversed(first):
        give(pair, one.request, one.token_ids[0])
    await serve_rest(pair, 10)
    found = await task
    assert [vector[0] for vector in found.vectors] == list(range(1, WINDOW + 11))
    assert found.input_tokens == running.life.outcome.input_tokens == 3 * (WINDOW + 10)
    assert running.life.outcome.output_tokens == 0
    assert running.life.outcome.started


async def serve_rest(pair: Pair, count: int) -> None:
    """Answer the rest with their first id alone."""
    for _ in range(count):
        one = await hear(pair, Embed)
        give(pair, one.request, one.token_ids[0])


async def test_vectors_that_the_policy_withholds(stage: Stage) -> None:
    """A tenant without the feature is refused by its rule, before a text is tokenised."""
    stage.grant("features: {embeddings: false}")
    with pytest.raises(FeatureNotAllowedError, match="this tenant may not use embeddings") as caught:
        await session(stage, 2).run()
    assert caught.value.rule == "tenants.alpha.features.embeddings"


async def test_fewer_dimensions(stage: Stage) -> None:
    """The first numbers, of unit length; more than there are, or of a model not trained for it, are refused."""
    pair = stage.boot()
    task = asyncio.ensure_future(session(stage, 2, dimensions=2).run())
    give(pair, (await hear(pair, Embed)).request, 3.0, 4.0, 12.0)
    assert (await task).vectors[0].tolist() == pytest.approx([0.6, 0.8])
    task = asyncio.ensure_future(session(stage, 2, dimensions=4).run())
    give(pair, (await hear(pair, Embed)).request, 3.0, 4.0, 12.0)
    with pytest.raises(InvalidRequestError, match="have 3 numbers"):
        await task
    stage.model.truncates = False
    with pytest.raises(InvalidRequestError, match="leave dimensions out"):
        await session(stage, 2, dimensions=2).run()


LIES: dict[str, Callable[[Pair, int], None]] = {
    "no vector": end,
    "two vectors": lambda pair, request: [give_vector(pair, request, 1.0) for _ in range(2)],  # type: ignore[func-returns-value]
    "another's": lambda pair, request: give_vector(pair, request + 1_000, 1.0),
    "another length": lambda pair, request: give_vector(pair, request, 1.0, 2.0),
}


def give_vector(pair: Pair, request: int, *values: float) -> None:
    """A vector alone."""
    pair.guest.send(Embedding(request, array("f", values)), urgent=True)


@pytest.mark.parametrize("name", LIES)
async def test_an_engine_that_lies_is_ended(name: str, stage: Stage) -> None:
    """A vector that nobody asked for, of another length, twice, or not at all breaks the protocol; the request is
    tried in the next engine."""
    first = stage.boot()
    task = asyncio.ensure_future(session(stage, 2, 2).run())
    one = await hear(first, Embed)
    await hear(first, Embed)
    give(first, one.request, 5.0)
    await asyncio.sleep(0.05)
    engine = stage.model.engine
    LIES[name](first, one.request + 1)
    await asyncio.sleep(0.1)
    assert stage.model.engine is None
    assert engine is not None
    second = stage.boot()
    again = await hear(second, Embed)
    give(second, again.request, 6.0)
    assert [vector[0] for vector in (await task).vectors] == [5.0, 6.0]


async def test_vectors_for_those_who_left_are_dropped(stage: Stage) -> None:
    """A cancelled request aborts what it has in the engine; what still comes for it is no lie."""
    pair = stage.boot()
    running = session(stage, 2, 2, 2)
    task = asyncio.ensure_future(running.run())
    heard = [await hear(pair, Embed) for _ in range(3)]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert {(await hear(pair, Abort)).request for _ in range(3)} == {one.request for one in heard}
    give(pair, heard[0].request, 1.0)
    await asyncio.sleep(0.05)
    assert stage.model.engine is not None
    assert stage.model.engine.live == ()


async def test_a_death_is_survived_and_a_second_one_alone_is_not(stage: Stage) -> None:
    """Vectors that have come are kept over a death; a request that dies alone twice is quarantined, its texts as
    framed: the same ids cut otherwise are another request."""
    first = stage.boot()
    task = asyncio.ensure_future(session(stage, 2, 3).run())
    one = await hear(first, Embed)
    await hear(first, Embed)
    give(first, one.request, 1.0)
    await asyncio.sleep(0.05)
    first.guest.close()
    await asyncio.sleep(0.05)
    second = stage.boot()
    again = await hear(second, Embed)
    assert len(again.token_ids) == 3
    second.guest.close()
    await asyncio.sleep(0.05)
    stage.boot()
    with pytest.raises(QuarantinedError):
        await task
    with pytest.raises(QuarantinedError):
        await session(stage, 2, 3).run()
    third = asyncio.ensure_future(session(stage, 3, 2).run())
    await serve(stage.pairs[-1], 2)
    assert len((await third).vectors) == 2


async def test_failures_and_deadlines(stage: Stage) -> None:
    """The engine's failure of one text is the request's; a deadline ends it and frees the engine."""
    pair = stage.boot()
    for code, kind in (
        (FailureCode.INTERNAL, InternalError),
        (FailureCode.OVERLOADED, UnavailableError),
        (FailureCode.INVALID, InvalidRequestError),
        (FailureCode.DEADLINE, DeadlineExceededError),
    ):
        task = asyncio.ensure_future(session(stage, 2, 2).run())
        one = await hear(pair, Embed)
        other = await hear(pair, Embed)
        pair.guest.send(StepOutput(failures=(RequestFailure(one.request, code),)))
        with pytest.raises(kind):
            await task
        assert (await hear(pair, Abort)).request == other.request
    late = session(stage, 2, deadline=time.monotonic() + 0.1)
    with pytest.raises(DeadlineExceededError):
        await late.run()
    assert (await hear(pair, Embed)).deadline_us <= 100_000
    await hear(pair, Abort)


async def test_limits_before_the_engine(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text beyond the context, an id beyond the vocabulary, too many tokens, too many numbers: refused, typed."""
    pair = stage.boot()
    with pytest.raises(ContextLengthError, match="texts of at most 255 tokens"):
        await session(stage, 2, 256).run()
    request = EmbedRequest(request_id="r", model="m", inputs=(TokenPrompt(array("I", [512])),))
    with pytest.raises(InvalidRequestError, match="vocabulary"):
        await EmbeddingSession(stage.life(request), request).run()
    monkeypatch.setattr(embedding_module, "MAX_TOKENS", 10)
    with pytest.raises(InvalidRequestError, match="10 tokens together"):
        await session(stage, 5, 6).run()
    monkeypatch.setattr(embedding_module, "MAX_NUMBERS", 3)
    task = asyncio.ensure_future(session(stage, 2, 2).run())
    one = await hear(pair, Embed)
    give(pair, one.request, 1.0, 2.0)
    with pytest.raises(InvalidRequestError, match="at most 1 texts"):
        await task


class QuietTelemetry:
    """Telemetry that keeps nothing."""

    def start(self, *_args: object) -> Quiet:
        """A trace of nothing."""
        return Quiet()

    def count(self, *_args: object, **_labels: str) -> None:
        """Count nothing."""


async def test_kinds_of_models_and_the_ledger(stage: Stage) -> None:
    """Through the service: input tokens alone are charged, the slot comes back; a model that generates gives no
    vectors and one that embeds no text, each a typed 400."""
    service = GatewayService({"m": stage.model}, stage.ledger, QuietTelemetry())  # type: ignore[arg-type]
    principal, context = Principal("alpha", "key:a"), CallContext("POST /v1/embeddings", "http")
    before = stage.ledger.rates("alpha")
    pair = stage.boot()

    async def ask(*texts: int) -> Embeddings:
        request = EmbedRequest(
            request_id="r", model="m", inputs=tuple(TokenPrompt(array("I", [1] * one)) for one in texts)
        )
        return await service.embed(principal, request, context)

    task = asyncio.ensure_future(ask(3, 4))
    await hear(pair, Embed)
    assert stage.ledger.concurrency("alpha") == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stage.ledger.concurrency("alpha") == 0
    task = asyncio.ensure_future(ask(3, 4))
    await hear(pair, Embed)
    await serve(pair, 2)
    await task
    after = stage.ledger.rates("alpha")
    assert before.remaining_tokens - after.remaining_tokens <= 7
    assert service.tenant_counts.of("alpha").tokens == 7
    asked = GenerateRequest(
        request_id="r",
        operation=Operation.TEXT_COMPLETION,
        model="m",
        prompt=TokenPrompt(array("I", [1])),
        sampling=Sampling(),
    )
    with pytest.raises(InvalidRequestError, match="generates no text"):
        await anext(service.generate(principal, asked, context))
    for runner in ("model", "null"):
        stage.model.runner = runner
        with pytest.raises(InvalidRequestError, match="gives no embeddings"):
            await ask(1)
