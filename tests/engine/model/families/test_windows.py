"""Families with windows through a whole engine that has no room to keep everything, against ``transformers``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.core.kv.layout import ITEM_BYTES
from engine.core.offline import generate
from engine.model.checkpoint.registry import load_model_config
from engine.startup.load import load_engine
from tests.engine.model.families.table import FAMILIES, VOCAB, save_reference
from tests.engine.support import submit

pytestmark = pytest.mark.usefixtures("one_thread")

EVERY_RUN = [("mistral", "window 8"), ("gemma3", "five to one"), ("llama4", "chunks of 16")]
"""Windows in all layers, in some, and chunks; the full counts have further families with windows."""

LATER = [
    ("mistral", "window 21, mqa"),
    ("qwen2", "windows from layer 1"),
    ("qwen2", "windows by layer type"),
    ("qwen3", "gqa 4, windows"),
    ("gpt_oss", "gqa 2, a window"),
]
CASES = [*EVERY_RUN, *(pytest.param(*case, marks=pytest.mark.full) for case in LATER)]
BLOCK = 4
OUTPUT = 40


@pytest.mark.parametrize(("family", "case"), CASES)
def test_ids_agree_with_transformers_when_memory_is_given_back(family: str, case: str, tmp_path: Path) -> None:
    """Six prompts that together would need more KV than there is, were it all kept: each id is the reference's."""
    reference = save_reference(tmp_path, family, **FAMILIES[family].cases[case])
    config = load_model_config(str(tmp_path))
    token_bytes = sum(layer.numbers for layer in config.kv_layers) * ITEM_BYTES["float32"]
    engine = load_engine(
        EngineConfig(
            model_dir=str(tmp_path),
            model_digest="00",
            block_size=BLOCK,
            kv_bytes=160 * token_bytes,
            max_num_seqs=6,
            max_num_batched_tokens=16,
        )
    )
    assert engine.scheduler.limits.groups
    assert engine.scheduler.limits.max_context == 128
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in (3, 60, 17, 42, 80, 9)]
    answers = generate(engine, [submit(place, prompt, OUTPUT) for place, prompt in enumerate(prompts)])
    for place, prompt in enumerate(prompts):
        line = prompt + answers[place].token_ids
        with torch.no_grad():
            expected = reference(torch.tensor([line])).logits[0, len(prompt) - 1 : -1].argmax(-1)
        assert answers[place].token_ids == expected.tolist()
        assert len(answers[place].token_ids) == OUTPUT
