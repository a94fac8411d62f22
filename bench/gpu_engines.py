"""Engines on the device backend around random weights of a given shape, and the same weights for ``transformers``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engine.backends.common.loading import layout_for, limits_for
from engine.backends.cuda.load import make_device_runner, without_spares
from engine.backends.cuda.runtime.mixing import Mixing
from engine.config import EngineConfig
from engine.core.engine import Engine
from engine.core.fairness.tenancy import Fairness
from engine.core.kv.block_pool import BlockPool
from engine.core.kv.prefix_cache import PrefixCache
from engine.core.scheduler.scheduler import Scheduler
from engine.model.checkpoint.checklist import targets
from engine.model.checkpoint.config import ModelConfig
from engine.model.checkpoint.registry import build_model as build
from engine.model.layers.decoder import Decoder
from engine.model.layers.rotary import RopeScaling

BLOCK = 16

TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "vocab_size": 257,
    "max_positions": 2_048,
}

SMALL: dict[str, Any] = {
    "hidden_size": 1_024,
    "intermediate_size": 2_816,
    "num_layers": 4,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 128,
    "vocab_size": 32_000,
    "max_positions": 4_096,
}
"""Heads as wide as those of large models, and weights of 230 MB in bfloat16: it can run beside other work."""

EIGHT_B: dict[str, Any] = {
    "hidden_size": 4_096,
    "intermediate_size": 14_336,
    "num_layers": 32,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "vocab_size": 128_256,
    "max_positions": 16_384,
}
"""The shape of Llama 3.1 8B."""


class Shape(NamedTuple):
    """Heads of a layer."""

    heads: int
    kv_heads: int
    dim: int


def description(sizes: dict[str, Any]) -> ModelConfig:
    """A Llama of these sizes."""
    return ModelConfig(architecture="LlamaForCausalLM", rms_norm_eps=1e-5, rope=RopeScaling(theta=500_000.0), **sizes)


def build_model(
    sizes: dict[str, Any], device: torch.device, dtype: torch.dtype, *, vocab_size: int | None = None
) -> Decoder:
    """Random weights N(0, 0.02) made on the device; the tiny model's are wider, so that its tokens wander."""
    if vocab_size is not None:
        sizes = sizes | {"vocab_size": vocab_size}
    model, checklist = build(description(sizes), dtype, device)
    generator = torch.Generator(device=device).manual_seed(0)
    spread = 0.3 if sizes["hidden_size"] < 1_024 else 0.02
    for name, target in targets(checklist.pieces.values()).items():
        if "norm" in name:
            target.fill_(1.0)
        else:
            target.normal_(0.0, spread, generator=generator)
    return model


def make_engine(
    model: Decoder,
    *,
    kv_bytes: int,
    rows: int,
    budget: int,
    context: int,
    eager: bool = False,
    mixing: Mixing | None = None,
) -> Engine:
    """The real scheduler around the device's runner."""
    config = EngineConfig(
        model_dir="",
        model_digest="00",
        block_size=BLOCK,
        kv_bytes=kv_bytes,
        max_context=context,
        max_num_seqs=rows,
        max_num_batched_tokens=budget,
        backend="device",
    )
    layout = without_spares(layout_for(config, model.config, str(model.dtype).removeprefix("torch.")), rows)
    limits = limits_for(config, model.config, layout)
    runner = make_device_runner(
        config, model, layout, limits, eager=eager, mixing=mixing, **({"most_ahead": 0} if eager else {})
    )
    pool = BlockPool(layout.num_blocks)
    cache = PrefixCache(pool, root=layout.root("00"), block_size=BLOCK, caching=True)
    return Engine(Scheduler(limits, pool, cache, Fairness(limits, pool)), runner)


def weights_of(model: Decoder, sizes: dict[str, Any], device: torch.device) -> dict[str, torch.Tensor]:
    """The published tensors, as views of the model's own memory; only of a model that is not packed."""
    _, checklist = build(description(sizes), model.dtype, torch.device("meta"))
    found: dict[str, torch.Tensor] = {
        "model.embed_tokens.weight": model.embedding.weight,
        "model.norm.weight": model.norm.weight,
        "lm_head.weight": model.head.linear.loaded,
    }
    wide, narrow = sizes["num_heads"] * sizes["head_dim"], sizes["num_kv_heads"] * sizes["head_dim"]
    for number, layer in enumerate(model.layers):
        below = f"model.layers.{number}."
        first, second = layer.sublayers
        attention, mlp = first.block, second.block
        q, k, v = attention.qkv.loaded.split((wide, narrow, narrow))
        gate, up = mlp.gate_up.loaded.chunk(2)
        found |= {
            f"{below}self_attn.q_proj.weight": q,
            f"{below}self_attn.k_proj.weight": k,
            f"{below}self_attn.v_proj.weight": v,
            f"{below}self_attn.o_proj.weight": attention.out.linear.loaded,
            f"{below}mlp.gate_proj.weight": gate,
            f"{below}mlp.up_proj.weight": up,
            f"{below}mlp.down_proj.weight": mlp.down.linear.loaded,
            f"{below}input_layernorm.weight": first.before.weight,
            f"{below}post_attention_layernorm.weight": second.before.weight,
        }
    assert found.keys() == checklist.pieces.keys(), "every published tensor has its view"
    return found


def published(sizes: dict[str, Any]) -> dict[str, Any]:
    """The sizes as a ``config.json`` names them."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "hidden_size": sizes["hidden_size"],
        "intermediate_size": sizes["intermediate_size"],
        "num_hidden_layers": sizes["num_layers"],
        "num_attention_heads": sizes["num_heads"],
        "num_key_value_heads": sizes["num_kv_heads"],
        "head_dim": sizes["head_dim"],
        "vocab_size": sizes["vocab_size"],
        "max_position_embeddings": sizes["max_positions"],
        "rope_theta": 500_000.0,
        "tie_word_embeddings": False,
    }


def save(model: Decoder, sizes: dict[str, Any], folder: Path) -> int:
    """A checkpoint in the published layout, one file; gives its bytes."""
    return write_checkpoint(folder, published(sizes), weights_of(model, sizes, model.device))


def write_checkpoint(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> int:
    """A description and one file of tensors; gives the tensors' bytes."""
    (folder / "config.json").write_text(json.dumps(config))
    names = {torch.bfloat16: "BF16", torch.float32: "F32"}
    header, place = {}, 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": names[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [place, place + tensor.nbytes],
        }
        place += tensor.nbytes
    told = json.dumps(header).encode()
    told += b" " * (-len(told) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(told).to_bytes(8, "little") + told)
        for tensor in tensors.values():
            tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy().tofile(file)
    return place
