"""Mixtral: Mistral's layer with experts in place of the MLP (Jiang et al., arXiv 2401.04088)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.model.checkpoint.checklist import Checklist
from engine.model.checkpoint.config import ModelConfig, grouped_layers, read_common, read_window
from engine.model.checkpoint.fields import Fields
from engine.model.layers.blocks import GroupedAttention, Layer, pre_norm_layer
from engine.model.layers.decoder import Family
from engine.model.layers.experts import MixtureOfExperts, make_router, separate_experts
from engine.model.layers.routing import Softmax, read_experts

EXPERT_NAMES = ("w1", "w3", "w2")
"""Names of the gate, up and down projections."""

DEFAULT_THETA = 1_000_000.0
"""Rotary base of a description without one."""


@dataclass(frozen=True, slots=True)
class MixtralConfig:
    """Family-specific part of the description."""

    experts: int
    top: int


def read(fields: Fields) -> ModelConfig:
    """Validate a ``config.json``."""
    fields.only("hidden_act", ("silu",), default="silu")
    common = read_common(
        fields,
        ("MixtralForCausalLM",),
        default_kv_heads=8,
        default_positions=131_072,
        default_theta=DEFAULT_THETA,
        default_eps=1e-5,
    )
    experts, top = read_experts(fields, "num_local_experts", common.num_layers, default=8, default_top=2)
    return replace(
        common,
        layers=grouped_layers(common, (read_window(fields),) * common.num_layers),
        extra=MixtralConfig(experts, top),
    )


def layer(config: ModelConfig, checklist: Checklist, _index: int, place: int) -> Layer:
    """Build one layer."""
    extra, below, hidden = config.extra_of(MixtralConfig), checklist.under("block_sparse_moe"), config.hidden_size
    attention = GroupedAttention(config, checklist.under("self_attn"), place=place)
    route = Softmax(extra.top, renormalised=True)
    mlp = MixtureOfExperts(
        checklist.parallel,
        make_router(below, "gate", hidden=hidden, count=extra.experts, route=route),
        separate_experts(below, count=extra.experts, hidden=hidden, inner=config.intermediate_size, names=EXPERT_NAMES),
    )
    return pre_norm_layer(config, checklist, attention, mlp)


MIXTRAL = Family.of_layers(read, layer)
