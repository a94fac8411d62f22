"""Checkpoints of text and vision: the text part runs, the rest may be there and is not read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ModelLoadError
from engine.model.checkpoint.registry import load_model_config
from engine.model.checkpoint.weights import SINGLE_FILE, load_model
from tests.engine.model.families.table import WITH_VISION, save_reference
from tests.engine.model.families.test_families import run_and_compare

pytestmark = pytest.mark.usefixtures("one_thread")

VISION = {
    "Llama4ForConditionalGeneration": ("vision_model.patch_embedding.weight", "multi_modal_projector.linear_1.weight"),
    "KimiK25ForConditionalGeneration": ("vision_tower.patch_embed.proj.weight", "mm_projector.proj.0.weight"),
}
"""Names of tensors that only pictures need."""


def dressed(folder: Path, architecture: str) -> torch.nn.Module:
    """A model of text, written as the text part of one that sees."""
    reference = save_reference(folder, WITH_VISION[architecture])
    text = {f"language_model.{name}": tensor for name, tensor in load_file(folder / SINGLE_FILE).items()}
    vision = {name: torch.ones(3, 3) for name in VISION[architecture]}
    save_file({**text, **vision}, folder / SINGLE_FILE)
    inner = json.loads((folder / "config.json").read_text())
    del inner["architectures"]
    whole = {"architectures": [architecture], "text_config": inner, "vision_config": {"hidden_size": 3}}
    (folder / "config.json").write_text(json.dumps(whole))
    return reference


@pytest.mark.parametrize("architecture", WITH_VISION)
def test_the_text_part_agrees_with_the_text_model(architecture: str, tmp_path: Path) -> None:
    """Logits and ids of the reference's model of text, and stop ids out of the part about text."""
    reference = dressed(tmp_path, architecture)
    run_and_compare(reference, tmp_path, 7, 24, "")
    assert load_model_config(str(tmp_path)).stop_ids == {2}


@pytest.mark.parametrize("architecture", WITH_VISION)
@pytest.mark.parametrize(
    ("name", "message"),
    [("audio_model.weight", "has no use for"), ("language_model.model.layers.0.spare.weight", "has no use for")],
)
def test_what_is_neither_text_nor_vision_is_refused(architecture: str, name: str, message: str, tmp_path: Path) -> None:
    """Only the prefixes of the vision part are left unread; control: the test before."""
    dressed(tmp_path, architecture)
    tensors = load_file(tmp_path / SINGLE_FILE)
    save_file({**tensors, name: torch.ones(2)}, tmp_path / SINGLE_FILE)
    with pytest.raises(ModelLoadError, match=message):
        load_model(str(tmp_path), load_model_config(str(tmp_path)), dtype="auto", device=torch.device("cpu"))
