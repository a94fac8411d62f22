"""Qwen3: each head of query and key is normalised before its rotation (Yang et al., arXiv 2505.09388).

The head's width is a separate field, usually different from the hidden size divided by the number of heads.
"""

from __future__ import annotations

from dataclasses import replace

from engine.model.checkpoint.checklist import Checklist
from engine.model.checkpoint.config import ModelConfig, read_common
from engine.model.checkpoint.fields import Fields
from engine.model.families.qwen2 import with_windows
from engine.model.layers.blocks import AttentionForm, Layer, llama_layer
from engine.model.layers.decoder import Family

DEFAULT_HEAD_DIM = 128
"""Head width of a description without one."""


def read(fields: Fields) -> ModelConfig:
    """Validate a ``config.json``."""
    common = read_common(fields, ("Qwen3ForCausalLM",), default_head_dim=DEFAULT_HEAD_DIM, default_positions=32_768)
    return replace(with_windows(fields, common), attention_bias=fields.boolean("attention_bias"))


def layer(config: ModelConfig, checklist: Checklist, _index: int, place: int) -> Layer:
    """Build one layer."""
    bias = config.attention_bias
    return llama_layer(config, checklist, place, AttentionForm(bias=bias, out_bias=bias, head_norm=True))


QWEN3 = Family.of_layers(read, layer)
