"""Qwen2 and Qwen2.5: Llama's layer with biases on query, key and value (Yang et al., arXiv 2407.10671, 2412.15115).

Some descriptions ask for a sliding window from a certain layer on (``use_sliding_window``, ``max_window_layers``).
"""

from __future__ import annotations

from dataclasses import replace

from engine.kv.layout import FULL
from engine.model.blocks import AttentionForm, GatedMlp, GroupedAttention, PreNormLayer, pre_norm_layer
from engine.model.checklist import Checklist
from engine.model.config import MAX_LAYERS, ModelConfig, grouped_layers, read_common, read_reaches, read_window
from engine.model.decoder import Decoder, Family
from engine.model.fields import Fields
from engine.model.rotary import Rotary

DEFAULT_WINDOW = 4_096
"""Of a description that uses windows and does not say how long."""

DEFAULT_WINDOW_LAYERS = 28
"""Layers without a window, from the first on, of a description that does not say how many."""

QWEN2_ATTENTION = AttentionForm(bias=True)


def read(fields: Fields) -> ModelConfig:
    """Check a ``config.json``."""
    return with_windows(fields, read_common(fields, ("Qwen2ForCausalLM",), default_positions=32_768))


def with_windows(fields: Fields, common: ModelConfig) -> ModelConfig:
    """Add the windows that Qwen's descriptions ask for."""
    fields.only("hidden_act", ("silu",), default="silu")
    used = fields.boolean("use_sliding_window")
    named = "sliding_window" in fields.values
    window = read_window(fields, default=None if named else DEFAULT_WINDOW) if used else FULL
    first = fields.integer("max_window_layers", 0, MAX_LAYERS, default=DEFAULT_WINDOW_LAYERS)
    default = tuple(window if index >= first else FULL for index in range(common.num_layers))
    return replace(common, layers=grouped_layers(common, read_reaches(fields, common.num_layers, window, default)))


def layer(config: ModelConfig, checklist: Checklist, _index: int, place: int) -> PreNormLayer:
    """One layer."""
    attention = GroupedAttention(config, checklist.under("self_attn"), place=place, form=QWEN2_ATTENTION)
    mlp = GatedMlp(checklist.under("mlp"), hidden=config.hidden_size, inner=config.intermediate_size)
    return pre_norm_layer(config, checklist, attention, mlp)


def build(config: ModelConfig, checklist: Checklist) -> Decoder:
    """The model."""
    return Decoder(config, checklist, layer, (Rotary(config.rope, config.head_dim, checklist.memory.device),))


QWEN2 = Family(read, build)
