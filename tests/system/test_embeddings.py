"""A model that embeds, classifiers, and one converted from GGUF and compressed, beside each other in real sandboxes, as
a client meets them."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
import torch

from appliance.gateway.grpc.generated import inference_pb2, inference_pb2_grpc
from tests.clients.programs import Client
from tests.system.conftest import START_TIMEOUT_S
from tests.system.many_models import Served
from tests.system.test_audit import entries as audit_entries
from tests.system.test_clients_document import blocks, run

pytestmark = [pytest.mark.runsc, pytest.mark.timeout(180)]

TENANT = "epsilon"
"""It may use the models by their own names, and has no limits."""


def expected(many: Served, ids: list[int]) -> torch.Tensor:
    """The reference's last hidden state, of unit length."""
    with torch.no_grad():
        hidden = many.reference(torch.tensor([ids])).last_hidden_state[0]
    return torch.nn.functional.normalize(hidden[-1], dim=0)


TEXTS = ["what is Athanor?", "a", "the furnace that feeds itself " * 12]


def test_the_official_client_gets_the_references_vectors(many: Served) -> None:
    """One text, several, and ids; floats and base64; chunked and batched: the reference's vectors to 1e-4; fewer
    dimensions are the first numbers of unit length; usage is the exact count."""
    client = many.openai(TENANT)
    for encoding in ("float", "base64"):
        raw: Any = client.embeddings.create(model="vectors", input=TEXTS, encoding_format=encoding)
        assert raw.usage.prompt_tokens == sum(len(many.tokenizer.encode(text).ids) for text in TEXTS)
    answer = client.embeddings.create(model="vectors", input=TEXTS)
    for text, one in zip(TEXTS, answer.data, strict=True):
        wanted = expected(many, many.tokenizer.encode(text).ids)
        assert torch.allclose(torch.tensor(one.embedding), wanted, atol=1e-4)
    answer = client.embeddings.create(model="vectors", input=[[5, 6, 7], [8]])
    assert torch.allclose(torch.tensor(answer.data[0].embedding), expected(many, [5, 6, 7]), atol=1e-4)
    assert answer.usage.prompt_tokens == 4
    short = client.embeddings.create(model="vectors", input="a", dimensions=8).data[0].embedding
    wanted = torch.nn.functional.normalize(expected(many, many.tokenizer.encode("a").ids)[:8], dim=0)
    assert torch.allclose(torch.tensor(short), wanted, atol=1e-4)
    assert math.isclose(sum(value * value for value in short), 1, rel_tol=1e-5)


def test_each_kind_of_model_takes_its_own_requests(many: Served) -> None:
    """Chats with a model that embeds, and embeddings of one that generates, are typed 400s that name the model; so are
    texts beyond the context."""
    client = many.openai(TENANT)
    with pytest.raises(openai.BadRequestError, match="generates no text"):
        client.chat.completions.create(model="vectors", messages=[{"role": "user", "content": "hi"}])
    with pytest.raises(openai.BadRequestError, match="gives no embeddings"):
        client.embeddings.create(model="athanor-mini", input="hi")
    with pytest.raises(openai.BadRequestError, match="takes texts of at most 256 tokens"):
        client.embeddings.create(model="vectors", input=[[1] * 257])
    assert len(client.embeddings.create(model="vectors", input=[[1] * 256]).data[0].embedding) == 64
    runners = {model.id: getattr(model, "runner", None) for model in client.models.list()}
    kinds = {"vectors": "embed", **dict.fromkeys(("classes", "templated", "moods"), "classify")}
    assert runners == {name: kinds.get(name) for name in many.models if name != "athanor-next"}


def logits(many: Served, ids: list[int]) -> torch.Tensor:
    """The reference's numbers of a text."""
    with torch.no_grad():
        found: torch.Tensor = many.classes(torch.tensor([ids])).logits[0]
    return found


QUERY = "which furnace?"


def ranked(many: Served, model: str) -> tuple[dict[int, float], int]:
    """Scores of the texts by their index, the best first, and the tokens that were counted."""
    found = many.post(TENANT, "/v1/rerank", model=model, query=QUERY, documents=TEXTS).json()
    scores = {one["index"]: one["relevance_score"] for one in found["results"]}
    assert list(scores.values()) == sorted(scores.values(), reverse=True)
    assert [one["document"]["text"] for one in found["results"]] == [TEXTS[index] for index in scores]
    return scores, found["usage"]["total_tokens"]


def test_documents_are_ranked_by_the_reference_s_numbers(many: Served) -> None:
    """With a model that embeds by the cosine of the reference's vectors; with a classifier by the logistic function of
    its number, of both texts' ids in a row; the best first; usage is the exact count."""
    ids = [many.tokenizer.encode(text).ids for text in TEXTS]
    query = many.tokenizer.encode(QUERY).ids
    scores, used = ranked(many, "vectors")
    for index, one in enumerate(ids):
        assert math.isclose(scores[index], float(expected(many, query) @ expected(many, one)), abs_tol=1e-4)
    assert used == len(query) + sum(map(len, ids))
    scores, used = ranked(many, "classes")
    for index, one in enumerate(ids):
        assert math.isclose(scores[index], float(logits(many, query + one).sigmoid()), abs_tol=1e-4)
    assert used == 3 * len(query) + sum(map(len, ids))


@pytest.mark.full
def test_pairs_are_laid_out_by_a_chat_template(many: Served) -> None:
    """Where a classifier reads pairs by its chat template, documents are ranked by the reference's number of that text.
    tests/engine and tests/appliance have the layout without an appliance."""
    scores, _ = ranked(many, "templated")
    for index, text in enumerate(TEXTS):
        laid_out = many.tokenizer.encode(f"<query>{QUERY}\n<document>{text}\n", add_special_tokens=False).ids
        assert math.isclose(scores[index], float(logits(many, laid_out).sigmoid()), abs_tol=1e-4)


def test_pairs_in_their_order(many: Served) -> None:
    """Scores of pairs in their order; a pair beyond the context, a model of another kind and a name that does not exist
    are typed, and the audit log has the operations with their tokens."""
    scores = many.post(TENANT, "/v1/score", model="classes", text_1="a", text_2=TEXTS).json()
    same = many.post(TENANT, "/v1/rerank", model="classes", query="a", documents=TEXTS, return_documents=False).json()
    ordered = sorted(same["results"], key=lambda one: int(one["index"]))
    for one, other in zip(scores["data"], ordered, strict=True):
        assert math.isclose(one["score"], other["relevance_score"], abs_tol=1e-5)
    long = many.post(TENANT, "/v1/rerank", model="classes", query="a " * 200, documents=["b " * 200])
    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")
    for path, model, status in (
        ("/v1/classify", "vectors", 400),
        ("/v1/classify", "athanor-mini", 400),
        ("/v1/classify", "nothing", 404),
        ("/v1/embeddings", "classes", 400),
    ):
        assert many.post(TENANT, path, model=model, input="x").status_code == status, (path, model)
    assert charged(many, {"rerank", "score"})["score"]["output_tokens"] == 0


def charged(many: Served, operations: set[str]) -> dict[str, dict[str, Any]]:
    """An entry of the audit log with tokens for each of these operations, once it is written."""
    until = time.monotonic() + START_TIMEOUT_S
    while True:
        written = [one for one in audit_entries(many.state / "audit") if one.get("tenant") == TENANT]
        found = {one["operation"]: one for one in written if one.get("input_tokens")}
        if operations <= found.keys():
            return found
        assert time.monotonic() < until, written
        time.sleep(0.05)


@pytest.mark.full
def test_labels(many: Served) -> None:
    """Probabilities of three labels, of which the configuration names two, and the tokens in the audit log; without a
    sandbox tests/engine/backends/test_classifier.py and tests of the gateway have them."""
    found = many.post(TENANT, "/v1/classify", model="moods", input=TEXTS).json()
    for one in found["data"]:
        assert math.isclose(sum(one["probs"]), 1) and one["num_classes"] == 3
        assert one["label"] == ("bad", "good", "LABEL_2")[one["probs"].index(max(one["probs"]))]
    assert charged(many, {"classify"})["classify"]["input_tokens"] == found["usage"]["prompt_tokens"]


@pytest.mark.parametrize("name", ["curl", "score", "litellm", "cohere"])
def test_a_block_of_the_document_is_answered(root: Path, many: Served, tmp_path: Path, name: str) -> None:
    """As it stands in docs/rerank.md, with the variables of docs/clients.md."""
    language, text = blocks(root, "rerank.md")[name]
    variables = {"OPENAI_BASE_URL": many.ready["http"] + "/v1", "OPENAI_API_KEY": many.keys[TENANT]}
    client = Client(name, "agents")
    said = run(language, text, variables) if language == "sh" else client.run(text, variables, tmp_path)
    assert "score" in said and len(said) > 20, said


@pytest.mark.full
def test_a_converted_model_serves_the_answers_of_its_origin(many: Served) -> None:
    """Greedy answers of athanor-mini and of itself through a GGUF file are the same text, chats and completions."""
    client = many.openai(TENANT)
    for question in ("what is Athanor?", "who are you?"):
        answers = [
            client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": question}], temperature=0, max_tokens=40
            )
            for model in ("athanor-mini", "converted")
        ]
        assert answers[0].choices[0].message.content == answers[1].choices[0].message.content != ""
        assert answers[0].usage == answers[1].usage


CHAT = {"model": "athanor-mini", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT,
    "/v1/completions": {"model": "athanor-mini", "prompt": ["hi", "ho"], "max_tokens": 1},
    "/v1/responses": {"model": "athanor-mini", "input": "hi", "max_output_tokens": 1},
    "/v1/embeddings": {"model": "vectors", "input": "hi"},
    "/v1/rerank": {"model": "classes", "query": "hi", "documents": ["ho"]},
}
"""Requests by route; that of completions has two prompts, which are two requests with one answer."""

RATE_WAIT_S = 61.0
"""Longest wait for the rate of the tenant of these tests."""


def asked_over_http(many: Served, client: httpx.Client, path: str) -> str:
    """Send a request; give the id in its answer, or of its header, where the API's answers have none."""
    answer = client.post(
        many.ready["http"] + path, json=BODIES[path], headers={"authorization": f"Bearer {many.keys[TENANT]}"}
    )
    while answer.status_code == 429:
        time.sleep(min(RATE_WAIT_S, float(answer.headers["retry-after"])))
        answer = client.post(
            many.ready["http"] + path, json=BODIES[path], headers={"authorization": f"Bearer {many.keys[TENANT]}"}
        )
    assert answer.status_code == 200, answer.text
    assert ("id" in answer.json()) is (path != "/v1/embeddings")
    return str(answer.json().get("id") or answer.headers["x-request-id"])


def asked_over_grpc(stub: inference_pb2_grpc.InferenceServiceStub, method: str, key: str) -> str:
    """Send a request; give the id in its answer, of a stream that in its first event."""
    call = {"metadata": [("authorization", f"Bearer {key}")], "timeout": 60}
    if method == "Embed":
        text = inference_pb2.EmbedInput(text="hi")
        return str(stub.Embed(inference_pb2.EmbedRequest(model="vectors", inputs=[text]), **call).request_id)
    if method == "Rerank":
        pairs = inference_pb2.RerankRequest(model="classes", query="hi", documents=["ho"])
        return str(stub.Rerank(pairs, **call).request_id)
    request = inference_pb2.GenerateRequest(model="athanor-mini", text="hi", max_output_tokens=1)
    return str(next(iter(stub.Generate(request, **call))).started.request_id)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", [30, pytest.param(1_000, marks=pytest.mark.full)])
def test_the_span_of_each_answer_has_the_id_that_its_client_saw(many: Served, count: int) -> None:
    """Over HTTP and gRPC, of every operation: the trace that the client's id finds is one whose generation has exactly
    this id, under a server span with scheme and path of HTTP or with the method of gRPC."""
    right = 0
    with (
        grpc.insecure_channel(many.ready["grpc"].removeprefix("http://")) as channel,
        httpx.Client(timeout=60) as client,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        kinds = [*BODIES, "Generate", "Embed", "Rerank"]
        for number in range(count):
            kind = kinds[number % len(kinds)]
            over_http = kind in BODIES
            seen = asked_over_http(many, client, kind) if over_http else asked_over_grpc(stub, kind, many.keys[TENANT])
            traces = [seen, f"{seen}.1"] if kind == "/v1/completions" else [seen]
            right += all(shown_as(many, client, trace, seen, kind) for trace in traces)
    print(f"{right} of {count} ids are those that clients saw")
    assert right == count


def shown_as(many: Served, client: httpx.Client, trace: str, seen: str, kind: str) -> bool:
    """Whether a trace has the id that the client saw, and the attributes of its protocol."""
    found = client.get(f"{many.ready['admin']}/traces/{trace}").json()
    deadline = time.monotonic() + START_TIMEOUT_S
    while "spans" not in found:  # a stream's trace ends after its last event
        assert time.monotonic() < deadline, found
        found = client.get(f"{many.ready['admin']}/traces/{trace}").json()
    server, generation = (span["attributes"] for span in found["spans"][:2])
    if kind in BODIES:
        told = server["url.scheme"], server["url.path"], server["http.route"], server["http.request.method"]
        wanted: tuple[str, ...] = ("http", kind, kind, "POST")
    else:
        told = server["rpc.system.name"], server["rpc.method"]
        wanted = ("grpc", f"athanor.inference.v1.InferenceService/{kind}")
    model = generation["gen_ai.response.model"] == generation["gen_ai.request.model"]
    return told == wanted and model and generation["gen_ai.response.id"] == seen
