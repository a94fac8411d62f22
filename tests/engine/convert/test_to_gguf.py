"""Folders as GGUF files: the format's own library reads what was written, and the way back gives the same model."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from appliance.common.catalog import embedded_model
from engine.convert.rope import llama3_divisors
from engine.convert.to_gguf import KINDS, encode, export
from engine.errors import ModelLoadError
from engine.model.coded.codec import NumpyCodec
from tests.engine.convert.test_convert import converted, greedy
from tests.engine.convert.write_gguf import Kind, their_name, their_rows
from tests.engine.model.families.table import save_reference

WEIGHTS = "model.safetensors"
WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0, "layer_types": None}
TEXT = ("tokenizer.json", "tokenizer_config.json")


def exported(folder: Path, target: Path, dtype: str = "auto") -> dict[str, Any]:
    """Write a folder in this process."""
    fds = {one.name: os.open(one, os.O_RDONLY) for one in folder.iterdir() if one.suffix in (".json", ".safetensors")}
    output = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        return export(fds, output, dtype, NumpyCodec())
    finally:
        for one in (*fds.values(), output):
            os.close(one)


def random_folder(folder: Path, family: str, **config: Any) -> Path:
    """A small model that is random in every detail, with the embedded model's vocabulary."""
    save_reference(folder, family, vocab_size=4_096, hidden_size=64)
    for name in TEXT:
        shutil.copyfile(embedded_model() / name, folder / name)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return folder


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_there_and_back_again(family: str, tmp_path: Path) -> None:
    """A folder written as GGUF and converted back has every tensor with its bits, the same tokenizer, and gives the
    same ids; written again, the same bytes."""
    source = random_folder(tmp_path / "source", family)
    exported(source, tmp_path / "one.gguf")
    exported(source, tmp_path / "two.gguf")
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "two.gguf").read_bytes()
    converted(tmp_path / "one.gguf", tmp_path / "back", "float32")
    before, after = load_file(source / WEIGHTS), load_file(tmp_path / "back" / WEIGHTS)
    assert set(after) == set(before) - {"lm_head.weight"} | ({"lm_head.weight"} & set(after))
    assert all(torch.equal(before[name].float(), one) for name, one in after.items())
    spec = json.loads((tmp_path / "back" / TEXT[0]).read_text())
    assert spec == json.loads((embedded_model() / TEXT[0]).read_text())
    prompts = [[5, 6, 7, 8], list(range(20, 45))]
    assert greedy(tmp_path / "back", prompts, 12) == greedy(source, prompts, 12)


def test_the_format_s_own_library_reads_it(tmp_path: Path) -> None:
    """Names, types, shapes and bytes of all tensors are those that the library makes of the same numbers; the header's
    values are the model's."""
    exported(embedded_model(), tmp_path / "made.gguf", "q8_0")
    reader = gguf.GGUFReader(tmp_path / "made.gguf")
    source = {name: one.float().numpy() for name, one in load_file(embedded_model() / WEIGHTS).items()}
    tensors = {one.name: one for one in reader.tensors}
    assert set(tensors) == {their_name(name) for name in source}
    for name, data in source.items():
        found = tensors[their_name(name)]
        expected = Kind.F32 if data.ndim == 1 else Kind.Q8_0
        assert found.tensor_type == expected
        assert found.shape.tolist() == list(reversed(data.shape))
        rows = np.ascontiguousarray(their_rows(name, data, 12, 2))
        assert found.data.tobytes() == gguf.quants.quantize(rows, expected).tobytes()
    values = {key: field.contents() for key, field in reader.fields.items()}
    assert (values["general.architecture"], values["llama.block_count"]) == ("llama", 5)
    assert (values["tokenizer.ggml.pre"], values["tokenizer.ggml.eos_token_id"]) == ("gpt-2", 2)
    assert len(values["tokenizer.ggml.tokens"]) == 4_096


def test_numbers_are_encoded_as_the_library_encodes_them() -> None:
    """Zeros, halves, both signs, large and tiny numbers, in the bytes that the library makes; control: others."""
    generator = np.random.default_rng(5)
    rows = generator.standard_normal((64, 96)).astype(np.float32) * np.float32(10.0) ** generator.integers(
        -6, 4, (64, 1)
    )
    rows[0], rows[1, ::3] = 0, 0
    rows[2, :32] = np.arange(32) / 2
    rows[2, 0] = 127
    expected = gguf.quants.quantize(rows.astype(np.float32), Kind.Q8_0).tobytes()
    assert bytes(encode(rows.astype(np.float32), KINDS["q8_0"], "x")) == expected
    for dtype, kind in (("float16", Kind.F16), ("bfloat16", Kind.BF16), ("float32", Kind.F32)):
        assert (
            bytes(encode(rows.astype(np.float32), KINDS[dtype], "x"))
            == gguf.quants.quantize(rows.astype(np.float32), kind).tobytes()
        )
    assert bytes(encode(rows[::-1].astype(np.float32), KINDS["q8_0"], "x")) != expected


def test_rotations_that_are_scaled(tmp_path: Path) -> None:
    """Llama 3's divisors and yarn come back as the configuration has them."""
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama3["original_max_position_embeddings"] = 8_192
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    for number, scaling in enumerate((llama3, yarn)):
        source = random_folder(tmp_path / f"s{number}", "llama", rope_scaling=scaling, rope_parameters=None)
        values = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps({**values, "rope_theta": 500_000.0}))
        exported(source, tmp_path / "made.gguf")
        converted(tmp_path / "made.gguf", tmp_path / f"back{number}")
        found = json.loads((tmp_path / f"back{number}" / "config.json").read_text())
        assert found["rope_theta"] == 500_000.0
        assert {key: found["rope_scaling"][key] for key in scaling} == scaling
    assert len(llama3_divisors(500_000.0, 16, 8.0)) == 8


def test_what_cannot_be_written(tmp_path: Path) -> None:
    """Another architecture, a window, packed weights, a vocabulary of another kind, tokens that strip spaces, a way to
    split text without a name: a sentence, and no header."""
    spec = json.loads((embedded_model() / TEXT[0]).read_text())
    stripping = {**spec, "added_tokens": [{**spec["added_tokens"][0], "rstrip": True}]}
    split = {"type": "Split", "pattern": {"Regex": "x"}, "behavior": "Isolated", "invert": False}
    unknown = {**spec, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, spec["pre_tokenizer"]]}}
    source = random_folder(tmp_path / "source", "llama")
    window = random_folder(tmp_path / "window", "qwen2", **WINDOW)
    config = json.loads((source / "config.json").read_text())
    for folder, name, value, message in (
        (source, "config.json", {**config, "architectures": ["Gemma2ForCausalLM"]}, "architectures must name one of"),
        (source, "config.json", {**config, "quantization_config": {"quant_method": "awq"}}, "is packed"),
        (source, TEXT[0], {**spec, "model": {"type": "Unigram", "vocab": []}}, "byte-level BPE"),
        (source, TEXT[0], stripping, "strip spaces"),
        (source, TEXT[0], unknown, "has no name in GGUF"),
        (window, TEXT[0], spec, "cannot be written as GGUF"),
    ):
        before = (folder / name).read_bytes()
        (folder / name).write_text(json.dumps(value))
        with pytest.raises(ModelLoadError, match=message):
            exported(folder, tmp_path / "made.gguf")
        assert (tmp_path / "made.gguf").read_bytes() == b""
        (folder / name).write_bytes(before)
    tensors = load_file(source / WEIGHTS)
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**tensors, name: tensors[name] * torch.inf}, source / WEIGHTS)
    with pytest.raises(ModelLoadError, match="not finite"):
        exported(source, tmp_path / "made.gguf")
