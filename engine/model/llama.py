"""Llama 2 and 3.x, and everything published in its form: the family that the others are told apart from.

RMS norm, rotary grouped-query attention, SwiGLU, no windows (Touvron et al., arXiv 2302.13971 and 2307.09288; Llama 3:
arXiv 2407.21783). All rope scalings of ``engine.model.rotary``.
"""

from __future__ import annotations

from dataclasses import replace

from engine.model.blocks import AttentionForm, GatedMlp, GroupedAttention, PreNormLayer, pre_norm_layer
from engine.model.checklist import Checklist
from engine.model.config import ModelConfig, read_common
from engine.model.decoder import Decoder, Family
from engine.model.fields import Fields
from engine.model.rotary import Rotary

OLD_BUFFERS = ".rotary_emb.inv_freq"
"""End of the names of tensors in old checkpoints that can be computed."""


def read(fields: Fields, supported: tuple[str, ...] = ("LlamaForCausalLM",)) -> ModelConfig:
    """Check a ``config.json``."""
    fields.only("hidden_act", ("silu",), default="silu")
    return replace(
        read_common(fields, supported),
        attention_bias=fields.boolean("attention_bias"),
        mlp_bias=fields.boolean("mlp_bias"),
    )


def layer(config: ModelConfig, checklist: Checklist, _index: int, place: int) -> PreNormLayer:
    """One layer."""
    form = AttentionForm(bias=config.attention_bias, out_bias=config.attention_bias)
    attention = GroupedAttention(config, checklist.under("self_attn"), place=place, form=form)
    mlp = GatedMlp(
        checklist.under("mlp"), hidden=config.hidden_size, inner=config.intermediate_size, bias=config.mlp_bias
    )
    return pre_norm_layer(config, checklist, attention, mlp)


def build(config: ModelConfig, checklist: Checklist) -> Decoder:
    """The model."""
    checklist.ignore_suffixes(OLD_BUFFERS)
    return Decoder(config, checklist, layer, (Rotary(config.rope, config.head_dim, checklist.memory.device),))


LLAMA = Family(read, build)
