"""Granite 3: Llama's layer with stated multipliers for embeddings, scores, residuals and logits (IBM, 2024)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from engine.model import llama
from engine.model.blocks import (
    AttentionForm,
    GatedMlp,
    GroupedAttention,
    PreNormLayer,
    StepContext,
    Sublayer,
    pre_norm_layer,
)
from engine.model.checklist import Checklist
from engine.model.config import ModelConfig
from engine.model.decoder import Decoder, DecoderForm, Family
from engine.model.fields import Fields
from engine.model.rotary import Rotary

LEAST, LARGEST = 1e-6, 1e6
"""Range of a multiplier that is believed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteConfig:
    """The multipliers."""

    embedding: float
    scores: float
    residual: float
    logits: float
    """Logits are divided by it."""


@dataclass(frozen=True, slots=True)
class ScaledLayer:
    """A pre-norm layer that adds a share of what its parts give."""

    parts: PreNormLayer
    share: float

    @property
    def sublayers(self) -> tuple[Sublayer, ...]:
        """Attention, then the MLP."""
        return tuple(replace(one, share=self.share) for one in self.parts.sublayers)

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """Advance the residual stream, in place."""
        x.add_(self.parts.attention(self.parts.attention_norm(x), step), alpha=self.share)
        return x.add_(self.parts.mlp(self.parts.mlp_norm(x), step), alpha=self.share)


def read(fields: Fields) -> ModelConfig:
    """Check a ``config.json``."""
    keys = {
        "embedding": "embedding_multiplier", "scores": "attention_multiplier", "residual": "residual_multiplier",
        "logits": "logits_scaling",
    }  # fmt: skip
    extra = GraniteConfig(**{name: fields.number(key, LEAST, LARGEST, default=1.0) for name, key in keys.items()})
    return replace(llama.read(fields, ("GraniteForCausalLM",)), extra=extra)


def layer(config: ModelConfig, checklist: Checklist, _index: int, place: int) -> ScaledLayer:
    """One layer."""
    extra, bias = config.extra, config.attention_bias
    assert isinstance(extra, GraniteConfig), "the description was read by this module"
    form = AttentionForm(bias=bias, out_bias=bias, scale=extra.scores)
    attention = GroupedAttention(config, checklist.under("self_attn"), place=place, form=form)
    mlp = GatedMlp(
        checklist.under("mlp"), hidden=config.hidden_size, inner=config.intermediate_size, bias=config.mlp_bias
    )
    return ScaledLayer(pre_norm_layer(config, checklist, attention, mlp), extra.residual)


def build(config: ModelConfig, checklist: Checklist) -> Decoder:
    """The model."""
    assert isinstance(config.extra, GraniteConfig), "the description was read by this module"
    form = DecoderForm(embedding_scale=config.extra.embedding, logit_divisor=config.extra.logits)
    rotary = Rotary(config.rope, config.head_dim, checklist.memory.device)
    return Decoder(config, checklist, layer, (rotary,), form)


GRANITE = Family(read, build)
