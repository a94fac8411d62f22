"""Qwen2 and Qwen2.5: Llama's layer with biases on query, key and value (Yang et al., arXiv 2407.10671, 2412.15115).

Some descriptions enable a sliding window from a certain layer on (``use_sliding_window``, ``max_window_layers``).
"""

from __future__ import annotations

from dataclasses import replace

from engine.core.kv.layout import FULL
from engine.model.checkpoint.checklist import Checklist
from engine.model.checkpoint.config import (
    MAX_LAYERS,
    ModelConfig,
    grouped_layers,
    read_common,
    read_reaches,
    read_window,
)
from engine.model.checkpoint.fields import Fields
from engine.model.layers.blocks import AttentionForm, Layer, llama_layer
from engine.model.layers.decoder import Family

DEFAULT_WINDOW = 4_096
"""Window of a description that enables windows without a size."""

DEFAULT_WINDOW_LAYERS = 28
"""Default number of leading layers without a window."""


def read(fields: Fields) -> ModelConfig:
    """Validate a ``config.json``."""
    return with_windows(fields, read_common(fields, ("Qwen2ForCausalLM",), default_positions=32_768))


def with_windows(fields: Fields, common: ModelConfig) -> ModelConfig:
    """Add the windows that Qwen's descriptions request."""
    fields.only("hidden_act", ("silu",), default="silu")
    used = fields.boolean("use_sliding_window")
    named = "sliding_window" in fields.values
    window = read_window(fields, default=None if named else DEFAULT_WINDOW) if used else FULL
    first = fields.integer("max_window_layers", 0, MAX_LAYERS, default=DEFAULT_WINDOW_LAYERS)
    default = tuple(window if index >= first else FULL for index in range(common.num_layers))
    return replace(common, layers=grouped_layers(common, read_reaches(fields, common.num_layers, window, default)))


def layer(config: ModelConfig, checklist: Checklist, _index: int, place: int) -> Layer:
    """Build one layer."""
    return llama_layer(config, checklist, place, AttentionForm(bias=True))


QWEN2 = Family.of_layers(read, layer)
