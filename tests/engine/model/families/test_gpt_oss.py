"""gpt-oss as it is published: experts in mxfp4, everything else in plain numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ModelLoadError
from engine.model.checkpoint.registry import build_model, load_model_config
from engine.model.checkpoint.weights import SINGLE_FILE, load_model
from engine.model.layers.blocks import Layer
from engine.model.layers.parallel import Parallel
from tests.engine.model.families.published_moe import GPT_OSS_20B
from tests.engine.model.families.table import save_reference
from tests.engine.model.families.test_families import run_and_compare

pytestmark = pytest.mark.usefixtures("one_thread")

EXPERTS = 6
SIZES = {"gate_up_proj": (64, 32), "down_proj": (32, 32)}
"""Outputs and inputs of an expert's maps."""


def packed_reference(folder: Path) -> torch.nn.Module:
    """A random model whose experts are written in mxfp4, and the reference with the numbers that they mean."""
    # Imported here: it loads torch's distribution and compiler, which every worker would do while it collects.
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    reference = save_reference(folder, "gpt_oss", intermediate_size=32)
    tensors = load_file(folder / SINGLE_FILE)
    generator = torch.Generator().manual_seed(5)
    for index, layer in enumerate(reference.model.layers):
        for name, (outputs, inputs) in SIZES.items():
            shape = (EXPERTS, outputs, inputs // 32, 16)
            blocks = torch.randint(0, 256, shape, generator=generator).to(torch.uint8)
            scales = torch.randint(122, 126, shape[:3], generator=generator).to(torch.uint8)
            stem = f"model.layers.{index}.mlp.experts.{name}"
            del tensors[stem]
            tensors[f"{stem}_blocks"], tensors[f"{stem}_scales"] = blocks, scales
            with torch.no_grad():
                meant = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
                getattr(layer.mlp.experts, name).copy_(meant)
    save_file(tensors, folder / SINGLE_FILE)
    described = json.loads((folder / "config.json").read_text())
    described["quantization_config"] = GPT_OSS_20B["quantization_config"]
    (folder / "config.json").write_text(json.dumps(described))
    return reference


def test_packed_experts_give_the_logits_of_what_they_mean(tmp_path: Path) -> None:
    """Logits to 1e-4 and ids of the reference that holds the decoded numbers."""
    run_and_compare(packed_reference(tmp_path), tmp_path, 7, 24, "")


def experts_of(layer: Layer) -> Any:
    """The experts of a layer's second half."""
    return layer.sublayers[1].block.experts


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_a_rank_decodes_its_experts_alone(rank: int, tmp_path: Path) -> None:
    """Of two heads and six experts each rank of two has half, decoded to the same numbers; a rank of four has one or
    two."""
    packed_reference(tmp_path)
    description = load_model_config(str(tmp_path))
    cpu, size = torch.device("cpu"), 2 if rank < 2 else 4
    parallel = Parallel(rank=rank, size=size)
    whole, part = (
        load_model(str(tmp_path), description, dtype="float32", device=cpu, packed=False, parallel=one)
        for one in (Parallel(), parallel)
    )
    first, last = parallel.share(EXPERTS)
    assert last > first
    for ours, theirs in zip(whole.layers, part.layers, strict=True):
        held = experts_of(theirs).held
        assert len(held) == last - first
        for mine, yours in zip(experts_of(ours).held[first:last], held, strict=True):
            assert torch.equal(mine.gate_up.loaded, yours.gate_up.loaded)
            assert torch.equal(mine.down.loaded, yours.down.loaded)
            assert mine.down.loaded.std() > 0.05
    assert len(build_model(description, torch.float32, cpu, parallel)[1].pieces) > 10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("no scales", "gate_up_proj_scales"),
        ("short", "gate_up_proj_blocks.* has shape"),
        ("floats", "gate_up_proj_scales.* is F32"),
        ("not a number", "holds a scale that is not a number"),
        ("both", "is there twice"),
        ("no configuration", "lacks .*mlp.experts.gate_up_proj"),
        ("spare", "gate_up_proj_zeros"),
    ],
)
def test_damaged_experts_are_refused(change: str, message: str, tmp_path: Path) -> None:
    """A part that is missing, misshaped, doubled or senseless is an error that names it."""
    packed_reference(tmp_path)
    tensors = load_file(tmp_path / SINGLE_FILE)
    stem = "model.layers.0.mlp.experts.gate_up_proj"
    if change == "no scales":
        del tensors[f"{stem}_scales"]
    elif change == "short":
        tensors[f"{stem}_blocks"] = tensors[f"{stem}_blocks"][:, :-1].contiguous()
    elif change == "floats":
        tensors[f"{stem}_scales"] = tensors[f"{stem}_scales"].float()
    elif change == "not a number":
        tensors[f"{stem}_scales"][3, 0, 0] = 255
    elif change == "both":
        tensors[stem] = torch.zeros(EXPERTS, 32, 64)
    elif change == "spare":
        tensors[f"{stem}_zeros"] = tensors[f"{stem}_scales"].clone()
    else:
        described = json.loads((tmp_path / "config.json").read_text())
        del described["quantization_config"]
        (tmp_path / "config.json").write_text(json.dumps(described))
    save_file(tensors, tmp_path / SINGLE_FILE)
    with pytest.raises(ModelLoadError, match=message):
        load_model(
            str(tmp_path), load_model_config(str(tmp_path)), dtype="float32", device=torch.device("cpu"), packed=False
        )
