"""A model that embeds, classifiers, and one converted from GGUF and compressed, beside each other in real sandboxes, as
a client meets them."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
import tokenizers
import torch
import transformers

from appliance.common.catalog import embedded_model
from appliance.gateway.grpc.generated import inference_pb2, inference_pb2_grpc
from appliance.operator.compression import CODED, compress
from appliance.operator.conversion import convert
from appliance.operator.demo import choose_ports, prepare_keys, prepare_policy, run_directory
from tests.clients.programs import Client
from tests.engine.convert.write_gguf import Kind, write_embedded
from tests.system.conftest import START_TIMEOUT_S, STOP_TIMEOUT_S
from tests.system.test_audit import entries as audit_entries
from tests.system.test_clients_document import blocks, run

pytestmark = [pytest.mark.runsc, pytest.mark.timeout(180)]

MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]


@dataclass
class Served:
    """A running appliance with both models, and what a client and the test need."""

    http: str
    key: str
    reference: transformers.PreTrainedModel
    tokenizer: tokenizers.Tokenizer
    classes: transformers.PreTrainedModel
    """Reference of the classifier with one label."""
    state: Path
    grpc: str
    admin: str
    """Base URL of the admin listener."""

    def post(self, path: str, **body: Any) -> httpx.Response:
        """Send one request."""
        headers = {"authorization": f"Bearer {self.key}"}
        return httpx.post(self.http + path, json=body, headers=headers, timeout=60)

    def client(self) -> openai.OpenAI:
        """The official client."""
        return openai.OpenAI(base_url=self.http + "/v1", api_key=self.key, max_retries=0, timeout=60)


SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 4_096,
    "max_position_embeddings": 256,
}

PAIR_TEMPLATE = """{% for m in messages %}<{{ m.role }}>{{ m.content }}
{% endfor %}"""
"""Chat template of a classifier that reads pairs."""


def finish(model: transformers.PreTrainedModel, folder: Path) -> None:
    """Give a model random weights, and save it with the embedded model's tokenizer."""
    with torch.no_grad():
        for one in model.parameters():
            one.copy_(torch.randn(one.shape) * 0.3)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((embedded_model() / name).read_bytes())


def classifier(folder: Path, labels: int = 1) -> transformers.PreTrainedModel:
    """A small classifier as it is published."""
    torch.manual_seed(labels)
    config = transformers.Qwen3Config(**SIZES, num_labels=labels, pad_token_id=2_047)
    model = transformers.Qwen3ForSequenceClassification(config).float().eval()
    finish(model, folder)
    (folder / "chat_template.jinja").write_text(PAIR_TEMPLATE)
    for path in folder.rglob("*"):
        path.chmod(path.stat().st_mode | 0o044)
    return model


def embedding_model(folder: Path) -> transformers.PreTrainedModel:
    """A small decoder in the layout of Qwen3-Embedding, with the embedded model's tokenizer."""
    torch.manual_seed(0)
    model = transformers.Qwen3Model(transformers.Qwen3Config(**SIZES)).float().eval()
    finish(model, folder)
    (folder / "modules.json").write_text(json.dumps(MODULES))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    for path in folder.rglob("*"):
        path.chmod(path.stat().st_mode | 0o044)
    return model


def converted_model(scratch: Path, folder: Path) -> None:
    """athanor-mini through a GGUF file of its own dtype, then compressed."""
    write_embedded(scratch, scratch / "mini.gguf", Kind.BF16)
    convert(scratch / "mini.gguf", scratch / "plain", dtype="auto", progress=lambda done, total: None)
    done = compress(scratch / "plain", folder, form=CODED, progress=lambda done, total: None)
    assert done.after < 0.7 * done.before


@contextlib.contextmanager
def serving(state: Path, runsc: Path) -> Iterator[Served]:
    """Serve six models from one configuration, for the time of the block."""
    os.chmod(state, 0o755)
    models = state / "models"
    reference = embedding_model(models / "vectors")
    classes = classifier(models / "classes")
    classifier(models / "moods", 3)
    shutil.copytree(models / "classes", models / "templated")
    scratch = state / "scratch"
    scratch.mkdir()
    converted_model(scratch, models / "converted")
    keys = prepare_keys(state)
    prepare_policy(state)
    http, rpc, admin = (f"127.0.0.1:{port}" for port in choose_ports((0, 0, 0)))
    small = {"kv_bytes": 16 << 20, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    judge = {"runner": "classify", **small}
    config = {
        "listen": {"http": http, "grpc": rpc, "admin": admin},
        "models": [
            {"name": "vectors", "path": str(models / "vectors"), "runner": "embed", "truncates": True, **small},
            {"name": "classes", "path": str(models / "classes"), "runner": "classify", **small},
            {
                "name": "templated",
                "path": str(models / "templated"),
                "runner": "classify",
                "pairs": "template",
                **small,
            },
            {"name": "moods", "path": str(models / "moods"), **judge, "labels": ["bad", "good"]},
            {"name": "converted", "path": str(models / "converted"), **small},
            {"name": "athanor-mini", "path": str(embedded_model()), **small},
        ],
        "policy": "policy.yaml",
        "credentials": "credentials.json",
        "pepper": "pepper",
        "run_dir": str(run_directory(state)),
        "audit": {"directory": "audit"},
        "sandbox": {"runsc": str(runsc)},
    }
    (state / "athanor.yaml").write_text(json.dumps(config))
    command = [sys.executable, "-m", "appliance.operator.cli", "serve", "--config", str(state / "athanor.yaml")]
    with (state / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
    try:
        assert process.stdout is not None
        line = process.stdout.readline() if select.select([process.stdout], [], [], START_TIMEOUT_S)[0] else b""
        assert line, (state / "log").read_text()[-3_000:]
        ready = json.loads(line)
        tokenizer = tokenizers.Tokenizer.from_file(str(models / "vectors" / "tokenizer.json"))
        addresses = ready["grpc"], ready["admin"]
        yield Served(ready["http"], keys["alpha"], reference, tokenizer, classes, state, *addresses)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(STOP_TIMEOUT_S)


@pytest.fixture(scope="module")
def served(runsc_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve them for all tests of this file."""
    with serving(tmp_path_factory.mktemp("state"), runsc_path) as started:
        yield started


def expected(served: Served, ids: list[int]) -> torch.Tensor:
    """The reference's last hidden state, of unit length."""
    with torch.no_grad():
        hidden = served.reference(torch.tensor([ids])).last_hidden_state[0]
    return torch.nn.functional.normalize(hidden[-1], dim=0)


TEXTS = ["what is Athanor?", "a", "the furnace that feeds itself " * 12]


def test_the_official_client_gets_the_references_vectors(served: Served) -> None:
    """One text, several, and ids; floats and base64; chunked and batched: the reference's vectors to 1e-4; fewer
    dimensions are the first numbers of unit length; usage is the exact count."""
    client = served.client()
    for encoding in ("float", "base64"):
        raw: Any = client.embeddings.create(model="vectors", input=TEXTS, encoding_format=encoding)
        assert raw.usage.prompt_tokens == sum(len(served.tokenizer.encode(text).ids) for text in TEXTS)
    answer = client.embeddings.create(model="vectors", input=TEXTS)
    for text, one in zip(TEXTS, answer.data, strict=True):
        wanted = expected(served, served.tokenizer.encode(text).ids)
        assert torch.allclose(torch.tensor(one.embedding), wanted, atol=1e-4)
    answer = client.embeddings.create(model="vectors", input=[[5, 6, 7], [8]])
    assert torch.allclose(torch.tensor(answer.data[0].embedding), expected(served, [5, 6, 7]), atol=1e-4)
    assert answer.usage.prompt_tokens == 4
    short = client.embeddings.create(model="vectors", input="a", dimensions=8).data[0].embedding
    wanted = torch.nn.functional.normalize(expected(served, served.tokenizer.encode("a").ids)[:8], dim=0)
    assert torch.allclose(torch.tensor(short), wanted, atol=1e-4)
    assert math.isclose(sum(value * value for value in short), 1, rel_tol=1e-5)


def test_each_kind_of_model_takes_its_own_requests(served: Served) -> None:
    """Chats with a model that embeds, and embeddings of one that generates, are typed 400s that name the model; so are
    texts beyond the context."""
    client = served.client()
    with pytest.raises(openai.BadRequestError, match="generates no text"):
        client.chat.completions.create(model="vectors", messages=[{"role": "user", "content": "hi"}])
    with pytest.raises(openai.BadRequestError, match="gives no embeddings"):
        client.embeddings.create(model="athanor-mini", input="hi")
    with pytest.raises(openai.BadRequestError, match="takes texts of at most 256 tokens"):
        client.embeddings.create(model="vectors", input=[[1] * 257])
    assert len(client.embeddings.create(model="vectors", input=[[1] * 256]).data[0].embedding) == 64
    runners = {model.id: getattr(model, "runner", None) for model in client.models.list()}
    assert runners == {
        "vectors": "embed",
        **dict.fromkeys(("classes", "templated", "moods"), "classify"),
        "converted": None,
        "athanor-mini": None,
    }


def logits(served: Served, ids: list[int]) -> torch.Tensor:
    """The reference's numbers of a text."""
    with torch.no_grad():
        found: torch.Tensor = served.classes(torch.tensor([ids])).logits[0]
    return found


def test_documents_are_ranked_by_the_reference_s_numbers(served: Served) -> None:
    """With a model that embeds by the cosine of the reference's vectors; with a classifier by the logistic function of
    its number, of both texts' ids in a row or of the chat template's text; the best first; usage is the exact count."""
    ids = [served.tokenizer.encode(text).ids for text in TEXTS]
    query = served.tokenizer.encode("which furnace?").ids
    body = {"query": "which furnace?", "documents": TEXTS}

    def ranked(model: str) -> tuple[dict[int, float], int]:
        found = served.post("/v1/rerank", model=model, **body).json()
        scores = {one["index"]: one["relevance_score"] for one in found["results"]}
        assert list(scores.values()) == sorted(scores.values(), reverse=True)
        assert [one["document"]["text"] for one in found["results"]] == [TEXTS[index] for index in scores]
        return scores, found["usage"]["total_tokens"]

    scores, used = ranked("vectors")
    for index, one in enumerate(ids):
        assert math.isclose(scores[index], float(expected(served, query) @ expected(served, one)), abs_tol=1e-4)
    assert used == len(query) + sum(map(len, ids))
    scores, used = ranked("classes")
    for index, one in enumerate(ids):
        assert math.isclose(scores[index], float(logits(served, query + one).sigmoid()), abs_tol=1e-4)
    assert used == 3 * len(query) + sum(map(len, ids))
    scores, _ = ranked("templated")
    for index, text in enumerate(TEXTS):
        laid_out = served.tokenizer.encode(f"<query>which furnace?\n<document>{text}\n", add_special_tokens=False).ids
        assert math.isclose(scores[index], float(logits(served, laid_out).sigmoid()), abs_tol=1e-4)


def test_pairs_and_labels(served: Served) -> None:
    """Scores of pairs in their order; probabilities of three labels, of which the configuration names two; a pair
    beyond the context, a model of another kind and a name that does not exist are typed, and the audit log has the
    operations with their tokens."""
    scores = served.post("/v1/score", model="classes", text_1="a", text_2=TEXTS).json()
    same = served.post("/v1/rerank", model="classes", query="a", documents=TEXTS, return_documents=False).json()
    ordered = sorted(same["results"], key=lambda one: int(one["index"]))
    for one, other in zip(scores["data"], ordered, strict=True):
        assert math.isclose(one["score"], other["relevance_score"], abs_tol=1e-5)
    found = served.post("/v1/classify", model="moods", input=TEXTS).json()
    for one in found["data"]:
        assert math.isclose(sum(one["probs"]), 1) and one["num_classes"] == 3
        assert one["label"] == ("bad", "good", "LABEL_2")[one["probs"].index(max(one["probs"]))]
    long = served.post("/v1/rerank", model="classes", query="a " * 200, documents=["b " * 200])
    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")
    for path, model, status in (
        ("/v1/classify", "vectors", 400),
        ("/v1/classify", "athanor-mini", 400),
        ("/v1/classify", "nothing", 404),
        ("/v1/embeddings", "classes", 400),
    ):
        assert served.post(path, model=model, input="x").status_code == status, (path, model)
    until = time.monotonic() + START_TIMEOUT_S
    while True:
        written = [one for one in audit_entries(served.state / "audit") if one.get("model") in ("classes", "moods")]
        charged = {one["operation"]: one for one in written if one.get("input_tokens")}
        if {"rerank", "score", "classify"} <= charged.keys():
            break
        assert time.monotonic() < until, written
        time.sleep(0.05)
    assert charged["classify"]["input_tokens"] == found["usage"]["prompt_tokens"]
    assert charged["score"]["output_tokens"] == 0


@pytest.mark.parametrize("name", ["curl", "score", "litellm", "cohere"])
def test_a_block_of_the_document_is_answered(root: Path, served: Served, tmp_path: Path, name: str) -> None:
    """As it stands in docs/rerank.md, with the variables of docs/clients.md."""
    language, text = blocks(root, "rerank.md")[name]
    variables = {"OPENAI_BASE_URL": served.http + "/v1", "OPENAI_API_KEY": served.key}
    client = Client(name, "agents")
    said = run(language, text, variables) if language == "sh" else client.run(text, variables, tmp_path)
    assert "score" in said and len(said) > 20, said


def test_a_converted_model_serves_the_answers_of_its_origin(served: Served) -> None:
    """Greedy answers of athanor-mini and of itself through a GGUF file are the same text, chats and completions."""
    client = served.client()
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


def asked_over_http(served: Served, client: httpx.Client, path: str) -> str:
    """Send a request; give the id in its answer, or of its header, where the API's answers have none."""
    answer = client.post(served.http + path, json=BODIES[path], headers={"authorization": f"Bearer {served.key}"})
    while answer.status_code == 429:
        time.sleep(min(RATE_WAIT_S, float(answer.headers["retry-after"])))
        answer = client.post(served.http + path, json=BODIES[path], headers={"authorization": f"Bearer {served.key}"})
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
def test_the_span_of_each_answer_has_the_id_that_its_client_saw(served: Served, count: int) -> None:
    """Over HTTP and gRPC, of every operation: the trace that the client's id finds is one whose generation has exactly
    this id, under a server span with scheme and path of HTTP or with the method of gRPC."""
    right = 0
    with grpc.insecure_channel(served.grpc) as channel, httpx.Client(timeout=60) as client:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        kinds = [*BODIES, "Generate", "Embed", "Rerank"]
        for number in range(count):
            kind = kinds[number % len(kinds)]
            over_http = kind in BODIES
            seen = asked_over_http(served, client, kind) if over_http else asked_over_grpc(stub, kind, served.key)
            traces = [seen, f"{seen}.1"] if kind == "/v1/completions" else [seen]
            right += all(shown_as(served, client, trace, seen, kind) for trace in traces)
    print(f"{right} of {count} ids are those that clients saw")
    assert right == count


def shown_as(served: Served, client: httpx.Client, trace: str, seen: str, kind: str) -> bool:
    """Whether a trace has the id that the client saw, and the attributes of its protocol."""
    found = client.get(f"{served.admin}/traces/{trace}").json()
    deadline = time.monotonic() + START_TIMEOUT_S
    while "spans" not in found:  # a stream's trace ends after its last event
        assert time.monotonic() < deadline, found
        found = client.get(f"{served.admin}/traces/{trace}").json()
    server, generation = (span["attributes"] for span in found["spans"][:2])
    if kind in BODIES:
        told = server["url.scheme"], server["url.path"], server["http.route"], server["http.request.method"]
        wanted: tuple[str, ...] = ("http", kind, kind, "POST")
    else:
        told = server["rpc.system.name"], server["rpc.method"]
        wanted = ("grpc", f"athanor.inference.v1.InferenceService/{kind}")
    model = generation["gen_ai.response.model"] == generation["gen_ai.request.model"]
    return told == wanted and model and generation["gen_ai.response.id"] == seen
