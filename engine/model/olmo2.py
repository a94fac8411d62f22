"""OLMo 2: norms behind attention and MLP instead of before them, and over all heads at once (arXiv 2501.00656)."""

from __future__ import annotations

from dataclasses import replace

from engine.model.blocks import AttentionForm, GatedMlp, GroupedAttention, SandwichLayer
from engine.model.checklist import Checklist
from engine.model.config import ModelConfig, read_common
from engine.model.decoder import Decoder, Family
from engine.model.fields import Fields
from engine.model.rotary import Rotary
from engine.model.sharded import rms_norm


def read(fields: Fields) -> ModelConfig:
    """Check a ``config.json``."""
    fields.only("hidden_act", ("silu",), default="silu")
    common = read_common(fields.defaults(rms_norm_eps=1e-5), ("Olmo2ForCausalLM",))
    return replace(common, attention_bias=fields.boolean("attention_bias"))


def layer(config: ModelConfig, checklist: Checklist, _index: int, place: int) -> SandwichLayer:
    """One layer."""
    hidden, eps = config.hidden_size, config.rms_norm_eps
    form = AttentionForm(bias=config.attention_bias, out_bias=config.attention_bias, flat_norm=True)
    return SandwichLayer(
        None,
        GroupedAttention(config, checklist.under("self_attn"), place=place, form=form),
        rms_norm(checklist, "post_attention_layernorm", hidden, eps),
        None,
        GatedMlp(checklist.under("mlp"), hidden=hidden, inner=config.intermediate_size),
        rms_norm(checklist, "post_feedforward_layernorm", hidden, eps),
    )


def build(config: ModelConfig, checklist: Checklist) -> Decoder:
    """The model."""
    return Decoder(config, checklist, layer, (Rotary(config.rope, config.head_dim, checklist.memory.device),))


OLMO2 = Family(read, build)
