"""Reranking, scores and classification over both front ends, and every wrong way to ask for them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable

import grpc
import httpx
import pytest

from appliance.common.errors import InvalidRequestError, UnavailableError
from appliance.common.scopes import Scope
from appliance.gateway.front.request_builder import Stamp
from appliance.gateway.front.score_builder import MAX_DOCUMENTS
from appliance.gateway.generate_request import ScoreOperation, TextPrompt
from appliance.gateway.grpc.generated import inference_pb2 as pb
from appliance.gateway.grpc.generated.inference_pb2_grpc import InferenceServiceStub
from appliance.gateway.http import scoring
from appliance.gateway.http.app import ROUTES
from isolation.ipc.messages import Priority
from tests.appliance.gateway.front.support import MODEL, Running, serving

STAMP = Stamp("req_1", None)


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    """Both front ends before a scripted service."""
    async with serving() as found:
        yield found


def client_of(running: Running) -> httpx.AsyncClient:
    """A tenant's client."""
    return httpx.AsyncClient(base_url=running.base_url, headers=running.authorization)


async def test_the_best_documents_come_first(running: Running) -> None:
    """Texts and objects, all or the best; equal ones in their order; documents shown unless told otherwise; the usage
    is exact and the id is the request's; Cohere's path answers alike."""
    documents = ["bb", {"text": "dddd"}, "aa", {"text": "ccc", "id": 7}]
    async with client_of(running) as client:
        for path in ("/v1/rerank", "/v2/rerank"):
            body = {"model": MODEL, "query": "q", "documents": documents}
            answer = await client.post(path, json=body)
            asked, found = running.service.scored[-1], answer.json()
            assert answer.headers["x-request-id"] == found["id"] == asked.request_id
            assert found["usage"] == {"prompt_tokens": 12, "completion_tokens": 0, "total_tokens": 12}
            assert [(one["index"], one["relevance_score"], one["document"]["text"]) for one in found["results"]] == [
                (1, 0.04, "dddd"),
                (3, 0.03, "ccc"),
                (0, 0.02, "bb"),
                (2, 0.02, "aa"),
            ]
            assert (asked.operation, asked.queries) == (ScoreOperation.RERANK, (TextPrompt("q"),))
            best = await client.post(path, json={**body, "top_n": 1, "return_documents": False, "user": "someone"})
            assert best.json()["results"] == [{"index": 1, "relevance_score": 0.04}]
            assert "x-athanor-ignored" not in best.headers
            assert running.service.scored[-1].end_user
            many = await client.post(path, json={**body, "top_n": 100, "priority": 3})
            assert len(many.json()["results"]) == 4
            assert many.headers["x-athanor-ignored"] == "priority"


async def test_scores_in_the_order_of_the_pairs(running: Running) -> None:
    """One text against one, one against several, several against as many, under both pairs of names."""
    async with client_of(running) as client:
        for first, second in (("text_1", "text_2"), ("queries", "documents")):
            for one, other, scores in (
                ("q", "abc", [0.03]),
                ("q", ["abc", "a"], [0.03, 0.01]),
                (["q"], ["ab"], [0.02]),
                (["q", "r"], ["ab", "abc"], [0.02, 0.03]),
            ):
                found = (await client.post("/v1/score", json={"model": MODEL, first: one, second: other})).json()
                assert found["object"] == "list"
                assert found["data"] == [
                    {"index": at, "object": "score", "score": score} for at, score in enumerate(scores)
                ]


async def test_labels(running: Running) -> None:
    """One text or several: the likeliest label of each, and the probability of all."""
    async with client_of(running) as client:
        found = (await client.post("/v1/classify", json={"model": MODEL, "input": ["a" * 80, "b" * 25]})).json()
    assert [(one["label"], one["probs"], one["num_classes"]) for one in found["data"]] == [
        ("short", [0.8, pytest.approx(0.2)], 2),
        ("long", [0.25, 0.75], 2),
    ]
    assert found["usage"]["prompt_tokens"] == 105


async def test_over_grpc(running: Running) -> None:
    """The best documents by their places, with usage; wrong calls are INVALID_ARGUMENT that name the field."""
    metadata = (("authorization", f"Bearer {running.key}"),)
    right = {"model": MODEL, "query": "q", "documents": ["a", "ccc", "bb"]}
    async with grpc.aio.insecure_channel(running.target) as channel:
        stub = InferenceServiceStub(channel)
        answer = await stub.Rerank(
            pb.RerankRequest(**right, top_n=2, priority=pb.PRIORITY_LOW, end_user="someone"), metadata=metadata
        )
        assert [(one.index, one.score) for one in answer.results] == [(1, 0.03), (2, 0.02)]
        asked = running.service.scored[-1]
        assert (answer.request_id, answer.model, answer.usage.input_tokens) == (asked.request_id, MODEL, 7)
        assert (asked.priority, asked.queries) == (Priority.LOW, (TextPrompt("q"),))
        assert len((await stub.Rerank(pb.RerankRequest(**right), metadata=metadata)).results) == 3
        for change, field in (
            ({"model": ""}, "model"),
            ({"query": ""}, "query"),
            ({"documents": []}, "documents"),
            ({"documents": ["a", ""]}, "documents[1]"),
            ({"documents": ["a"] * (MAX_DOCUMENTS + 1)}, "documents"),
            ({"top_n": 0}, "top_n"),
            ({"priority": 9}, "priority"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Rerank(pb.RerankRequest(**{**right, **change}), metadata=metadata)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, change
            assert field.encode() in dict(caught.value.trailing_metadata())["grpc-status-details-bin"], change
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Rerank(pb.RerankRequest(**right))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_client_that_leaves_ends_the_work(running: Running) -> None:
    """Over both front ends, the session's task is cancelled when its client is gone; the service's error is the
    client's."""
    body = {"model": MODEL, "query": "q", "documents": ["a"]}
    async with client_of(running) as client:
        running.service.script = [UnavailableError("later", retry_after_s=3)]
        bad = await client.post("/v1/rerank", json=body)
        assert (bad.status_code, bad.headers["retry-after"]) == (503, "3")
        running.service.asked.clear()
        running.service.closed.clear()
        running.service.script = [asyncio.Event()]
        asking = asyncio.ensure_future(client.post("/v1/rerank", json=body))
        await asyncio.wait_for(running.service.asked.wait(), 5)
        asking.cancel()
        await asyncio.wait_for(running.service.closed.wait(), 5)
    running.service.asked.clear()
    running.service.closed.clear()
    async with grpc.aio.insecure_channel(running.target) as channel:
        metadata = (("authorization", f"Bearer {running.key}"),)
        call = InferenceServiceStub(channel).Rerank(pb.RerankRequest(**body), metadata=metadata)
        await asyncio.wait_for(running.service.asked.wait(), 5)
        call.cancel()
        await asyncio.wait_for(running.service.closed.wait(), 5)


def test_the_routes_have_a_scope_of_their_own() -> None:
    """A key that is limited to embeddings does not rerank."""
    found = {route.path: route.scope for route in ROUTES if route.handler.__name__ in ("rerank", "score", "classify")}
    assert found == dict.fromkeys(("/v1/rerank", "/v2/rerank", "/v1/score", "/v1/classify"), Scope.RERANK)


RANK, SCORE, CLASSES = scoring.parse_rerank, scoring.parse_score, scoring.parse_classify
LEAST = {
    RANK: {"model": "m", "query": "q", "documents": ["d"]},
    SCORE: {"model": "m", "text_1": "q", "text_2": "d"},
    CLASSES: {"model": "m", "input": "d"},
}
WRONG = [
    (RANK, {"model": 5}, "model"),
    (RANK, {"model": ""}, "model"),
    (RANK, {"query": None}, "query"),
    (RANK, {"query": ""}, "query"),
    (RANK, {"query": ["q"]}, "query"),
    (RANK, {"documents": None}, "documents"),
    (RANK, {"documents": "d"}, "documents"),
    (RANK, {"documents": []}, "documents"),
    (RANK, {"documents": ["d", ""]}, "documents[1]"),
    (RANK, {"documents": ["d", 5]}, "documents[1]"),
    (RANK, {"documents": [{"title": "d"}]}, "documents[0]"),
    (RANK, {"documents": [{"text": 5}]}, "documents[0]"),
    (RANK, {"documents": ["\ud800"]}, "documents[0]"),
    (RANK, {"documents": ["d"] * (MAX_DOCUMENTS + 1)}, "documents"),
    (RANK, {"top_n": -1}, "top_n"),
    (RANK, {"top_n": True}, "top_n"),
    (RANK, {"top_n": MAX_DOCUMENTS + 1}, "top_n"),
    (RANK, {"return_documents": 1}, "return_documents"),
    (RANK, {"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    (RANK, {"max_tokens_per_doc": 5}, "max_tokens_per_doc"),
    (RANK, {"max_chunks_per_doc": 5}, "max_chunks_per_doc"),
    (RANK, {"rank_fields": ["title"]}, "rank_fields"),
    (RANK, {"user": 5}, "user"),
    (SCORE, {"text_1": None}, "text_1"),
    (SCORE, {"text_2": None}, "text_2"),
    (SCORE, {"text_2": [["d"]]}, "text_2[0]"),
    (SCORE, {"text_2": []}, "text_2"),
    (SCORE, {"text_1": []}, "text_1"),
    (SCORE, {"text_1": ["q", "r"]}, "text_1"),
    (SCORE, {"text_1": ["q", "r"], "text_2": ["a", "b", "c"]}, "text_1"),
    (SCORE, {"queries": "q"}, "text_1"),
    (SCORE, {"use_activation": "no"}, "use_activation"),
    (CLASSES, {"input": None}, "input"),
    (CLASSES, {"input": ""}, "input[0]"),
    (CLASSES, {"input": []}, "input"),
    (CLASSES, {"input": [5]}, "input[0]"),
]


@pytest.mark.parametrize(
    ("parse", "change", "field"), WRONG, ids=lambda value: getattr(value, "__name__", str(value)[:40])
)
def test_what_is_refused_names_its_field(
    parse: Callable[[bytes, Stamp], scoring.ParsedScore], change: dict[str, object], field: str
) -> None:
    """Each mistake is a typed 400 that names the field. Control: the body without it is taken."""
    parse(json.dumps(LEAST[parse]).encode(), STAMP)
    with pytest.raises(InvalidRequestError) as caught:
        parse(json.dumps({**LEAST[parse], **change}).encode(), STAMP)
    assert caught.value.param == field
