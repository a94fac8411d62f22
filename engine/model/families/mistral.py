"""Mistral and Ministral: Llama's layer, in some models with a sliding window everywhere (Jiang et al., arXiv
2310.06825).

With a window of ``w``, a token attends to the last ``w`` tokens, itself included. Later Mistrals have none. The heads
together may be narrower than the hidden size (Mistral Nemo).
"""

from __future__ import annotations

from dataclasses import replace

from engine.model.checkpoint.config import ModelConfig, grouped_layers, read_common, read_window
from engine.model.checkpoint.fields import Fields
from engine.model.families.llama import OLD_BUFFERS, layer
from engine.model.layers.decoder import Family

DEFAULT_WINDOW = 4_096
"""Window of a description without the key; null means no window."""


def read(fields: Fields) -> ModelConfig:
    """Validate a ``config.json``."""
    fields.only("hidden_act", ("silu",), default="silu")
    common = read_common(fields, ("MistralForCausalLM",), default_kv_heads=8, default_positions=131_072)
    named = "sliding_window" in fields.values
    window = read_window(fields, default=None if named else DEFAULT_WINDOW)
    return replace(common, layers=grouped_layers(common, (window,) * common.num_layers))


MISTRAL = Family.of_layers(read, layer, unread=(OLD_BUFFERS,))
