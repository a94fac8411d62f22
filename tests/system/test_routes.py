"""Routes on a whole appliance with real models: every API by an alias, a share of requests, a model that dies."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from appliance.common.catalog import embedded_model
from appliance.gateway.grpc.generated import inference_pb2 as pb
from appliance.gateway.grpc.generated import inference_pb2_grpc
from appliance.operator.demo import choose_ports, prepare_keys, run_directory
from tests.system.conftest import PLAIN, START_TIMEOUT_S, STOP_TIMEOUT_S
from tests.system.test_audit import entries as audit_entries
from tests.system.test_embeddings import embedding_model

pytestmark = [pytest.mark.runsc, pytest.mark.timeout(180)]

POLICY = """\
version: 1
tenants:
  alpha: {credentials: ["key:alpha-1"], models: ["*"]}
  beta: {credentials: ["key:beta-1"], models: ["fast", "half", "embedding"]}
  gamma: {credentials: ["key:gamma-1"], models: ["athanor-next"]}
routes:
  fast: {to: [{model: athanor-mini}], fallback: [athanor-next]}
  half: {to: [{model: athanor-mini}, {model: athanor-next}]}
  embedding: {to: [{model: vectors}]}
  of-others: {to: [{model: athanor-next}]}
  away: {to: [{model: never-served}]}
"""

MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/completions": {"prompt": "hi", "max_tokens": 4},
    "/v1/responses": {"input": "hi", "max_output_tokens": 4},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/v1/embeddings": {"input": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [5, 6, 7]},
    "/v1/attestations": {"nonce": "9f86d081884c7d65"},
}
"""A body for each route that takes a model, without the model."""

WITHOUT_MODEL = {"/v1/files", "/v1/batches", "/v1/batches/{batch_id}/cancel"}
"""Routes with a body that take no model: lines of batches do, by the routes above."""

EMBEDS = {"/v1/embeddings", "Embed"}

MESSAGES_OF = {
    "Generate": lambda model: pb.GenerateRequest(model=model, text="hi", max_output_tokens=4),
    "Embed": lambda model: pb.EmbedRequest(model=model, inputs=[pb.EmbedInput(text="hi")]),
    "Attest": lambda model: pb.AttestRequest(model=model, nonce="9f86d081884c7d65"),
    "CountTokens": lambda model: pb.CountTokensRequest(model=model, text="hi"),
    "GetModel": lambda model: pb.GetModelRequest(model=model),
}
"""A message for each method that takes a model."""


@dataclass
class Served:
    """A running appliance with two models of text and one of vectors."""

    ready: dict[str, Any]
    keys: dict[str, str]
    state: Path

    def post(self, tenant: str, path: str, **body: Any) -> httpx.Response:
        """Send one request."""
        headers = {"authorization": f"Bearer {self.keys[tenant]}"}
        return httpx.post(self.ready["http"] + path, json=body, headers=headers, timeout=60, verify=PLAIN)

    def get(self, tenant: str, path: str) -> httpx.Response:
        """Ask for one document."""
        headers = {"authorization": f"Bearer {self.keys[tenant]}"}
        return httpx.get(self.ready["http"] + path, headers=headers, timeout=60, verify=PLAIN)

    def call(self, tenant: str, method: str, message: Any) -> list[Any]:
        """The messages of one gRPC call."""
        with grpc.insecure_channel(self.ready["grpc"].removeprefix("http://")) as channel:
            called = getattr(inference_pb2_grpc.InferenceServiceStub(channel), method)
            metadata = (("authorization", f"Bearer {self.keys[tenant]}"),)
            answer = called(message, metadata=metadata, timeout=60)
            return list(answer) if method == "Generate" else [answer]

    def status(self) -> dict[str, Any]:
        """What the admin listener says."""
        return dict(httpx.get(self.ready["admin"] + "/status", timeout=10, verify=PLAIN).json())

    def engine(self, model: str) -> dict[str, Any]:
        """State of a model's engine sandbox."""
        return dict(next(one["engine"] for one in self.status()["models"] if one["name"] == model))

    def metrics(self) -> str:
        """A scrape."""
        return httpx.get(self.ready["admin"] + "/metrics", timeout=10, verify=PLAIN).text


@pytest.fixture(scope="module")
def served(runsc_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve the embedded model under two names, and a model of vectors."""
    state = tmp_path_factory.mktemp("state")
    os.chmod(state, 0o755)
    embedding_model(state / "models" / "vectors")
    keys = prepare_keys(state)
    (state / "policy.yaml").write_text(POLICY)
    http, rpc, admin = (f"127.0.0.1:{port}" for port in choose_ports((0, 0, 0)))
    small = {"kv_bytes": 16 << 20, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    config = {
        "listen": {"http": http, "grpc": rpc, "admin": admin},
        "models": [
            {"name": "athanor-mini", "path": str(embedded_model()), **small},
            {"name": "athanor-next", "path": str(embedded_model()), **small},
            {"name": "vectors", "path": str(state / "models" / "vectors"), "runner": "embed", **small},
        ],
        "policy": "policy.yaml",
        "credentials": "credentials.json",
        "pepper": "pepper",
        "run_dir": str(run_directory(state)),
        "audit": {"directory": "audit"},
        "sandbox": {"runsc": str(runsc_path)},
    }
    (state / "athanor.yaml").write_text(json.dumps(config))
    command = [sys.executable, "-m", "appliance.operator.cli", "serve", "--config", str(state / "athanor.yaml")]
    with (state / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
    try:
        assert process.stdout is not None
        line = process.stdout.readline() if select.select([process.stdout], [], [], START_TIMEOUT_S)[0] else b""
        assert line, (state / "log").read_text()[-3_000:]
        found = Served(json.loads(line), keys, state)
        wait(lambda: all(one["state"] == "ready" for one in found.status()["models"]))
        yield found
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(STOP_TIMEOUT_S)


def wait(holds: Callable[[], bool], most_s: float = START_TIMEOUT_S) -> None:
    """Until something holds."""
    until = time.monotonic() + most_s
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_every_route_of_http_takes_an_alias(served: Served) -> None:
    """The server itself names its routes to a tenant that asks for another one. Each that takes a body is tried by an
    alias; one that comes later is missing here until it is tried too. By the names of the models, which the tenant may
    not use, all of them refuse."""
    told = served.get("beta", "/no-such-route").json()["error"]["message"]
    routes = [part.split() for part in told.partition("served are ")[2].split(", ")]
    assert {path for method, path in routes if method == "POST"} - WITHOUT_MODEL == set(BODIES)
    for path, body in BODIES.items():
        alias, model = ("embedding", "vectors") if path in EMBEDS else ("fast", "athanor-mini")
        answer = served.post("beta", path, model=alias, **body)
        assert answer.status_code == 200, (path, answer.text)
        assert answer.json().get("model", model) == model
        assert served.post("beta", path, model=model, **body).status_code == 404
        assert served.post("alpha", path, model=model, **body).status_code == 200


def test_every_method_of_grpc_takes_an_alias(served: Served) -> None:
    """As above, with the methods of the service whose messages have a model."""
    service = pb.DESCRIPTOR.services_by_name["InferenceService"]
    takes = {method.name for method in service.methods if "model" in method.input_type.fields_by_name}
    assert takes == set(MESSAGES_OF)
    assert {method.name for method in service.methods} - takes == {"ListModels"}
    for method, make in MESSAGES_OF.items():
        alias, model = ("embedding", "vectors") if method in EMBEDS else ("fast", "athanor-mini")
        first = served.call("beta", method, make(alias))[0]
        if method in ("Generate", "Embed"):
            assert (first.started.model if method == "Generate" else first.model) == model
        with pytest.raises(grpc.RpcError) as refused:
            served.call("beta", method, make(model))
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        served.call("alpha", method, make(model))
    listed = [one.name for one in served.call("beta", "ListModels", pb.ListModelsRequest())[0].models]
    assert listed == ["embedding", "fast", "half"]


def answer_of(served: Served, tenant: str, name: str, **fields: Any) -> str:
    """The model that answered a chat; an error's status in its place."""
    answer = served.post(tenant, "/v1/chat/completions", model=name, messages=MESSAGES, max_tokens=2, **fields)
    return str(answer.json()["model"]) if answer.status_code == 200 else str(answer.status_code)


def test_shares_and_keys(served: Served) -> None:
    """Both models of a route answer some of 24 requests; those with one key are all answered by one."""
    assert {answer_of(served, "beta", "half") for _ in range(24)} == {"athanor-mini", "athanor-next"}
    for key in ("chat-1", "chat-2"):
        assert len({answer_of(served, "beta", "half", prompt_cache_key=key) for _ in range(6)}) == 1


def test_the_fallback_answers_while_a_sandbox_is_away(served: Served) -> None:
    """The engine is killed: the route's requests are answered all the same, by the fallback, until the engine is back
    and answers them again. The tenant learns it from the answer's model; the audit log, the counter and the trace have
    both names."""
    assert answer_of(served, "beta", "fast") == "athanor-mini"
    before = served.engine("athanor-mini")
    os.kill(before["pid"], signal.SIGKILL)
    # A request that is sent before the gateway knows waits for the engine that comes, as any request does.
    wait(lambda: served.engine("athanor-mini")["state"] != "ready")
    seen: list[str] = []
    until = time.monotonic() + START_TIMEOUT_S
    while "athanor-next" not in seen or seen[-1] != "athanor-mini":
        assert time.monotonic() < until, seen
        seen.append(answer_of(served, "beta", "fast"))
    assert set(seen) == {"athanor-mini", "athanor-next"}, "no request failed"
    assert served.engine("athanor-mini")["generation"] > before["generation"]
    counted = [line for line in served.metrics().splitlines() if line.startswith("athanor_route_choices_total{")]
    assert any('"fast"' in line and '"athanor-next"' in line and '"unready"' in line for line in counted)

    def logged() -> set[tuple[str, str]]:
        entries = audit_entries(served.state / "audit")
        return {(one["alias"], one["model"]) for one in entries if one["kind"] == "request"}

    wait(lambda: {("fast", "athanor-mini"), ("fast", "athanor-next")} <= logged(), 10)


def test_names_of_others_are_like_no_name(served: Served) -> None:
    """What a tenant may not use is told apart by nothing: a model that its routes lead to, a route of others, a name
    that nobody has; in chats, embeddings, counts, and in the list of models, by HTTP and gRPC. A route of its own that
    leads nowhere (control) is told: it is known to it."""
    names = ("athanor-next", "of-others", "vectors", "nobody-s-name", "away")
    for path, body in BODIES.items():
        answers = [served.post("beta", path, model=name, **body) for name in names]
        told = {
            (one.status_code, one.text.replace(name, "?"))
            for one, name in zip(map(without_id, answers), names, strict=True)
        }
        assert len(told) == 1, path
        assert answers[0].status_code == 404
    looked = [served.get("beta", f"/v1/models/{name}") for name in names]
    assert len({(one.status_code, without_id(one).text.replace(name, "?")) for one, name in zip(looked, names)}) == 1
    for method, make in MESSAGES_OF.items():
        errors = set()
        for name in names:
            with pytest.raises(grpc.RpcError) as refused:
                served.call("beta", method, make(name))
            errors.add((refused.value.code(), refused.value.details().replace(name, "?")))
        assert len(errors) == 1, method
    assert answer_of(served, "alpha", "away") == "503"


@dataclass
class Shown:
    """What of an answer is the same each time."""

    status_code: int
    text: str


def without_id(answer: httpx.Response) -> Shown:
    """An answer without its request's id."""
    return Shown(answer.status_code, answer.text.replace(answer.headers["x-request-id"], "ID"))
