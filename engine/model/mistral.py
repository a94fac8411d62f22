"""Mistral and Ministral: Llama's layer, and a sliding window in every layer of some (Jiang et al., arXiv 2310.06825).

A window of ``w`` lets a token see the last ``w`` tokens, itself included. Later Mistrals have none. Heads need not fill
the hidden size (Mistral Nemo).
"""

from __future__ import annotations

from dataclasses import replace

from engine.model.checklist import Checklist
from engine.model.config import ModelConfig, grouped_layers, read_common, read_window
from engine.model.decoder import Decoder, Family
from engine.model.fields import Fields
from engine.model.llama import OLD_BUFFERS, layer
from engine.model.rotary import Rotary

DEFAULT_WINDOW = 4_096
"""Of a description without the key; null means that there is none."""


def read(fields: Fields) -> ModelConfig:
    """Check a ``config.json``."""
    fields.only("hidden_act", ("silu",), default="silu")
    common = read_common(fields, ("MistralForCausalLM",), default_kv_heads=8, default_positions=131_072)
    named = "sliding_window" in fields.values
    window = read_window(fields, default=None if named else DEFAULT_WINDOW)
    return replace(common, layers=grouped_layers(common, (window,) * common.num_layers))


def build(config: ModelConfig, checklist: Checklist) -> Decoder:
    """The model."""
    checklist.ignore_suffixes(OLD_BUFFERS)
    return Decoder(config, checklist, layer, (Rotary(config.rope, config.head_dim, checklist.memory.device),))


MISTRAL = Family(read, build)
