"""Two models on one text: the numbers are those of the engine, and of the definitions."""

from __future__ import annotations

import json
import math
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from appliance.common.catalog import embedded_model
from engine.config import EngineConfig
from engine.convert.compare import TextSums, compare, distributions, measure
from engine.core.offline import generate
from engine.errors import ModelLoadError
from engine.model.checkpoint.registry import load_model_config
from engine.model.checkpoint.weights import load_model
from engine.startup.load import load_engine
from engine.text.tokenizer import Tokenizer
from tests.engine.model.families.table import save_reference
from tests.engine.support import submit

pytestmark = pytest.mark.usefixtures("one_thread")

STORIES = "stories260K-hf"
FREE = 1 << 34


def shaken(source: Path, folder: Path, share: float) -> Path:
    """A model whose matrices have noise of a share of their size."""
    shutil.copytree(source, folder)
    generator = torch.Generator().manual_seed(3)
    tensors = load_file(source / "model.safetensors")
    for name, one in tensors.items():
        if one.ndim == 2:
            tensors[name] = one + share * one.std() * torch.randn(one.shape, generator=generator)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A story as the model writes them."""
    path = tmp_path / "text"
    path.write_text("Once upon a time, there was a little girl named Lily. She loved to play outside in the park. " * 9)
    return path


def test_perplexity_is_the_engine_s(shared_data: Path, text: Path, tmp_path: Path) -> None:
    """Perplexity of a text of one window is that of the engine's own log-probabilities of the same prompt; a model
    beside itself has no divergence, and more noise costs more."""
    folder = shared_data / "models" / STORIES
    ids = Tokenizer((folder / "tokenizer.json").read_bytes(), "").encode_text(text.read_text(), 4_096)[:200]
    engine = load_engine(EngineConfig(model_dir=str(folder), model_digest="00", kv_bytes=16 << 20), warm=False)
    parts = generate(engine, [submit(1, ids, 1, prompt_logprobs=0)])[1].prompts
    nats = [-one for part in parts for one in part.logprobs]
    same = compare(folder, folder, text, tokens=200, dtype="float32", free=FREE)
    assert same["tokens"] == len(nats) == 199
    assert same["perplexity"] == pytest.approx(math.exp(sum(nats) / len(nats)), rel=1e-4)
    assert (same["divergence"], same["agreement"]) == (0.0, 1.0)
    found = [
        compare(folder, shaken(folder, tmp_path / str(share), share), text, tokens=200, dtype="float32", free=FREE)
        for share in (0.02, 0.2)
    ]
    assert 0.0 < found[0]["divergence"] < found[1]["divergence"]  # type: ignore[operator]
    assert found[0]["agreement"] > found[1]["agreement"]  # type: ignore[operator]


@pytest.mark.parametrize(("family", "changes"), [("mistral", {"sliding_window": 8}), ("gpt_oss", {}), ("deepseek", {})])
def test_families_with_windows_caps_sinks_and_latents(family: str, changes: dict[str, object], tmp_path: Path) -> None:
    """Log-probabilities of families whose attention is not a Llama's are those of ``transformers``."""
    reference = save_reference(tmp_path, family, **changes)
    config = load_model_config(str(tmp_path))
    model = load_model(str(tmp_path), config, dtype="float32", device=torch.device("cpu"))
    ids = torch.randint(3, config.vocab_size, (40,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        found = torch.cat(list(distributions(model, ids, 40, lambda _: None)))
        exact = reference(ids.unsqueeze(0)).logits[0].float().log_softmax(-1)
    assert torch.allclose(found, exact, atol=1e-4)


def test_sums_are_those_of_the_definitions() -> None:
    """Divergence, nats and agreement of two distributions that are known by hand; an excluded token adds nothing."""
    base = torch.tensor([[0.5, 0.5, 0.0], [0.25, 0.25, 0.5], [1.0, 0.0, 0.0]]).log()
    other = torch.tensor([[0.25, 0.25, 0.5], [0.25, 0.25, 0.5], [0.0, 0.0, 1.0]]).log()
    sums = TextSums()
    found = measure(base, other, torch.tensor([2, 0, 1]), sums)
    assert found.tolist() == pytest.approx([math.log(2), 0.0])
    assert (sums.tokens, sums.same) == (2, 1)
    assert sums.nats == pytest.approx(math.log(2) + math.log(4))
    assert sums.other_nats == pytest.approx(math.log(4) + math.log(4))


def test_what_cannot_be_compared(shared_data: Path, text: Path, tmp_path: Path) -> None:
    """Other tokens, too little memory, a text of one token, no text: a sentence."""
    folder = shared_data / "models" / STORIES
    with pytest.raises(ModelLoadError, match="different tokens"):
        compare(folder, embedded_model(), text, tokens=50, dtype="float32", free=FREE)
    with pytest.raises(ModelLoadError, match="stories260K-hf: its weights take 1.0 MiB in float32, and 0.0 MiB"):
        compare(folder, folder, text, tokens=50, dtype="float32", free=1_000)
    (tmp_path / "short").write_text("")
    with pytest.raises(ModelLoadError, match="fewer than two tokens"):
        compare(folder, folder, tmp_path / "short", tokens=50, dtype="float32", free=FREE)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xff" * 9)
    with pytest.raises(ModelLoadError, match="is not text in UTF-8"):
        compare(folder, folder, tmp_path / "bytes", tokens=50, dtype="float32", free=FREE)


BREACHES = ["open('{out}', 'w')", "__import__('socket').socket()", "os.fork()"]


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """How the program ends, and what it had said, with each of the breaches: a process for each, which has the
    modules of one that loaded them, and locks itself down."""
    out = tmp_path_factory.mktemp("breaches") / "out"
    out.write_text("")
    code = (
        "import json, os, sys, socket\n"
        "import engine.convert.compare as program\n"
        "found = {}\n"
        "for breach in json.loads(sys.argv[1]):\n"
        "    reading, writing = os.pipe()\n"
        "    def look(*_, **__):\n"
        "        open('/etc/hostname').read()\n"
        "        os.write(1, b'read ')\n"
        "        exec(breach.format(out=sys.argv[2]))\n"
        "    program.compare = look\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        os.dup2(writing, 1)\n"
        "        os._exit(program.main(sys.argv[3:]))\n"
        "    os.close(writing)\n"
        "    said = os.read(reading, 99).decode()\n"
        "    found[breach] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said\n"
        "print(json.dumps(found))\n"
    )
    arguments = [json.dumps(BREACHES), str(out), "a", "b", "c", "9", "float32", "1", "9"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {breach: (status, said) for breach, (status, said) in json.loads(done.stdout).items()}


@pytest.mark.parametrize("breach", BREACHES)
def test_the_program_can_read_and_nothing_else(breach: str, endings: dict[str, tuple[int, str]]) -> None:
    """A taken-over program that writes a file, connects or starts something is ended; control: reading a file
    is not."""
    assert endings[breach] == (-signal.SIGSYS, "read ")
