"""What several engine tests build: tiny random models, engines, submissions, a scheduler without a model."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.config import EngineConfig
from engine.core.engine import Engine
from engine.core.fairness.tenancy import Fairness
from engine.core.kv.block_pool import BlockPool
from engine.core.kv.layout import KvGroup
from engine.core.kv.leaving import SpillChannel
from engine.core.kv.prefix_cache import PrefixCache
from engine.core.scheduler.limits import SchedulerLimits
from engine.core.scheduler.scheduler import Scheduler
from engine.model.checkpoint.checklist import targets
from engine.model.checkpoint.config import ModelConfig
from engine.model.checkpoint.registry import build_model, describe_model
from engine.model.checkpoint.weights import SINGLE_FILE
from engine.model.layers.decoder import Decoder
from engine.model.layers.rotary import RopeScaling
from engine.startup.load import build_engine
from isolation.ipc.engine import Submit
from isolation.ipc.sampling import Sampling

GREEDY = Sampling(temperature=0.0)


def namespace(number: int) -> bytes:
    """A namespace key that is easy to tell from others."""
    return bytes([number]) * 32


def submit(request: int, token_ids: Iterable[int], max_tokens: int = 8, *, tenant: int = 1, **fields: object) -> Submit:
    """A greedy request of tenant 1, unless told otherwise."""
    values = {"sampling": GREEDY, "ignore_eos": True, **fields}
    return Submit(request, namespace(tenant), array("I", token_ids), max_tokens, **values)


def model_config(**fields: object) -> ModelConfig:
    """A Llama of about ten thousand weights."""
    values: dict[str, object] = {
        "architecture": "LlamaForCausalLM",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "vocab_size": 97,
        "max_positions": 512,
        "rms_norm_eps": 1e-5,
        "rope": RopeScaling(),
        **fields,
    }
    return ModelConfig(**values)


def random_model(
    config: ModelConfig,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    packed: bool = True,
    device: torch.device = torch.device("cpu"),
) -> Decoder:
    """A model with random weights, wide enough spread that greedy continuations wander."""
    generator = torch.Generator().manual_seed(seed)
    model, checklist = build_model(config, dtype, device)
    for name, target in targets(checklist.pieces.values()).items():
        scale = 1.0 if "embed" in name or "lm_head" in name else 0.3
        values = (torch.randn(target.shape, generator=generator) * scale).to(device)
        target.copy_(1 + 0.1 * values if "norm" in name else values)
    if packed:
        model.pack()
    return model


def save_model(folder: Path, config: ModelConfig, *, seed: int = 0) -> None:
    """A checkpoint with random weights on disk, in the published layout."""
    generator = torch.Generator().manual_seed(seed)
    pieces = describe_model(config).pieces.values()
    tensors = {piece.name: torch.randn(piece.shape, generator=generator) for piece in pieces}
    save_file(tensors, folder / SINGLE_FILE)
    description = {
        "architectures": [config.architecture],
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
    }
    (folder / "config.json").write_text(json.dumps(description))


def make_engine(model: Decoder, *, num_blocks: int = 64, spill: SpillChannel | None = None, **fields: object) -> Engine:
    """An engine around a model, with exactly ``num_blocks`` usable blocks."""
    config = model.config
    size = int(fields.get("block_size", 4))
    block_bytes = size * sum(layer.numbers for layer in config.kv_layers) * model.dtype.itemsize
    values = {
        "model_dir": "unused",
        "model_digest": "00",
        "block_size": size,
        "kv_bytes": (num_blocks + 1) * block_bytes,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 32,
        "spill": spill is not None,
        **fields,
    }
    return build_engine(EngineConfig(**values), model, spill)


def make_scheduler(
    *,
    num_blocks: int = 32,
    block_size: int = 4,
    prefix_caching: bool = True,
    groups: tuple[KvGroup, ...] = (),
    **fields: object,
) -> tuple[Scheduler, BlockPool]:
    """A scheduler and its pool, without a model."""
    values = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_waiting": 100,
        "max_context": num_blocks * block_size,
        "vocab_size": 1_000,
        **fields,
    }
    pool = BlockPool(num_blocks)
    cache = PrefixCache(pool, root=bytes(16), block_size=block_size, caching=prefix_caching, groups=groups)
    limits = SchedulerLimits(block_size=block_size, prefix_caching=prefix_caching, groups=groups, **values)
    return Scheduler(limits, pool, cache, Fairness(limits, pool, raise_defects=True)), pool
