"""gpt-oss: experts in every layer, a window in every second one, attention sinks, biases everywhere (arXiv 2508.10925).

The experts' gate is clamped from above and the up projection on both sides; gate and up projection are interleaved
outputs of one map.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from engine.core.kv.layout import FULL
from engine.model.checkpoint.checklist import Checklist
from engine.model.checkpoint.config import ModelConfig, grouped_layers, read_common, read_reaches, read_window
from engine.model.checkpoint.fields import Fields
from engine.model.layers.blocks import AttentionForm, GroupedAttention, Layer, pre_norm_layer
from engine.model.layers.decoder import Family
from engine.model.layers.experts import MixtureOfExperts, make_router, stacked_experts
from engine.model.layers.routing import SoftmaxOfTop, read_experts, sigmoid

DEFAULT_WINDOW = 128
DEFAULT_THETA = 150_000.0
DEFAULT_ROPE = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4_096, "truncate": False}

MAX_CLAMP = 1e4
"""Largest accepted clamp and gain; the published values are 7 and 1.702."""


@dataclass(frozen=True, slots=True)
class ClampedSwiGlu:
    """``gate * sigmoid(alpha * gate) * (up + 1)``, after clamping."""

    alpha: float
    limit: float

    def __call__(self, gate_up: Tensor) -> Tensor:
        """Apply to rows of interleaved pairs, ``(N, 2 I)`` to ``(N, I)``."""
        gate = gate_up[:, 0::2].clamp(max=self.limit)
        up = gate_up[:, 1::2].clamp(-self.limit, self.limit)
        # With an odd width, rows may begin anywhere in a vector: see ``routing.sigmoid``.
        return (up + 1) * gate * sigmoid(gate * self.alpha).to(gate.dtype)


@dataclass(frozen=True, slots=True)
class GptOssConfig:
    """Family-specific part of the description."""

    experts: int
    top: int
    activation: ClampedSwiGlu


def read(fields: Fields) -> ModelConfig:
    """Validate a ``config.json``."""
    fields.only("hidden_act", ("silu",), default="silu")
    if fields.absent("rope_scaling") and fields.absent("rope_parameters"):
        fields = Fields(fields.name, {**fields.values, "rope_scaling": DEFAULT_ROPE})
    common = read_common(
        fields,
        ("GptOssForCausalLM",),
        default_kv_heads=8,
        default_head_dim=64,
        default_positions=131_072,
        default_theta=DEFAULT_THETA,
        default_eps=1e-5,
    )
    count = common.num_layers
    experts, top = read_experts(fields, "num_local_experts", count, default=128, default_top=4)
    named = "sliding_window" in fields.values
    window = read_window(fields, default=None if named else DEFAULT_WINDOW)
    default = tuple(FULL if index % 2 else window for index in range(count))
    activation = ClampedSwiGlu(
        fields.number("swiglu_alpha", 0.0, MAX_CLAMP, default=1.702),
        fields.number("swiglu_limit", 0.0, MAX_CLAMP, default=7.0),
    )
    return replace(
        common,
        attention_bias=fields.boolean("attention_bias", default=True),
        layers=grouped_layers(common, read_reaches(fields, count, window, default)),
        extra=GptOssConfig(experts, top, activation),
    )


def layer(config: ModelConfig, checklist: Checklist, _index: int, place: int) -> Layer:
    """Build one layer."""
    extra, below, hidden = config.extra_of(GptOssConfig), checklist.under("mlp"), config.hidden_size
    form = AttentionForm(bias=config.attention_bias, out_bias=config.attention_bias, sinks=True)
    attention = GroupedAttention(config, checklist.under("self_attn"), place=place, form=form)
    route = SoftmaxOfTop(extra.top)
    mlp = MixtureOfExperts(
        checklist.parallel,
        make_router(below, "router", hidden=hidden, count=extra.experts, route=route, bias=True),
        stacked_experts(below, count=extra.experts, hidden=hidden, inner=config.intermediate_size, bias=True),
        activation=extra.activation,
    )
    return pre_norm_layer(config, checklist, attention, mlp)


GPT_OSS = Family.of_layers(read, layer)
