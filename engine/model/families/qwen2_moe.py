"""Qwen1.5-MoE and Qwen2-MoE: Qwen2's attention, experts, and a shared expert with a gate (arXiv 2407.10671)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from engine.core.kv.layout import FULL
from engine.model.checkpoint.checklist import Checklist
from engine.model.checkpoint.config import (
    MAX_INTERMEDIATE,
    MAX_LAYERS,
    ModelConfig,
    grouped_layers,
    read_common,
    read_reaches,
    read_window,
)
from engine.model.checkpoint.fields import Fields
from engine.model.families.qwen2 import DEFAULT_WINDOW, DEFAULT_WINDOW_LAYERS
from engine.model.families.qwen3_moe import QwenExperts, qwen_experts, read_qwen_experts
from engine.model.layers.blocks import AttentionForm, GatedMlp, GroupedAttention, Layer, StepContext, pre_norm_layer
from engine.model.layers.decoder import Family
from engine.model.layers.experts import MixtureOfExperts
from engine.model.layers.layers import Linear
from engine.model.layers.routing import sigmoid
from engine.model.layers.sharded import Columns, column_linear


@dataclass(frozen=True, slots=True)
class Qwen2MoeConfig:
    """Family-specific part of the description."""

    routed: QwenExperts
    shared_inner: int
    bias: bool
    """Whether query, key and value have biases."""


def read(fields: Fields) -> ModelConfig:
    """Validate a ``config.json``. Where windows are enabled, every second one of the first layers has one."""
    fields.only("hidden_act", ("silu",), default="silu")
    common = read_common(fields, ("Qwen2MoeForCausalLM",), default_kv_heads=16, default_positions=32_768)
    count = common.num_layers
    used = fields.boolean("use_sliding_window")
    window = read_window(fields, default=DEFAULT_WINDOW) if used else FULL
    first_full = fields.integer("max_window_layers", 0, MAX_LAYERS, default=DEFAULT_WINDOW_LAYERS)
    default = tuple(window if index % 2 == 0 and index < first_full else FULL for index in range(count))
    return replace(
        common,
        layers=grouped_layers(common, read_reaches(fields, count, window, default)),
        extra=Qwen2MoeConfig(
            read_qwen_experts(fields, count, default=(60, 4, 1_408)),
            fields.integer("shared_expert_intermediate_size", 1, MAX_INTERMEDIATE, default=5_632),
            fields.boolean("qkv_bias", default=True),
        ),
    )


class GatedShared:
    """A shared expert, each row weighted by a sigmoid."""

    def __init__(self, checklist: Checklist, hidden: int, inner: int) -> None:
        self._mlp = GatedMlp(checklist.under("shared_expert"), hidden=hidden, inner=inner)
        self._gate: Linear = column_linear(checklist, [Columns("shared_expert_gate", 1, (0, 1))], hidden)

    def __call__(self, x: Tensor, step: StepContext, /) -> Tensor:
        """Apply to rows of shape ``(N, hidden)``."""
        return self._mlp(x, step) * sigmoid(self._gate(x)).to(x.dtype)


def layer(config: ModelConfig, checklist: Checklist, index: int, place: int) -> Layer:
    """Build one layer."""
    extra, below, hidden = config.extra_of(Qwen2MoeConfig), checklist.under("mlp"), config.hidden_size
    attention = GroupedAttention(config, checklist.under("self_attn"), place=place, form=AttentionForm(bias=extra.bias))
    mlp: GatedMlp | MixtureOfExperts
    if index in extra.routed.sparse:
        shared = GatedShared(below, hidden, extra.shared_inner)
        mlp = MixtureOfExperts(checklist.parallel, *qwen_experts(config, extra.routed, below), shared=shared)
    else:
        mlp = GatedMlp(below, hidden=hidden, inner=config.intermediate_size)
    return pre_norm_layer(config, checklist, attention, mlp)


QWEN2_MOE = Family.of_layers(read, layer)
