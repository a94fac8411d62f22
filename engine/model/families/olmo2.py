"""OLMo 2: norms after attention and MLP instead of before them, and over all heads together (arXiv 2501.00656)."""

from __future__ import annotations

from dataclasses import replace

from engine.model.checkpoint.checklist import Checklist
from engine.model.checkpoint.config import ModelConfig, read_common
from engine.model.checkpoint.fields import Fields
from engine.model.layers.blocks import AttentionForm, GatedMlp, GroupedAttention, Layer, Sublayer
from engine.model.layers.decoder import Family
from engine.model.layers.sharded import rms_norm


def read(fields: Fields) -> ModelConfig:
    """Validate a ``config.json``."""
    fields.only("hidden_act", ("silu",), default="silu")
    common = read_common(fields.defaults(rms_norm_eps=1e-5), ("Olmo2ForCausalLM",))
    return replace(common, attention_bias=fields.boolean("attention_bias"))


def layer(config: ModelConfig, checklist: Checklist, _index: int, place: int) -> Layer:
    """Build one layer."""
    hidden, eps = config.hidden_size, config.rms_norm_eps
    form = AttentionForm(bias=config.attention_bias, out_bias=config.attention_bias, flat_norm=True)
    attention = GroupedAttention(config, checklist.under("self_attn"), place=place, form=form)
    mlp = GatedMlp(checklist.under("mlp"), hidden=hidden, inner=config.intermediate_size)
    first = Sublayer(None, attention, rms_norm(checklist, "post_attention_layernorm", hidden, eps))
    return Layer((first, Sublayer(None, mlp, rms_norm(checklist, "post_feedforward_layernorm", hidden, eps))))


OLMO2 = Family.of_layers(read, layer)
