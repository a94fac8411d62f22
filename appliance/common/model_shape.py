"""Numbers of a model's ``config.json`` by which an engine on a GPU is planned; the host reads nothing else of a model.

The file is untrusted: it is read up to a size, each number has a range, and what is odd or missing gives no shape. The
engine, in its sandbox, reads the file anew and decides by its own reading.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIG_FILE = "config.json"

MAX_BYTES = 1 << 20
"""Largest file in bytes; published ones have a few KiB."""

MAX_NUMBER = 1 << 24
"""Largest number that is believed: positions of the longest published context are ten million."""

EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Names of the number of experts: Mixtral, gpt-oss and Llama 4; Qwen; DeepSeek."""

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number, by the type's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What decides how much memory of a card a token and a row take."""

    layers: int
    heads: int
    kv_heads: int
    width: int
    """Numbers of the widest of a head's query, key and value."""
    value_width: int
    """Numbers of a head's value."""
    kv_numbers: int
    """Numbers that one layer keeps of one token: keys and values of all heads."""
    hidden: int
    intermediate: int
    """Width of the MLP."""
    experts: int = 0
    """Experts of one token; 0 without any."""
    expert_width: int = 0
    """Width of one expert's MLP."""
    expert_count: int = 0
    """Experts of a layer; 0 without any, or where the file does not say."""
    reaches: int = 1
    """Block tables of a row: one more where some layers have windows."""
    vocabulary: int
    positions: int
    """Longest context that the model was made for."""
    tied: bool = False
    """Whether the head is the embedding."""
    dtype: str
    """Type of the stored weights; float32 where the file does not say."""

    def item(self, dtype: str) -> int:
        """Bytes of a number that an engine computes with, by the type of the model's configuration."""
        return ITEM_BYTES[self.dtype if dtype == "auto" else dtype]

    def token_bytes(self, dtype: str) -> int:
        """Bytes of the KV of one token in all layers; an upper bound for models with windows."""
        return self.layers * self.kv_numbers * self.item(dtype)


def read_shape(folder: Path) -> ModelShape | None:
    """Read the shape of a model in a folder; None where the file is missing or odd."""
    try:
        with (folder / CONFIG_FILE).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            return None
        return parse_shape(json.loads(data))
    except (OSError, ValueError, RecursionError):
        return None


def parse_shape(found: Any) -> ModelShape | None:
    """Take the shape out of a parsed ``config.json``; None where a number is missing or out of range. Pure."""
    if not isinstance(found, dict):
        return None
    inner = found.get("text_config")
    values = {**found, **inner} if isinstance(inner, dict) else found
    try:
        return _shape(values)
    except ValueError:
        return None


def _shape(values: dict[str, Any]) -> ModelShape:
    heads, hidden = _number(values, "num_attention_heads"), _number(values, "hidden_size")
    kv_heads, width = (
        _number(values, "num_key_value_heads", heads),
        _number(values, "head_dim", max(1, hidden // heads)),
    )
    value_width, numbers = width, 2 * width * kv_heads
    if "kv_lora_rank" in values:
        value_width = _number(values, "kv_lora_rank")
        numbers = value_width + _number(values, "qk_rope_head_dim")
        width = max(width, numbers)
    experts = values.get("num_experts_per_tok")
    inner = _number(values, "intermediate_size", hidden)
    dtype = values.get("dtype") or values.get("torch_dtype")
    kinds = values.get("layer_types")
    return ModelShape(
        layers=_number(values, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        width=width,
        value_width=value_width,
        kv_numbers=numbers,
        hidden=hidden,
        intermediate=inner,
        experts=0 if experts is None else _number(values, "num_experts_per_tok"),
        expert_width=0 if experts is None else _number(values, "moe_intermediate_size", inner),
        expert_count=0 if experts is None else _expert_count(values),
        reaches=2 if isinstance(kinds, list) and "sliding_attention" in kinds else 1,
        vocabulary=_number(values, "vocab_size"),
        positions=_number(values, "max_position_embeddings"),
        tied=values.get("tie_word_embeddings") is True,
        dtype=dtype if isinstance(dtype, str) and dtype in ITEM_BYTES else "float32",
    )


def _expert_count(values: dict[str, Any]) -> int:
    """Number of a layer's experts, under the names that families have for it."""
    return next((_number(values, name) for name in EXPERT_COUNTS if values.get(name) is not None), 0)


def _number(values: dict[str, Any], name: str, otherwise: int | None = None) -> int:
    """A positive number; ``otherwise`` where it is absent or null.

    Raises:
        ValueError: it is none, or absent without another.
    """
    value = values.get(name)
    if value is None:
        value = otherwise
    if type(value) is not int or not 1 <= value <= MAX_NUMBER:
        raise ValueError(name)
    return value
