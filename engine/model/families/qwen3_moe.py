"""Qwen3-MoE: Qwen3's layer with experts in place of some MLPs (Yang et al., arXiv 2505.09388)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.core.kv.layout import FULL
from engine.model.checkpoint.checklist import Checklist
from engine.model.checkpoint.config import (
    MAX_INTERMEDIATE,
    MAX_LAYERS,
    ModelConfig,
    grouped_layers,
    read_common,
    read_window,
)
from engine.model.checkpoint.fields import Fields
from engine.model.families.qwen2 import DEFAULT_WINDOW
from engine.model.layers.blocks import AttentionForm, GatedMlp, GroupedAttention, Layer, pre_norm_layer
from engine.model.layers.decoder import Family
from engine.model.layers.experts import Experts, MixtureOfExperts, make_router, separate_experts
from engine.model.layers.routing import Router, Softmax, read_experts


@dataclass(frozen=True, slots=True)
class QwenExperts:
    """Layers of a Qwen model that have experts, and the experts' dimensions."""

    sparse: frozenset[int]
    experts: int
    top: int
    inner: int
    renormalised: bool


def read_qwen_experts(fields: Fields, num_layers: int, *, default: tuple[int, int, int]) -> QwenExperts:
    """Validate the expert fields of Qwen's descriptions.

    Args:
        fields: content of a ``config.json``.
        num_layers: number of layers of the model.
        default: default number of experts, experts for each token, and inner width of an expert.
    """
    count, top, inner = default
    # Published files say num_experts; transformers 5 writes the other name.
    key = "num_local_experts" if fields.absent("num_experts") else "num_experts"
    experts, top = read_experts(fields, key, num_layers, default=count, default_top=top)
    every = fields.integer("decoder_sparse_step", 1, MAX_LAYERS, default=1)
    dense = fields.indices("mlp_only_layers", num_layers) or frozenset()
    return QwenExperts(
        sparse=frozenset(range(every - 1, num_layers, every)) - dense,
        experts=experts,
        top=top,
        inner=fields.integer("moe_intermediate_size", 1, MAX_INTERMEDIATE, default=inner),
        renormalised=fields.boolean("norm_topk_prob"),
    )


def read(fields: Fields) -> ModelConfig:
    """Validate a ``config.json``. Where windows are enabled, every layer has one."""
    fields.only("hidden_act", ("silu",), default="silu")
    common = read_common(fields, ("Qwen3MoeForCausalLM",), default_kv_heads=4, default_positions=32_768)
    named = "sliding_window" in fields.values
    used = fields.boolean("use_sliding_window")
    window = read_window(fields, default=None if named else DEFAULT_WINDOW) if used else FULL
    return replace(
        common,
        attention_bias=fields.boolean("attention_bias"),
        layers=grouped_layers(common, (window,) * common.num_layers),
        extra=read_qwen_experts(fields, common.num_layers, default=(128, 8, 768)),
    )


def qwen_experts(config: ModelConfig, form: QwenExperts, checklist: Checklist) -> tuple[Router, Experts]:
    """Build the router and the experts of one layer."""
    hidden, count = config.hidden_size, form.experts
    route = Softmax(form.top, form.renormalised)
    router = make_router(checklist, "gate", hidden=hidden, count=count, route=route)
    return router, separate_experts(checklist, count=count, hidden=hidden, inner=form.inner)


def layer(config: ModelConfig, checklist: Checklist, index: int, place: int) -> Layer:
    """Build one layer."""
    extra, below = config.extra_of(QwenExperts), checklist.under("mlp")
    form = AttentionForm(bias=config.attention_bias, out_bias=config.attention_bias, head_norm=True)
    attention = GroupedAttention(config, checklist.under("self_attn"), place=place, form=form)
    mlp: GatedMlp | MixtureOfExperts
    if index in extra.sparse:
        mlp = MixtureOfExperts(checklist.parallel, *qwen_experts(config, extra, below))
    else:
        mlp = GatedMlp(below, hidden=config.hidden_size, inner=config.intermediate_size)
    return pre_norm_layer(config, checklist, attention, mlp)


QWEN3_MOE = Family.of_layers(read, layer)
