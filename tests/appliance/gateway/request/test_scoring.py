"""Requests for scores over real channels to a scripted engine: pairs, cosines, classes, charges and leaving."""

from __future__ import annotations

import asyncio
import json
import math
from array import array
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from appliance.common.errors import (
    ContextLengthError,
    FeatureNotAllowedError,
    InvalidRequestError,
    PayloadTooLargeError,
)
from appliance.gateway.generate_request import (
    CallContext,
    ChatPrompt,
    EmbedRequest,
    Principal,
    Prompt,
    ScoreOperation,
    ScoreRequest,
    TextPrompt,
)
from appliance.gateway.request import scoring
from appliance.gateway.request.routing import takes
from appliance.gateway.request.scoring import ScoringSession, probabilities
from appliance.gateway.request.service import GatewayService
from appliance.gateway.sandboxes.text_client import TextClient
from isolation.ipc.embed import Embed
from isolation.ipc.engine import Abort
from tests.appliance.gateway.pairs import Pair
from tests.appliance.gateway.request.test_embedding import QuietTelemetry, give
from tests.appliance.gateway.request.test_session import Stage, hear

ALPHA, CONTEXT = Principal("alpha", "key:a"), CallContext("POST /v1/rerank", "http")


@pytest.fixture
async def stage(counter: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Stage]:
    """A stage without an engine yet; its text sandbox is a table: an id for each character."""

    async def encode(_client: TextClient, prompt: Prompt, _until: float) -> array[int]:
        if isinstance(prompt, ChatPrompt):
            parts = [f"<{one['role']}>{one['content']}" for one in json.loads(prompt.source)["messages"]]
            return array("I", map(ord, "".join(parts)))
        return array("I", map(ord, prompt.text))

    monkeypatch.setattr(TextClient, "encode", encode)
    made = Stage(counter)
    made.model.runner = "classify"
    yield made
    if made.model.engine is not None:
        made.model.engine.close()
    made.close()


def asked(queries: str, documents: str, operation: ScoreOperation = ScoreOperation.RERANK) -> ScoreRequest:
    """A request; texts stand between spaces."""
    texts = [tuple(map(TextPrompt, one.split())) for one in (queries, documents)]
    return ScoreRequest(request_id="req", operation=operation, model="m", queries=texts[0], documents=texts[1])


async def run(stage: Stage, request: ScoreRequest, vector: Callable[[str], list[float]]) -> tuple[list[str], Any, Any]:
    """Texts that the engine got, the scores, and the lifecycle; the engine answers by this function of the text."""
    pair = stage.pairs[-1] if stage.pairs else stage.boot()
    session = ScoringSession(stage.life(request), request)
    task = asyncio.ensure_future(session.run())
    texts: list[str] = []
    while not task.done():
        for message in pair.guest.receive(1):
            if isinstance(message, Embed):
                texts.append("".join(map(chr, message.token_ids)))
                give(pair, message.request, *vector(texts[-1]))
        await asyncio.sleep(0.001)
    return texts, await task, session.life


def logit(probability: float) -> float:
    """The number whose logistic function this is."""
    return math.log(probability / (1 - probability))


async def test_a_classifier_reads_pairs(stage: Stage) -> None:
    """One query with each document, or one query each: token ids of the one, then of the other; the score is the
    logistic function of the one label's number; what was read is charged exactly."""
    texts, scores, life = await run(stage, asked("q", "a bb ccc"), lambda text: [logit(len(text) / 10)])
    assert texts == ["qa", "qbb", "qccc"]
    assert [one[0] for one in scores.values] == pytest.approx([0.2, 0.3, 0.4], abs=1e-6)
    assert scores.input_tokens == life.outcome.input_tokens == life.tokens.input == 9
    assert scores.best(2) == [2, 1]
    texts, _, life = await run(stage, asked("q rr", "a bb", ScoreOperation.SCORE), lambda _: [0.0])
    assert texts == ["qa", "rrbb"] and life.tokens.input == 6


async def test_the_models_own_template_may_join_a_pair(stage: Stage) -> None:
    """Where the configuration says so, a pair is a conversation of a query and a document for the chat template,
    in which alone control tokens stand."""
    stage.model.templated = True
    texts, _, _ = await run(stage, asked("q", "a b"), lambda _: [0.0])
    assert texts == ["<query>q<document>a", "<query>q<document>b"]


async def test_a_query_that_a_template_would_repeat_too_often_is_refused_at_once(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes of all pairs are bounded before the first is written: a long query counts once for each document.
    Control: at the bound it is taken."""
    stage.model.templated = True
    monkeypatch.setattr(scoring, "MAX_PAIR_BYTES", 6)
    texts, _, _ = await run(stage, asked("qq", "a b"), lambda _: [0.0])
    assert len(texts) == 2
    with pytest.raises(PayloadTooLargeError, match="shorter query") as refused:
        await run(stage, asked("qqq", "a b"), lambda _: [0.0])
    assert refused.value.param == "documents"


async def test_of_several_labels_the_last_one_is_the_score(stage: Stage) -> None:
    """The probability of the last label, as of a head that was trained for no and yes."""
    _, scores, _ = await run(stage, asked("q", "a"), lambda _: [math.log(0.3), math.log(0.7)])
    assert scores.values == ((pytest.approx(0.7, abs=1e-6),),)


async def test_texts_are_classified(stage: Stage) -> None:
    """Each text alone gives a probability for each label, under the configured names and, where there is none, under
    the number."""
    stage.model.labels = ("bad",)
    request = asked("", "aa b", ScoreOperation.CLASSIFY)
    texts, scores, life = await run(stage, request, lambda text: [math.log(len(text)), 0.0])
    assert texts == ["aa", "b"] and life.tokens.input == 3
    assert scores.labels == ("bad", "LABEL_1")
    assert scores.values[0] == pytest.approx((2 / 3, 1 / 3), abs=1e-6)
    assert scores.values[1] == pytest.approx((0.5, 0.5))


async def test_vectors_are_compared(stage: Stage) -> None:
    """A model that embeds reads every text once; the score is the cosine, within its range, and 0 of a vector without
    length."""
    stage.model.runner = "embed"
    vectors = {"q": [3.0, 0.0], "a": [0.5, 0.0], "b": [0.0, 2.0], "c": [-1e-20, 0.0], "d": [0.0, 0.0], "e": [1.0, 1.0]}
    texts, scores, life = await run(stage, asked("q", "a b c d e"), vectors.__getitem__)
    assert texts == ["q", "a", "b", "c", "d", "e"] and life.tokens.input == 6
    assert [one[0] for one in scores.values] == [1.0, 0.0, -1.0, 0.0, pytest.approx(math.sqrt(0.5))]
    texts, scores, _ = await run(stage, asked("q b", "a a", ScoreOperation.SCORE), vectors.__getitem__)
    assert texts == ["q", "b", "a", "a"] and scores.values == ((1.0,), (0.0,))


def test_probabilities_do_not_overflow() -> None:
    """Numbers of any size, one or several, give probabilities that sum to one."""
    for number in (0.0, 1e3, -1e3, 3e38, -3e38):
        assert 0 <= probabilities([number])[0] <= 1
        assert math.fsum(probabilities([number, 0.0, -number])) == pytest.approx(1)
    assert probabilities([0.0]) == (0.5,)


async def test_pairs_beyond_the_context_are_refused(stage: Stage) -> None:
    """A pair that is too long is a typed error that names the documents; nothing is cut short, and nothing charged."""
    stage.boot()
    request = asked("q" * 200, "d" * 100)
    session = ScoringSession(stage.life(request), request)
    with pytest.raises(ContextLengthError, match="one has 300") as caught:
        await session.run()
    assert caught.value.param == "documents"
    assert session.life.tokens.input == 0


async def test_through_the_service(stage: Stage) -> None:
    """A client that leaves frees its slot and every pair in the engine; kinds of models are told apart by typed 400s;
    a tenant without the feature is refused by its rule."""
    service = GatewayService({"m": stage.model}, stage.ledger, QuietTelemetry())  # type: ignore[arg-type]
    pair: Pair = stage.boot()
    task = asyncio.ensure_future(service.score(ALPHA, asked("q", "a b c"), CONTEXT))
    inside = {(await hear(pair, Embed)).request for _ in range(3)}
    assert stage.ledger.concurrency("alpha") == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stage.ledger.concurrency("alpha") == 0
    assert {(await hear(pair, Abort)).request for _ in range(3)} == inside
    embed = EmbedRequest(request_id="r", model="m", inputs=(TextPrompt("x"),))
    with pytest.raises(InvalidRequestError, match="classifies; it gives no embeddings"):
        await service.embed(ALPHA, embed, CONTEXT)
    stage.model.runner = "embed"
    with pytest.raises(InvalidRequestError, match="gives embeddings; it has no labels"):
        await service.score(ALPHA, asked("", "a", ScoreOperation.CLASSIFY), CONTEXT)
    stage.model.runner = "model"
    with pytest.raises(InvalidRequestError, match="generates text; it scores no texts"):
        await service.score(ALPHA, asked("q", "a"), CONTEXT)
    stage.model.runner = "classify"
    stage.grant("features: {rerank: false}")
    request = asked("q", "a")
    with pytest.raises(FeatureNotAllowedError) as caught:
        await ScoringSession(stage.life(request), request).run()
    assert caught.value.rule == "tenants.alpha.features.rerank"


def test_what_each_runner_takes() -> None:
    """Both kinds of models that have no text to give score pairs; labels come from a classifier alone."""
    pairs, classes = asked("q", "a"), asked("", "a", ScoreOperation.CLASSIFY)
    assert [takes(one, pairs) for one in ("model", "null", "embed", "classify")] == [False, False, True, True]
    assert [takes(one, classes) for one in ("model", "null", "embed", "classify")] == [False, False, False, True]
