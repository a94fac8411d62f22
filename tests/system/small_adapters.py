"""Adapters for whole appliances: random ones for a model on disk, without the library that trains them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from appliance.common.adapter_files import CONFIG_FILE, TENSOR_FILE, read_adapter


def make_adapter(model: Path, folder: Path, *, seed: int = 0, rank: int = 4, strength: float = 0.5) -> str:
    """Write an adapter for the attention of a model; returns its digest."""
    config = json.loads((model / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    wide = heads * config.get("head_dim", hidden // heads)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, shape in (("q_proj", (hidden, wide)), ("o_proj", (wide, hidden))):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_"
            tensors[f"{prefix}A.weight"] = torch.randn(rank, shape[0], generator=generator) * strength
            tensors[f"{prefix}B.weight"] = torch.randn(shape[1], rank, generator=generator) * strength
    folder.mkdir(parents=True)
    save_file(tensors, folder / TENSOR_FILE)
    (folder / TENSOR_FILE).chmod(0o644)  # the library writes files for their owner alone
    description = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank}
    (folder / CONFIG_FILE).write_text(json.dumps(description))
    return read_adapter(folder.name, folder).digest
