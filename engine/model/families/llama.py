"""Llama 2 and 3.x, and every model published in this form: the reference from which the other families differ.

RMS norm, rotary grouped-query attention, SwiGLU, no windows (Touvron et al., arXiv 2302.13971 and 2307.09288; Llama 3:
arXiv 2407.21783). Supports all rope scalings of ``engine.model.layers.rotary``.
"""

from __future__ import annotations

from dataclasses import replace

from engine.model.checkpoint.checklist import Checklist
from engine.model.checkpoint.config import ModelConfig, read_common
from engine.model.checkpoint.fields import Fields
from engine.model.layers.blocks import AttentionForm, Layer, llama_layer
from engine.model.layers.decoder import Family

OLD_BUFFERS = ".rotary_emb.inv_freq"
"""Name suffix of tensors in old checkpoints that can be computed."""


def read(fields: Fields, supported: tuple[str, ...] = ("LlamaForCausalLM",)) -> ModelConfig:
    """Validate a ``config.json``."""
    fields.only("hidden_act", ("silu",), default="silu")
    return replace(
        read_common(fields, supported),
        attention_bias=fields.boolean("attention_bias"),
        mlp_bias=fields.boolean("mlp_bias"),
    )


def layer(config: ModelConfig, checklist: Checklist, _index: int, place: int) -> Layer:
    """Build one layer."""
    bias = config.attention_bias
    return llama_layer(config, checklist, place, AttentionForm(bias=bias, out_bias=bias))


LLAMA = Family.of_layers(read, layer, unread=(OLD_BUFFERS,))
