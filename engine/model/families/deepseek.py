"""DeepSeek-V3 and Kimi-K2: latent attention, many small experts in groups, a shared one (arXiv 2412.19437, 2507.20534).

Kimi-K2.5 is Kimi-K2 with a vision part, which is not read. The first layers have an MLP. The layers after the last one
predict several tokens at once (MTP) and are not read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from engine.model.checkpoint.checklist import Checklist
from engine.model.checkpoint.config import (
    MAX_HEAD_DIM,
    MAX_HIDDEN,
    MAX_INTERMEDIATE,
    MAX_LAYERS,
    ModelConfig,
    read_common,
)
from engine.model.checkpoint.fields import Fields
from engine.model.layers.blocks import GatedMlp, Layer, pre_norm_layer
from engine.model.layers.decoder import Decoder, Family
from engine.model.layers.experts import MixtureOfExperts, make_router, separate_experts
from engine.model.layers.latent import LatentAttention, LatentForm
from engine.model.layers.rotary import Rotary, yarn_mscale
from engine.model.layers.routing import GROUP_VOTES, MAX_EXPERTS, MAX_FACTOR, GroupedSigmoid, read_experts
from engine.model.layers.text_part import text_part

MAX_MSCALE = 1e3
MAX_SHARED = 64
MAX_EXTRA_LAYERS = 16
"""Largest number of multi-token prediction layers; published models have one or none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSeekConfig:
    """Family-specific part of the description."""

    attention: LatentForm
    dense_layers: int
    """Number of layers without experts, counted from the first."""
    experts: int
    top: int
    inner: int
    shared_inner: int
    groups: int
    best_groups: int
    renormalised: bool
    factor: float
    further_layers: int
    """Number of layers published after the last one; not read."""


def read(fields: Fields) -> ModelConfig:
    """Validate a ``config.json``."""
    fields.only("hidden_act", ("silu",), default="silu")
    fields.only("scoring_func", ("sigmoid",), default="sigmoid")
    fields.only("topk_method", ("noaux_tc",), default="noaux_tc")
    fields.integer("moe_layer_freq", 1, 1, default=1)
    attention = _read_attention(fields)
    common = read_common(
        fields, ("DeepseekV3ForCausalLM",), default_head_dim=attention.rotated_dim, default_positions=4_096
    )
    count = common.num_layers
    return replace(
        common,
        head_dim=attention.rotated_dim,
        layers=(attention.layout,) * count,
        attention_bias=attention.bias,
        extra=_read_experts(fields, count, attention),
    )


def _read_attention(fields: Fields) -> LatentForm:
    plain = fields.integer("qk_nope_head_dim", 1, MAX_HEAD_DIM, default=128)
    rotated = fields.integer("qk_rope_head_dim", 2, MAX_HEAD_DIM, default=64)
    if rotated % 2:
        raise fields.error(f"qk_rope_head_dim {rotated} is odd; rotary embedding needs pairs")
    # A null value means none; an absent key means the default.
    no_rank = "q_lora_rank" in fields.values and fields.absent("q_lora_rank")
    return LatentForm(
        query_rank=None if no_rank else fields.integer("q_lora_rank", 1, MAX_HIDDEN, default=1_536),
        kv_rank=fields.integer("kv_lora_rank", 1, MAX_HIDDEN, default=512),
        plain_dim=plain,
        rotated_dim=rotated,
        value_dim=fields.integer("v_head_dim", 1, MAX_HEAD_DIM, default=128),
        neighbours=fields.boolean("rope_interleave", default=True),
        scale=_stretched(fields) / math.sqrt(plain + rotated),
        bias=fields.boolean("attention_bias"),
    )


def _stretched(fields: Fields) -> float:
    """Return the factor by which scores are scaled up for an extended context."""
    key = "rope_parameters" if fields.absent("rope_scaling") else "rope_scaling"
    if fields.absent(key):
        return 1.0
    rope = fields.section(key)
    if rope.values.get("rope_type", rope.values.get("type", "default")) == "default":
        return 1.0
    all_dim = rope.number("mscale_all_dim", 0.0, MAX_MSCALE, default=0.0)
    factor = rope.number("factor", 0.0, MAX_MSCALE, default=1.0)
    return yarn_mscale(factor, all_dim) ** 2 if all_dim else 1.0


def _read_experts(fields: Fields, num_layers: int, attention: LatentForm) -> DeepSeekConfig:
    experts, top = read_experts(fields, "n_routed_experts", num_layers, default=256, default_top=8)
    groups = fields.integer("n_group", 1, MAX_EXPERTS, default=8)
    best = fields.integer("topk_group", 1, groups, default=min(4, groups))
    if experts % groups or (best < groups and experts // groups < GROUP_VOTES):
        raise fields.error(f"{experts} experts do not lie in {groups} groups of at least {GROUP_VOTES}")
    if top > experts // groups * best:
        raise fields.error(f"num_experts_per_tok is {top}; {best} groups of {experts // groups} have fewer experts")
    inner = fields.integer("moe_intermediate_size", 1, MAX_INTERMEDIATE, default=2_048)
    return DeepSeekConfig(
        attention=attention,
        dense_layers=fields.integer("first_k_dense_replace", 0, MAX_LAYERS, default=3),
        experts=experts,
        top=top,
        inner=inner,
        shared_inner=inner * fields.integer("n_shared_experts", 1, MAX_SHARED, default=1),
        groups=groups,
        best_groups=best,
        renormalised=fields.boolean("norm_topk_prob", default=True),
        factor=fields.number("routed_scaling_factor", 0.0, MAX_FACTOR, default=2.5),
        further_layers=fields.integer("num_nextn_predict_layers", 0, MAX_EXTRA_LAYERS, default=1),
    )


def layer(config: ModelConfig, checklist: Checklist, index: int, place: int) -> Layer:
    """Build one layer."""
    extra, below, hidden = config.extra_of(DeepSeekConfig), checklist.under("mlp"), config.hidden_size
    attention = LatentAttention(config, checklist.under("self_attn"), extra.attention, place=place)
    if index < extra.dense_layers:
        dense = GatedMlp(below, hidden=hidden, inner=config.intermediate_size)
        return pre_norm_layer(config, checklist, attention, dense)
    bias = below.vector("gate.e_score_correction_bias", extra.experts, dtype=torch.float32)
    route = GroupedSigmoid(extra.top, bias, extra.groups, extra.best_groups, extra.renormalised, extra.factor)
    # The router computes in float32, like the published code: scores of 256 experts are close.
    router = make_router(below, "gate", hidden=hidden, count=extra.experts, route=route, dtype=torch.float32)
    experts = separate_experts(below, count=extra.experts, hidden=hidden, inner=extra.inner)
    shared = GatedMlp(below.under("shared_experts"), hidden=hidden, inner=extra.shared_inner)
    mlp = MixtureOfExperts(checklist.parallel, router, experts, shared=shared)
    return pre_norm_layer(config, checklist, attention, mlp)


def build(config: ModelConfig, checklist: Checklist) -> Decoder:
    """Build the model."""
    extra = config.extra_of(DeepSeekConfig)
    for index in range(config.num_layers, config.num_layers + extra.further_layers):
        checklist.ignore_prefixes(f"model.layers.{index}.")
    rotary = Rotary(config.rope, extra.attention.rotated_dim, checklist.memory.device)
    return Decoder(config, checklist, layer, (rotary,))


DEEPSEEK = Family(read, build)
KIMI_WITH_VISION = text_part(
    DEEPSEEK,
    outer="KimiK25ForConditionalGeneration",
    inner="DeepseekV3ForCausalLM",
    unread=("vision_tower.", "mm_projector."),
)
