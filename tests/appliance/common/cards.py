"""An 8B model and simulated cards, for the tests of what models with a GPU get."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from appliance.common.config import ModelConfig
from isolation.gpu.gpu_facts import CardMemory, GpuFacts, Node
from tests.isolation.gpu.gpu_machine import FACTS

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4_096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128_000,
    "eos_token_id": 128_001,
}
"""Description of Llama 3.1 8B, without the scaling of its rotation."""

WEIGHTS_8B = 16_060_522_496
"""Bytes of its weights in bfloat16."""

CARD_80 = 85_520_809_984
"""Bytes of an H100 80GB."""


def machine(cards: int = 1, total: int = CARD_80, free: int | None = None) -> GpuFacts:
    """A machine with so many equal cards; without a size their memory is not known."""
    left = total if free is None else free
    return replace(
        FACTS,
        models=FACTS.models * cards,
        nodes=(
            *(one for one in FACTS.nodes if one.index is None),
            *(Node(f"nvidia{card}", 195, card, character=True, open_to_all=True) for card in range(cards)),
        ),
        memory=tuple(CardMemory(card, f"GPU-{card}", total, left) for card in range(cards)) if total else (),
    )


def make_8b(folder: Path) -> Path:
    """Folder of an 8B model; its weights are a file of the right size without contents."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    (folder / "tokenizer.json").write_text("{}")
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(WEIGHTS_8B)
    return folder


def model(name: str = "llama", path: str = "/srv/llama", **given: object) -> ModelConfig:
    """An entry as an operator writes it: a name, a folder and a GPU."""
    return ModelConfig.model_validate({"name": name, "path": path, "gpu": "auto", **given})
