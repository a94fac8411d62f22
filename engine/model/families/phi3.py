"""Phi-3 and Phi-4: Llama's layer with fused projections (arXiv 2404.14219, 2412.08905; Phi-4-mini 2503.01743).

Query, key and value are one tensor, gate and up another. Some models rotate only a part of each head, and those with
long contexts divide frequencies by lists (``engine.model.layers.longrope``). A sliding window, if any, is in all
layers.
"""

from __future__ import annotations

from dataclasses import replace

from engine.model.checkpoint.checklist import Checklist
from engine.model.checkpoint.config import ModelConfig, grouped_layers, read_common, read_window
from engine.model.checkpoint.fields import Fields
from engine.model.layers.blocks import AttentionForm, Layer, llama_layer
from engine.model.layers.decoder import Family
from engine.model.layers.longrope import read_longrope


def read(fields: Fields) -> ModelConfig:
    """Validate a ``config.json``."""
    fields.only("hidden_act", ("silu",), default="silu")
    plain = fields.but(rope_scaling=None, rope_parameters=None, partial_rotary_factor=None)
    common = read_common(plain.defaults(rms_norm_eps=1e-5), ("Phi3ForCausalLM",), default_positions=4_096)
    rope = read_longrope(fields, common.head_dim, common.max_positions)
    reaches = (read_window(fields),) * common.num_layers
    return replace(common, rope=rope, layers=grouped_layers(common, reaches))


def layer(config: ModelConfig, checklist: Checklist, _index: int, place: int) -> Layer:
    """Build one layer."""
    return llama_layer(config, checklist, place, AttentionForm(fused=True))


PHI3 = Family.of_layers(read, layer)
