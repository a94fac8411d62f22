"""Tiny models and adapters as PEFT writes them, and what PEFT itself computes with them."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers

from engine.config import EngineConfig
from engine.core.engine import Engine
from engine.startup.load import load_engine

VOCAB = 97

MAPS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""All linear maps of a Llama's layer."""

KINDS: dict[str, dict[str, Any]] = {
    "r1": {"r": 1, "target_modules": list(MAPS)},
    "r4-attention": {"r": 4, "target_modules": ["q_proj", "v_proj"]},
    "r8-mlp": {"r": 8, "lora_alpha": 32, "target_modules": ["gate_proj", "up_proj", "down_proj"]},
    "r16": {"r": 16, "lora_alpha": 16, "target_modules": list(MAPS)},
    "r16-root": {"r": 16, "lora_alpha": 8, "use_rslora": True, "target_modules": list(MAPS)},
    "r64": {"r": 64, "lora_alpha": 32, "target_modules": list(MAPS)},
    "r256": {"r": 256, "lora_alpha": 64, "target_modules": list(MAPS)},
    "embedding": {"r": 8, "target_modules": ["embed_tokens", "q_proj"]},
    "head": {"r": 8, "target_modules": ["lm_head", "o_proj"]},
    "patterns": {
        "r": 8,
        "target_modules": list(MAPS),
        "rank_pattern": {"down_proj": 24, "layers.1.self_attn.q_proj": 2},
        "alpha_pattern": {"q_proj": 40},
    },
}
"""Adapters by name: arguments of their PEFT configuration."""


def save_base(folder: Path, **fields: object) -> transformers.PreTrainedModel:
    """A random Llama on disk, in float32; returns the reference's model."""
    torch.manual_seed(5)
    values = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 57,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **fields,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**values)).eval()
    model.save_pretrained(folder)
    return model


def save_adapter(base: Path, folder: Path, seed: int = 1, **fields: Any) -> str:
    """An adapter with random numbers in both factors, as PEFT writes it; returns the digest that stands for it."""
    import peft  # here, since it takes each worker of the tests seconds, and most run no test of adapters

    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM.from_pretrained(base)
    config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **fields)
    with warnings.catch_warnings(action="ignore"), torch.no_grad():  # it uses what transformers has deprecated
        adapted = peft.get_peft_model(model, config)
        for name, values in adapted.named_parameters():
            if "lora_" in name:
                values.copy_(torch.randn(values.shape) * 0.15)
        adapted.save_pretrained(folder, save_embedding_layers=False)
    return hashlib.sha256(folder.name.encode()).hexdigest()


def reference(
    base: Path, folder: Path | None, prompts: Iterable[list[int]], *, merged: bool = False
) -> list[torch.Tensor]:
    """Log-probabilities of every id behind every token of each prompt, as PEFT computes them."""
    import peft

    model = transformers.LlamaForCausalLM.from_pretrained(base).eval()
    with warnings.catch_warnings(action="ignore"), torch.no_grad():
        if folder is not None:
            model = peft.PeftModel.from_pretrained(model, folder).eval()
        if merged:
            model = model.merge_and_unload()
        return [model(torch.tensor([ids])).logits[0].float().log_softmax(-1) for ids in prompts]


def engine_with(base: Path, adapters: Path, digests: Iterable[str], **fields: object) -> Engine:
    """An engine that has read the adapters whose folders in ``adapters`` are named by digest."""
    values: dict[str, object] = {
        "model_dir": str(base),
        "model_digest": "00",
        "block_size": 4,
        "kv_bytes": 4 << 20,
        "max_context": 128,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 48,
        "backend": "plain",
        "adapters": json.dumps({digest: str(adapters / digest) for digest in digests}),
        **fields,
    }
    return load_engine(EngineConfig(**values), warm=False)
