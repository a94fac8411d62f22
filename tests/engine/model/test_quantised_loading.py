"""Packed checkpoints through the loader: the model that the packed numbers mean, whole and in parts; hostile ones."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from engine.errors import ModelLoadError
from engine.model.checkpoint.staging import Staging
from engine.model.checkpoint.weights import INDEX_FILE, SINGLE_FILE
from engine.model.layers.parallel import Parallel
from tests.engine.model import test_quantised as formats
from tests.engine.model.test_quantised_scheme import DEEPSEEK_V3, QWEN_AWQ, QWEN_GPTQ, compressed
from tests.engine.model.test_weights import CPU, loaded, tensors_for
from tests.engine.support import model_config

CONFIG = model_config(hidden_size=64, intermediate_size=96, num_heads=8, num_kv_heads=4)
Tensors = dict[str, torch.Tensor]


def pack(method: str, weight: torch.Tensor, seed: int) -> tuple[Tensors, torch.Tensor]:
    """Random packed numbers in the shape of a matrix, by suffix; and what they mean."""
    outputs, inputs = weight.shape
    if method == "fp8":
        stored = formats.fp8_bytes((outputs, inputs), "F8_E4M3", seed)
        scale = formats.random(-(-outputs // 16), -(-inputs // 16), seed=seed).abs()
        table = torch.tensor([formats.e4m3(one) for one in range(256)])
        spread = scale.repeat_interleave(16, 0)[:outputs].repeat_interleave(16, 1)[:, :inputs]
        parts = {"weight": stored.view(torch.float8_e4m3fn), "weight_scale_inv": scale}
        return parts, table[stored.long()] * spread
    if method == "int8":
        numbers = formats.whole(-127, 128, outputs, inputs, seed=seed).to(torch.int8)
        scale = formats.random(outputs, 1, seed=seed).abs()
        return {"weight": numbers, "weight_scale": scale}, numbers.float() * scale
    groups = formats.whole(0, 16, inputs // 16, outputs, seed=seed + 1)
    numbers, scales = formats.whole(0, 16, inputs, outputs, seed=seed), formats.random(inputs // 16, outputs, seed=seed)
    ids = torch.arange(inputs) // 16
    if method == "awq":
        order = [8 * word + place for word in range(outputs // 8) for place in (0, 2, 4, 6, 1, 3, 5, 7)]
        parts = {
            "qweight": formats.pack_rows(numbers[:, order], 4),
            "qzeros": formats.pack_rows(groups[:, order], 4),
            "scales": scales,
        }
        return parts, ((numbers - groups[ids]) * scales[ids]).t()
    if method == "gptq":
        ids = ids[torch.randperm(inputs, generator=torch.Generator().manual_seed(seed))]
        parts = {
            "qweight": formats.pack_rows(numbers.t(), 4).t().contiguous(),
            "qzeros": formats.pack_rows((groups - 1) % 16, 4),
            "scales": scales,
            "g_idx": ids.int(),
        }
        return parts, ((numbers - groups[ids]) * scales[ids]).t()
    parts = {
        "weight_packed": formats.pack_rows(numbers.t(), 4),
        "weight_scale": scales.t().contiguous(),
        "weight_shape": torch.tensor([outputs, inputs]),
    }
    return parts, ((numbers - 8) * scales[ids]).t()


METHODS: dict[str, dict[str, Any]] = {
    "fp8": {**DEEPSEEK_V3, "weight_block_size": [16, 16]},
    "int8": compressed("int-quantized"),
    "int4": compressed("pack-quantized", num_bits=4, group_size=16, strategy="group"),
    "awq": {**QWEN_AWQ, "group_size": 16},
    "gptq": {**QWEN_GPTQ, "group_size": 16, "desc_act": True},
}


def checkpoint(folder: Path, method: str) -> tuple[Tensors, Tensors]:
    """A model whose layers' matrices are packed, on disk: the tensors of the file, and what they mean."""
    stored: Tensors = {}
    meant: Tensors = {}
    for number, (name, tensor) in enumerate(tensors_for(CONFIG).items()):
        if "proj" not in name:
            stored[name] = meant[name] = tensor
            continue
        parts, meant[name] = pack(method, tensor, number)
        stored |= {name.removesuffix("weight") + suffix: part.contiguous() for suffix, part in parts.items()}
    write(folder, stored, METHODS[method])
    return stored, meant


def write(folder: Path, stored: Tensors, method: dict[str, Any] | None) -> None:
    """The files of a model, as far as the loader reads them."""
    save_file({name: one.contiguous() for name, one in stored.items()}, folder / SINGLE_FILE)
    (folder / "config.json").write_text(json.dumps({"quantization_config": method}))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_packed_checkpoints_load_as_what_they_mean(method: str, dtype: str, tmp_path: Path) -> None:
    """Every matrix has the numbers that its format says, rounded once to the engine's dtype."""
    _stored, meant = checkpoint(tmp_path, method)
    found = loaded(tmp_path, CONFIG, dtype)
    assert found.keys() == meant.keys()
    for name, one in meant.items():
        assert torch.equal(found[name], one.to(found[name].dtype)), name


def test_exceptions_lie_there_as_they_are(tmp_path: Path) -> None:
    """A matrix in a float dtype beside packed ones is taken as it is, whatever the lists say; activations' scales are
    passed over."""
    stored, meant = checkpoint(tmp_path, "int4")
    module = "model.layers.1.mlp.up_proj."
    plain = formats.random(96, 64)
    kept = {name: one for name, one in stored.items() if not name.startswith(module)}
    write(tmp_path, {**kept, f"{module}weight": plain, f"{module}input_scale": torch.ones(1)}, METHODS["int4"])
    found = loaded(tmp_path, CONFIG)
    assert torch.equal(found[f"{module}weight"], plain)
    assert torch.equal(found["model.layers.0.mlp.up_proj.weight"], meant["model.layers.0.mlp.up_proj.weight"])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_of_two_holds_its_part(
    method: str, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loaded as one of two ranks, every part of a matrix is that part of what the whole means."""
    from engine.model.checkpoint import weights

    _stored, meant = checkpoint(tmp_path, method)
    seen: list[str] = []
    read = weights._read

    def compare(found: weights.Found, name: str, home: Any, staging: Staging) -> None:
        read(found, name, home, staging)
        part = meant[name][tuple(slice(*span) for span in home.part)]
        assert torch.equal(home.target, part), name
        seen.append(name)

    monkeypatch.setattr(weights, "_read", compare)
    parallel = Parallel(rank=rank, size=2, group=None)
    weights.load_model(str(tmp_path), CONFIG, dtype="auto", device=CPU, packed=False, parallel=parallel)
    assert set(seen) == set(meant)


def broken(name: str, stored: Tensors) -> Tensors:
    """The same with something wrong."""
    key = "model.layers.1.mlp.up_proj."
    if name == "has no use for":
        return {**stored, f"{key}weight_magic": torch.ones(1)}
    if name == "there twice":
        return {**stored, f"{key}weight": torch.ones(96, 64)}
    if name == "lacks":
        return {other: one for other, one in stored.items() if other != f"{key}weight_scale"}
    if name == "has shape":
        return {**stored, f"{key}weight_scale": stored[f"{key}weight_scale"][:, :2]}
    damaged = stored[f"{key}weight_scale"].clone()
    damaged[3, 1] = math.nan
    return {**stored, f"{key}weight_scale": damaged}


@pytest.mark.parametrize("name", ["has no use for", "there twice", "lacks", "has shape", "not finite"])
def test_a_wrong_part_is_named(name: str, tmp_path: Path) -> None:
    """A part too many, too few, misshaped or with a NaN: the message says which."""
    stored, _meant = checkpoint(tmp_path, "int4")
    write(tmp_path, broken(name, stored), METHODS["int4"])
    with pytest.raises(ModelLoadError, match=name) as caught:
        loaded(tmp_path, CONFIG)
    assert "mlp.up_proj.weight" in str(caught.value)


def test_packed_numbers_without_a_configuration_are_refused(tmp_path: Path) -> None:
    """Nothing is guessed from names: without quantization_config packed tensors are extra ones."""
    stored, _meant = checkpoint(tmp_path, "int4")
    write(tmp_path, stored, None)
    with pytest.raises(ModelLoadError, match="lacks"):
        loaded(tmp_path, CONFIG)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_plain_weights_that_are_not_finite_are_refused_by_name(value: float, tmp_path: Path) -> None:
    """A NaN or an infinity anywhere in a plain checkpoint, and a number that half precision cannot hold."""
    tensors = tensors_for()
    key = "model.layers.1.mlp.up_proj.weight"
    tensors[key][47, 31] = value
    save_file(tensors, tmp_path / SINGLE_FILE)
    with pytest.raises(ModelLoadError, match=rf"{key} holds a number that is not finite"):
        loaded(tmp_path)
    tensors[key][47, 31] = 1e6
    save_file(tensors, tmp_path / SINGLE_FILE)
    assert loaded(tmp_path)[key][47, 31] == 1e6
    with pytest.raises(ModelLoadError, match="too large for float16"):
        loaded(tmp_path, dtype="float16")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=10,
)
file_names = st.sampled_from(
    [
        SINGLE_FILE,
        "model-00001-of-00002.safetensors",
        "absent.safetensors",
        "../x.safetensors",
        "/etc/passwd",
        ".",
        "",
        "a\x00.safetensors",
        "x" * 300 + ".safetensors",
        "config.json",
        "\u4f60.safetensors",
    ]
)


@settings(
    deadline=None, derandomize=True, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    mapping=st.dictionaries(st.text(max_size=8), file_names | json_values, max_size=4) | json_values,
    wrapped=st.booleans(),
    raw=st.binary(max_size=40),
)
def test_no_index_gets_past_or_crashes(tmp_path: Path, mapping: object, wrapped: bool, raw: bytes) -> None:
    """Whatever an index says gives a load error, or the model that the files hold; nothing outside is opened."""
    expected = tensors_for()
    if not (tmp_path / SINGLE_FILE).exists():
        save_file(expected, tmp_path / SINGLE_FILE)
    content = json.dumps({"weight_map": mapping} if wrapped else mapping).encode() if mapping is not None else raw
    (tmp_path / INDEX_FILE).write_bytes(content)
    try:
        found = loaded(tmp_path)
    except ModelLoadError:
        return
    assert isinstance(mapping, dict)
    assert set(mapping.values()) == {SINGLE_FILE}
    assert all(torch.equal(found[name], one) for name, one in expected.items())


@settings(
    deadline=None, derandomize=True, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_no_damage_to_a_packed_checkpoint_crashes(data: st.DataObject, tmp_path: Path) -> None:
    """Bytes changed anywhere in a packed file give a load error or finite weights; never another exception."""
    method = data.draw(st.sampled_from(sorted(METHODS)))
    folder = tmp_path / method
    if not folder.exists():
        folder.mkdir()
        checkpoint(folder, method)
        (folder / SINGLE_FILE).rename(folder / "sound")
    content = bytearray((folder / "sound").read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (folder / SINGLE_FILE).write_bytes(content)
    try:
        found = loaded(folder, CONFIG)
    except ModelLoadError:
        return
    assert all(one.isfinite().all() for one in found.values())
