"""Phi-3 and Phi-4: Llama's layer whose maps are published joined (arXiv 2404.14219, 2412.08905; Phi-4-mini 2503.01743).

Query, key and value are one tensor, gate and up another. Some rotate only a part of each head, and those with long
contexts divide frequencies by lists (``engine.model.longrope``). A sliding window, if any, is in all layers.
"""

from __future__ import annotations

from dataclasses import replace

from engine.model.blocks import AttentionForm, GatedMlp, GroupedAttention, PreNormLayer, pre_norm_layer
from engine.model.checklist import Checklist
from engine.model.config import ModelConfig, grouped_layers, read_common, read_window
from engine.model.decoder import Decoder, Family
from engine.model.fields import Fields
from engine.model.longrope import read_longrope
from engine.model.rotary import Rotary

PHI3_ATTENTION = AttentionForm(fused=True)


def read(fields: Fields) -> ModelConfig:
    """Check a ``config.json``."""
    fields.only("hidden_act", ("silu",), default="silu")
    plain = fields.but(rope_scaling=None, rope_parameters=None, partial_rotary_factor=None)
    common = read_common(plain.defaults(rms_norm_eps=1e-5), ("Phi3ForCausalLM",), default_positions=4_096)
    rope = read_longrope(fields, common.head_dim, common.max_positions)
    reaches = (read_window(fields),) * common.num_layers
    return replace(common, rope=rope, layers=grouped_layers(common, reaches))


def layer(config: ModelConfig, checklist: Checklist, _index: int, place: int) -> PreNormLayer:
    """One layer."""
    attention = GroupedAttention(config, checklist.under("self_attn"), place=place, form=PHI3_ATTENTION)
    mlp = GatedMlp(checklist.under("mlp"), hidden=config.hidden_size, inner=config.intermediate_size, fused=True)
    return pre_norm_layer(config, checklist, attention, mlp)


def build(config: ModelConfig, checklist: Checklist) -> Decoder:
    """The model."""
    return Decoder(config, checklist, layer, (Rotary(config.rope, config.head_dim, checklist.memory.device),))


PHI3 = Family(read, build)
