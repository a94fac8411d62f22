"""Mixtral: Mistral's layer with experts in place of the MLP (Jiang et al., arXiv 2401.04088)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.model.blocks import GroupedAttention, PreNormLayer, pre_norm_layer
from engine.model.checklist import Checklist
from engine.model.config import ModelConfig, grouped_layers, read_common, read_window
from engine.model.decoder import Decoder, Family
from engine.model.experts import MixtureOfExperts, make_router, separate_experts
from engine.model.fields import Fields
from engine.model.rotary import Rotary
from engine.model.routing import Softmax, read_experts

EXPERT_NAMES = ("w1", "w3", "w2")
"""Gate, up and down."""

DEFAULT_THETA = 1_000_000.0
"""Of a description that names no rotary base."""


@dataclass(frozen=True, slots=True)
class MixtralConfig:
    """What only this family has."""

    experts: int
    top: int


def read(fields: Fields) -> ModelConfig:
    """Check a ``config.json``."""
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


def layer(config: ModelConfig, checklist: Checklist, _index: int, place: int) -> PreNormLayer:
    """One layer."""
    extra, below, hidden = config.extra, checklist.under("block_sparse_moe"), config.hidden_size
    assert isinstance(extra, MixtralConfig), "the description was read by this module"
    attention = GroupedAttention(config, checklist.under("self_attn"), place=place)
    route = Softmax(extra.top, renormalised=True)
    mlp = MixtureOfExperts(
        checklist.parallel,
        make_router(below, "gate", hidden=hidden, count=extra.experts, route=route),
        separate_experts(
            below, count=extra.experts, hidden=hidden, inner=config.intermediate_size, names=EXPERT_NAMES
        ),
    )
    return pre_norm_layer(config, checklist, attention, mlp)


def build(config: ModelConfig, checklist: Checklist) -> Decoder:
    """The model."""
    return Decoder(config, checklist, layer, (Rotary(config.rope, config.head_dim, checklist.memory.device),))


MIXTRAL = Family(read, build)
