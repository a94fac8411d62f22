"""What decides in which forms kernels are launched, as one digest: a cache of compiled kernels is known by it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace

import torch

from engine.model.checkpoint.config import ModelConfig

FORMAT = "athanor launches 1"


def launch_configuration(
    model: ModelConfig, dtype: torch.dtype, block_size: int, rows: int, *, scaled: bool = False
) -> str:
    """Hex SHA-256 over everything that decides in which forms kernels are launched.

    Bytes of KV, contexts, batched tokens and stop ids are no part of it: no kernel is compiled by them
    (``tests/engine/backends/cuda/kernels/test_ahead.py`` shows it). What a family adds to a description is.

    Args:
        model: the description.
        dtype: of weights and activations.
        block_size: tokens of a KV block.
        rows: requests of one step at the most.
        scaled: maps of layers are held in 8 bits (``engine.model.layers.layers.Memory``).
    """
    shape = replace(model, max_positions=0, stop_ids=frozenset(), rope=replace(model.rope, context=0))
    facts = {"format": FORMAT, "model": asdict(shape), "dtype": str(dtype), "block_size": block_size, "rows": rows}
    if scaled:
        facts["scaled"] = True
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=_plain).encode()).hexdigest()


def _plain(value: object) -> object:
    return sorted(value) if isinstance(value, frozenset) else str(value)
