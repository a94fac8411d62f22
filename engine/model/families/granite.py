"""Granite 3: Llama's layer with explicit multipliers for embeddings, scores, residuals and logits (IBM, 2024)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.model.checkpoint.checklist import Checklist
from engine.model.checkpoint.config import ModelConfig
from engine.model.checkpoint.fields import Fields
from engine.model.families import llama
from engine.model.layers.blocks import AttentionForm, Layer, llama_layer
from engine.model.layers.decoder import Decoder, DecoderForm, Family
from engine.model.layers.rotary import Rotary

LEAST, LARGEST = 1e-6, 1e6
"""Accepted range of a multiplier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteConfig:
    """Multipliers of a Granite model."""

    embedding: float
    scores: float
    residual: float
    logits: float
    """Divisor of the logits."""


def read(fields: Fields) -> ModelConfig:
    """Validate a ``config.json``."""
    keys = {
        "embedding": "embedding_multiplier",
        "scores": "attention_multiplier",
        "residual": "residual_multiplier",
        "logits": "logits_scaling",
    }
    extra = GraniteConfig(**{name: fields.number(key, LEAST, LARGEST, default=1.0) for name, key in keys.items()})
    return replace(llama.read(fields, ("GraniteForCausalLM",)), extra=extra)


def layer(config: ModelConfig, checklist: Checklist, _index: int, place: int) -> Layer:
    """Build one layer."""
    extra, bias = config.extra_of(GraniteConfig), config.attention_bias
    form = AttentionForm(bias=bias, out_bias=bias, scale=extra.scores)
    return llama_layer(config, checklist, place, form, share=extra.residual)


def build(config: ModelConfig, checklist: Checklist) -> Decoder:
    """Build the model."""
    extra = config.extra_of(GraniteConfig)
    form = DecoderForm(embedding_scale=extra.embedding, logit_divisor=extra.logits)
    rotary = Rotary(config.rope, config.head_dim, checklist.memory.device)
    return Decoder(config, checklist, layer, (rotary,), form)


GRANITE = Family(read, build)
