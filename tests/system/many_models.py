"""One appliance with models of every kind, routes, adapters and issued tokens, for the files that use it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import tokenizers
import torch
import transformers

from appliance.common.catalog import embedded_model
from appliance.gateway.grpc.generated import inference_pb2_grpc
from appliance.operator.cli.key import create_key
from appliance.operator.compression import CODED, compress
from appliance.operator.conversion import convert
from appliance.operator.demo import choose_ports, prepare_keys, run_directory
from tests.appliance.gateway.front.issuers import AUDIENCE, ISSUER, Provider
from tests.engine.convert.write_gguf import Kind, write_embedded
from tests.system.conftest import PLAIN, START_TIMEOUT_S, STOP_TIMEOUT_S, begun_section
from tests.system.small_adapters import make_adapter

MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]


POLICY = """\
version: 1
tenants:
  alpha:
    credentials: ["key:alpha-1", "key:alpha-ended", "key:alpha-nothing", "oidc:corp:team-a"]
    models: ["*"]
    limits: {max_output_tokens: 4000}
  beta: {credentials: ["key:beta-1"], models: ["fast", "half", "embedding", "judge"]}
  gamma: {credentials: ["key:gamma-1"], models: ["athanor-next"]}
  epsilon: {credentials: ["key:epsilon-1"], models: [vectors, classes, templated, moods, converted, athanor-mini]}
  delta:
    credentials: ["key:delta-1"]
    models: ["athanor-mini", "help"]
    adapters: ["athanor-mini:support", "athanor-mini:broken"]
routes:
  fast: {to: [{model: athanor-mini}], fallback: [athanor-next]}
  half: {to: [{model: athanor-mini}, {model: athanor-next}]}
  embedding: {to: [{model: vectors}]}
  judge: {to: [{model: classes}]}
  of-others: {to: [{model: athanor-next}]}
  away: {to: [{model: never-served}]}
  help: {to: [{model: "athanor-mini:support"}]}
"""

PROVIDER = Provider()
"""Issuer of tokens."""

ISSUED = {"name": "corp", "issuer": ISSUER, "audiences": [AUDIENCE], "leeway_s": 0}


def limited_keys(state: Path) -> dict[str, str]:
    """Make a key that has expired, one that is limited to nothing, and those of further tenants; gives them by name."""
    table, pepper = state / "credentials.json", state / "pepper"
    past = datetime.now(UTC) - timedelta(seconds=1)
    return {
        "ended": create_key("alpha", "alpha-ended", table, pepper, expires=past).key,
        "nothing": create_key("alpha", "alpha-nothing", table, pepper, scopes=frozenset()).key,
        **{name: create_key(name, f"{name}-1", table, pepper).key for name in ("delta", "epsilon")},
    }


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


@dataclass
class Served:
    """A running appliance with two or three models of text, one of vectors and one to three classifiers."""

    ready: dict[str, Any]
    models: list[str]
    """Names of the models, as they are configured."""
    keys: dict[str, str]
    state: Path
    process: subprocess.Popen[bytes]
    reference: transformers.PreTrainedModel
    """Reference of the model of vectors."""
    classes: transformers.PreTrainedModel
    """Reference of the classifier with one label."""
    tokenizer: tokenizers.Tokenizer

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

    def openai(self, tenant: str) -> openai.OpenAI:
        """The official client."""
        client = openai.DefaultHttpxClient(verify=PLAIN)
        url = self.ready["http"] + "/v1"
        return openai.OpenAI(base_url=url, api_key=self.keys[tenant], max_retries=0, timeout=60, http_client=client)

    def stop(self) -> None:
        """End it."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.wait(STOP_TIMEOUT_S)


def wait(holds: Callable[[], bool], most_s: float = START_TIMEOUT_S) -> None:
    """Until something holds."""
    until = time.monotonic() + most_s
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.1)  # each look makes the appliance compute its status


@contextlib.contextmanager
def serving(state: Path, runsc: Path, *, whole: bool) -> Iterator[Served]:
    """Serve models from one configuration, for the time of the block: seven where they are ``whole``, else without the
    last three. The first two have the same files."""
    os.chmod(state, 0o755)
    models = state / "models"
    reference, classes = embedding_model(models / "vectors"), classifier(models / "classes")
    if whole:
        classifier(models / "moods", 3)
        shutil.copytree(models / "classes", models / "templated")
        (state / "scratch").mkdir()
        converted_model(state / "scratch", models / "converted")
    keys = prepare_keys(state)
    keys |= limited_keys(state)
    PROVIDER.add("k1")
    (state / "keys.json").write_bytes(PROVIDER.published())
    (state / "policy.yaml").write_text(POLICY)
    config = configuration(state, runsc, whole=whole)
    (state / "athanor.yaml").write_text(json.dumps(config))
    names = [one["name"] for one in config["models"]]
    command = [sys.executable, "-m", "appliance.operator.cli", "serve", "--config", str(state / "athanor.yaml")]
    with (state / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
    tokenizer = tokenizers.Tokenizer.from_file(str(models / "vectors" / "tokenizer.json"))
    try:
        assert process.stdout is not None
        line = process.stdout.readline() if select.select([process.stdout], [], [], START_TIMEOUT_S)[0] else b""
        assert line, (state / "log").read_text()[-3_000:]
        found = Served(json.loads(line), names, keys, state, process, reference, classes, tokenizer)
        wait(lambda: all(one["state"] == "ready" for one in found.status()["models"]))
        yield found
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(STOP_TIMEOUT_S)


def configuration(state: Path, runsc: Path, *, whole: bool) -> dict[str, Any]:
    """The appliance's configuration, with the models of the full count where it is to be ``whole``."""
    http, rpc, admin = (f"127.0.0.1:{port}" for port in choose_ports((0, 0, 0)))
    small = {"kv_bytes": 16 << 20, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    judge = {"runner": "classify", **small}
    path = {name: str(state / "models" / name) for name in ("vectors", "classes", "templated", "moods", "converted")}
    further = (
        {"name": "moods", "path": path["moods"], **judge, "labels": ["bad", "good"]},
        {"name": "templated", "path": path["templated"], **judge, "pairs": "template"},
        {"name": "converted", "path": path["converted"], **small},
    )
    digest = make_adapter(embedded_model(), state / "adapters" / "support")
    adapters = [
        {"name": "support", "path": str(state / "adapters" / "support"), "digest": digest},
        {"name": "broken", "path": str(state / "adapters" / "support"), "digest": "0" * 64},
    ]
    return {
        "listen": {"http": http, "grpc": rpc, "admin": admin},
        "models": [
            {"name": "athanor-mini", "path": str(embedded_model()), "adapters": adapters, **small},
            {"name": "athanor-next", "path": str(embedded_model()), **small},
            {"name": "vectors", "path": path["vectors"], "runner": "embed", "truncates": True, **small},
            {"name": "classes", "path": path["classes"], **judge},
            *(further if whole else ()),
        ],
        "policy": "policy.yaml",
        "credentials": "credentials.json",
        "pepper": "pepper",
        "run_dir": str(run_directory(state)),
        "audit": {"directory": "audit"},
        "tokens": [{**ISSUED, "keys_file": "keys.json"}],
        "sandbox": {"runsc": str(runsc), **begun_section()},
    }
