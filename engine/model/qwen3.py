"""Qwen3: each head of query and key is normalised before it is rotated (Yang et al., arXiv 2505.09388).

The head's width is stated on its own and usually is not the hidden size divided among the heads.
"""

from __future__ import annotations

from dataclasses import replace

from engine.model.blocks import AttentionForm, GatedMlp, GroupedAttention, PreNormLayer, pre_norm_layer
from engine.model.checklist import Checklist
from engine.model.config import ModelConfig, read_common
from engine.model.decoder import Decoder, Family
from engine.model.fields import Fields
from engine.model.qwen2 import with_windows
from engine.model.rotary import Rotary

DEFAULT_HEAD_DIM = 128
"""Of a description that does not say."""


def read(fields: Fields) -> ModelConfig:
    """Check a ``config.json``."""
    common = read_common(fields, ("Qwen3ForCausalLM",), default_head_dim=DEFAULT_HEAD_DIM, default_positions=32_768)
    return replace(with_windows(fields, common), attention_bias=fields.boolean("attention_bias"))


def layer(config: ModelConfig, checklist: Checklist, _index: int, place: int) -> PreNormLayer:
    """One layer."""
    form = AttentionForm(bias=config.attention_bias, out_bias=config.attention_bias, head_norm=True)
    attention = GroupedAttention(config, checklist.under("self_attn"), place=place, form=form)
    mlp = GatedMlp(checklist.under("mlp"), hidden=config.hidden_size, inner=config.intermediate_size)
    return pre_norm_layer(config, checklist, attention, mlp)


def build(config: ModelConfig, checklist: Checklist) -> Decoder:
    """The model."""
    return Decoder(config, checklist, layer, (Rotary(config.rope, config.head_dim, checklist.memory.device),))


QWEN3 = Family(read, build)
