"""The form in which an engine holds its weights is the one that it tells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.backends.common.loading import weight_form
from engine.config import EngineConfig
from engine.startup.load import load_engine
from isolation.ipc.messages import WeightForm, weight_word
from tests.engine.support import model_config, save_model

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"backend": "plain"}, WeightForm.FLOAT32),
        ({"backend": "plain", "dtype": "bfloat16"}, WeightForm.BF16),
        ({"backend": "plain", "quantization": "int8"}, WeightForm.INT8),
        ({"runner": "null"}, WeightForm.NONE),
        ({"runner": "embed", "pooling": "mean"}, WeightForm.FLOAT32),
        ({"backend": "device"}, WeightForm.FLOAT32),
        ({"backend": "device", "dtype": "bfloat16", "quantization": "fp8"}, WeightForm.FP8),
    ],
    ids=["float32", "bf16", "int8", "null", "embeddings", "device", "device fp8"],
)
def test_an_engine_tells_the_form_of_its_weights(tmp_path: Path, fields: dict[str, Any], form: WeightForm) -> None:
    """Whatever backend runs; the log has a line with it too."""
    save_model(tmp_path, model_config())
    sizes: dict[str, Any] = {"kv_bytes": 1 << 20, "block_size": 4, "max_num_seqs": 2, "max_num_batched_tokens": 16}
    said: list[str] = []
    config = EngineConfig(model_dir=str(tmp_path), model_digest="00", max_context=96, **sizes, **fields)
    engine = load_engine(config, warm=False, say=said.append)
    assert engine.ready().weights == form
    assert f"engine holds its weights as {form.word}" in said


def test_kernels_compress_bfloat16_alone() -> None:
    """Float32 and int8 stay what they are beside kernels that compress, and palettes are of bfloat16."""
    assert weight_form(torch.bfloat16, compresses=True) is WeightForm.COMPRESSED
    assert weight_form(torch.float32, compresses=True) is WeightForm.FLOAT32
    assert weight_form(torch.bfloat16, int8=True, compresses=True) is WeightForm.INT8
    assert weight_form(torch.bfloat16, palettes=True) is WeightForm.PALETTE


def test_each_form_has_a_word_of_its_own() -> None:
    """A number that no form has, as another version might tell, has none."""
    assert len({weight_word(form) for form in WeightForm}) == len(WeightForm)
    assert weight_word(WeightForm.UNKNOWN) == weight_word(max(WeightForm) + 1) == ""
