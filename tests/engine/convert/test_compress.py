"""Folders with coded weights: the same tensors, the same answers, the same bytes whenever they are made."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.backends.native.coding import NativeCodec
from engine.backends.native.library import Library
from engine.backends.native.manifest import COMPRESSED, PLAIN
from engine.config import EngineConfig
from engine.convert.compress import CODED, LEAST_WEIGHTS, class_of, rewrite
from engine.convert.compress import PLAIN as AS_THEY_ARE
from engine.core.offline import generate
from engine.errors import ModelLoadError
from engine.model.checkpoint import weights
from engine.model.checkpoint.checklist import Home
from engine.model.checkpoint.registry import load_model_config
from engine.model.checkpoint.safetensors import SafetensorsFile
from engine.model.checkpoint.staging import Staging
from engine.model.checkpoint.weights import load_model, unread_model
from engine.model.coded.codec import NumpyCodec, WeightCodec
from engine.model.coded.layout import SUFFIX
from engine.model.layers.parallel import Parallel
from engine.startup.load import load_engine
from tests.engine.support import submit
from tests.short_model import short_model

CPU = torch.device("cpu")
WEIGHTS = "model.safetensors"

Open = Callable[..., Library]


def rewritten(source: Path, target: Path, form: str = CODED, codec: WeightCodec | None = None) -> dict[str, object]:
    """Rewrite a weight file in this process."""
    own = codec or NumpyCodec()
    output = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        with SafetensorsFile(source, lambda: own) as file:
            return rewrite(file, output, form, own)
    finally:
        os.close(output)


def folder_of(source: Path, folder: Path, library: Library) -> Path:
    """A model folder whose weights are coded."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns(WEIGHTS))
    rewritten(source / WEIGHTS, folder / WEIGHTS, codec=NativeCodec(library))
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, open_kernels: Open) -> Path:
    """One layer of athanor-mini, coded."""
    return folder_of(short_model(), tmp_path_factory.mktemp("coded") / "mini", open_kernels())


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory, shared_data: Path, open_kernels: Open) -> tuple[Path, Path]:
    """stories260K in bfloat16, as it is and coded."""
    source = tmp_path_factory.mktemp("stories") / "plain"
    shutil.copytree(shared_data / "models" / "stories260K-hf", source, ignore=shutil.ignore_patterns(WEIGHTS))
    published = load_file(shared_data / "models" / "stories260K-hf" / WEIGHTS)
    save_file({name: one.to(torch.bfloat16) for name, one in published.items()}, source / WEIGHTS)
    return source, folder_of(source, source.parent / "coded", open_kernels())


def answers(folder: Path, kernels: str, form: str) -> tuple[list[list[int]], list[str]]:
    """Greedy ids for some prompts in one form of the kernels, and the lines that the engine said."""
    values = {"model_dir": str(folder), "model_digest": "00", "kv_bytes": 16 << 20, "kernels": kernels, "form": form}
    said: list[str] = []
    engine = load_engine(EngineConfig(**values), warm=False, say=said.append)
    prompts = ([1, 300, 42], list(range(3, 60)))
    found = [generate(engine, [submit(number, prompt, 24)])[number].token_ids for number, prompt in enumerate(prompts)]
    return found, said


@pytest.mark.parametrize("model", ["mini", "stories"])
def test_answers_are_the_same(
    model: str, request: pytest.FixtureRequest, open_kernels: Open, kernel_dir: Callable[..., Path]
) -> None:
    """Greedy ids of the coded folder are those of the plain one, with plain operations, with compiled kernels, and with
    kernels that hold the weights compressed in memory; the engine says what decoded them."""
    if model == "mini":
        plain, small = short_model(), request.getfixturevalue("small")
    else:
        plain, small = request.getfixturevalue("stories")
    variant = open_kernels().variant
    compiled = [(str(kernel_dir()), variant), (str(kernel_dir()), variant + COMPRESSED)]
    for kernels, form in compiled if model == "mini" else [("", PLAIN), *compiled[1:]]:
        expected, before = answers(plain, kernels, form)
        found, said = answers(small, kernels, form)
        assert found == expected
        assert not any("decodes its weights" in line for line in before)
        word = "compiled kernels" if kernels else "numpy (slow"
        assert any(line.startswith(f"engine decodes its weights with {word}") for line in said)


@pytest.mark.parametrize("rank", [0, 1])
def test_every_part_is_the_same(small: Path, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank of two gets its part of the published numbers, whole rows and columns, in bfloat16 and in float32."""
    published, seen, read = load_file(short_model() / WEIGHTS), set(), weights._read

    def compare(found: weights.Found, name: str, home: Home, staging: Staging) -> None:
        read(found, name, home, staging)
        part = published[name][tuple(slice(*span) for span in home.part)]
        assert torch.equal(home.target, part.to(home.target.dtype)), name
        seen.add(name)

    monkeypatch.setattr(weights, "_read", compare)
    config, parallel = load_model_config(str(small)), Parallel(rank=rank, size=2, group=None)
    for dtype in ("auto", "float32"):
        seen.clear()
        load_model(str(small), config, dtype=dtype, device=CPU, packed=False, parallel=parallel)
        assert seen == set(published)


def test_memory_can_be_filled_later(small: Path) -> None:
    """A model whose memory is allocated first, as devices do it, gets the published numbers."""
    published = load_file(short_model() / WEIGHTS)
    with unread_model(str(small), load_model_config(str(small)), dtype="auto", device=CPU) as unread:
        unread.fill()
        for name, piece in unread.checklist.pieces.items():
            assert all(torch.equal(home.target, published[name]) for home in piece.homes)


@pytest.mark.parametrize("message", ["not finite", "has shape", "cannot be decoded", "lacks", "has no use for"])
def test_rules_for_tensors_hold_for_coded_ones(message: str, tmp_path: Path, open_kernels: Open) -> None:
    """NaN, another shape, damaged chunks, a missing tensor and one too many are refused by the tensor's name, as in a
    plain file; control: the tests above load the folder that they are made of."""
    name, codec = "model.layers.0.mlp.up_proj.weight", NativeCodec(open_kernels())
    tensors = load_file(short_model() / WEIGHTS)
    if message == "not finite":
        tensors[name][3, 4] = torch.nan
    elif message == "has shape":
        tensors[name] = tensors[name].t().contiguous()
    elif message == "lacks":
        del tensors[name]
    elif message == "has no use for":
        tensors[name + "s"] = tensors[name].clone()
    save_file(tensors, tmp_path / "plain")
    rewritten(tmp_path / "plain", tmp_path / WEIGHTS, codec=codec)
    if message == "cannot be decoded":
        with SafetensorsFile(tmp_path / WEIGHTS, lambda: codec) as file, (tmp_path / WEIGHTS).open("r+b") as damaged:
            damaged.seek(file.tensors[name].begin + 500)
            damaged.write(b"\xff" * 400)
    config = load_model_config(str(short_model()))
    with pytest.raises(ModelLoadError, match=message) as caught:
        load_model(str(tmp_path), config, dtype="auto", device=CPU, packed=False, open_codec=lambda: codec)
    assert name in str(caught.value)


def test_other_programs_see_what_the_file_is(small: Path) -> None:
    """The reference reader opens the file: rows of bytes under names that say so, plain tensors beside them, and the
    form in the metadata; nothing could take coded bytes for weights."""
    found, published = load_file(small / WEIGHTS), load_file(short_model() / WEIGHTS)
    names = {name.removesuffix(SUFFIX) for name in found}
    assert names == set(published)
    for name, tensor in found.items():
        if name.endswith(SUFFIX):
            assert (tensor.dtype, tensor.dim()) == (torch.uint8, 1)
        else:
            assert torch.equal(tensor, published[name])
            assert tensor.numel() < LEAST_WEIGHTS
    length = int.from_bytes((small / WEIGHTS).read_bytes()[:8], "little")
    header = json.loads((small / WEIGHTS).read_bytes()[8 : 8 + length])
    assert header["__metadata__"] == {"format": "pt", "coded_bf16": "1"}


def test_equal_sources_give_equal_bytes(small: Path, tmp_path: Path, open_kernels: Open) -> None:
    """Compiled codec and numpy, a second time, and coded weights coded again: the same file; expanded: the tensors."""
    plain = short_model() / WEIGHTS
    codec, content = NativeCodec(open_kernels()), (small / WEIGHTS).read_bytes()
    rewritten(plain, tmp_path / "numpy")
    rewritten(small / WEIGHTS, tmp_path / "again", codec=codec)
    assert (tmp_path / "numpy").read_bytes() == content == (tmp_path / "again").read_bytes()
    rewritten(small / WEIGHTS, tmp_path / "back", AS_THEY_ARE, codec)
    assert (tmp_path / "back").read_bytes() == plain.read_bytes()


def test_what_was_written_is_compared(tmp_path: Path) -> None:
    """A codec that loses a bit is found out before the conversion is done."""

    class Careless(NumpyCodec):
        def encode(self, code: object, weights: object) -> tuple[bytes, bytearray]:
            table, data = super().encode(code, weights)  # type: ignore[arg-type]
            data[-1] ^= 1
            return table, data

    with pytest.raises(ModelLoadError, match="was not written as it was read"):
        rewritten(short_model() / WEIGHTS, tmp_path / "out", codec=Careless())


def test_the_report_knows_classes(tmp_path: Path) -> None:
    """Each kind of tensor is counted by its class; dtypes besides bfloat16, small tensors and what does not become
    smaller stay as they are."""
    noise = torch.randint(-(1 << 15), 1 << 15, (100, 100), dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    save_file(
        {
            "model.embed_tokens.weight": torch.randn(64, 128).to(torch.bfloat16),
            "model.layers.0.mlp.up_proj.weight": torch.randn(64, 128),
            "model.layers.0.self_attn.q_proj.weight": noise,
            "model.layers.0.input_layernorm.weight": torch.ones(128).to(torch.bfloat16),
            "model.nothing": torch.zeros(0, 4).to(torch.bfloat16),
        },
        tmp_path / "a.safetensors",
    )
    summary = rewritten(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert (summary["tensors"], summary["coded"]) == (5, 1)
    classes = summary["classes"]
    assert isinstance(classes, dict)
    assert classes["embedding"][2] < 0.7 * classes["embedding"][1]
    assert all(one[1] == one[2] for name, one in classes.items() if name != "embedding")
    assert set(classes) == {"embedding", "MLP", "attention", "norms", "other"}
    assert class_of("model.layers.3.mlp.experts.7.down_proj.weight") == "experts"
    assert class_of("model.layers.3.self_attn.q_norm.weight") == "norms"
    assert class_of("lm_head.weight") == "head"


def test_names_that_would_meet_are_refused(tmp_path: Path) -> None:
    """A tensor that has the name of another one's coded form is refused, not overwritten."""
    weights = torch.randn(64, 128).to(torch.bfloat16)
    save_file({"w": weights, "w" + SUFFIX: torch.zeros(8)}, tmp_path / "a.safetensors")
    with pytest.raises(ModelLoadError, match="is not a coded tensor"):
        rewritten(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
