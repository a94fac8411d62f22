"""A model that embeds and one converted from GGUF and compressed, beside each other in real sandboxes, as a client
meets them."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import tokenizers
import torch
import transformers

from appliance.common.catalog import embedded_model
from appliance.operator.compression import CODED, compress
from appliance.operator.conversion import convert
from appliance.operator.demo import choose_ports, prepare_keys, prepare_policy, run_directory
from tests.engine.convert.write_gguf import Kind, write_embedded
from tests.system.conftest import START_TIMEOUT_S, STOP_TIMEOUT_S

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

    def client(self) -> openai.OpenAI:
        """The official client."""
        return openai.OpenAI(base_url=self.http + "/v1", api_key=self.key, max_retries=0, timeout=60)


def embedding_model(folder: Path) -> transformers.PreTrainedModel:
    """A small decoder in the layout of Qwen3-Embedding, with the embedded model's tokenizer."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=2_048,
        max_position_embeddings=256,
    )
    model = transformers.Qwen3Model(config).float().eval()
    with torch.no_grad():
        for one in model.parameters():
            one.copy_(torch.randn(one.shape) * 0.3)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((embedded_model() / name).read_bytes())
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
    """Serve three models from one configuration, for the time of the block."""
    os.chmod(state, 0o755)
    models = state / "models"
    reference = embedding_model(models / "vectors")
    scratch = state / "scratch"
    scratch.mkdir()
    converted_model(scratch, models / "converted")
    keys = prepare_keys(state)
    prepare_policy(state)
    http, rpc, admin = (f"127.0.0.1:{port}" for port in choose_ports((0, 0, 0)))
    small = {"kv_bytes": 16 << 20, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    config = {
        "listen": {"http": http, "grpc": rpc, "admin": admin},
        "models": [
            {"name": "vectors", "path": str(models / "vectors"), "runner": "embed", "truncates": True, **small},
            {"name": "converted", "path": str(models / "converted"), **small},
            {"name": "athanor-mini", "path": str(embedded_model()), **small},
        ],
        "policy": "policy.yaml",
        "credentials": "credentials.json",
        "pepper": "pepper",
        "run_dir": str(run_directory(state)),
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
        yield Served(ready["http"], keys["alpha"], reference, tokenizer)
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
    assert runners == {"vectors": "embed", "converted": None, "athanor-mini": None}


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
