"""Qwen3-MoE: Qwen3's layer with experts in place of some MLPs (Yang et al., arXiv 2505.09388)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.kv.layout import FULL
from engine.model.blocks import AttentionForm, GatedMlp, GroupedAttention, PreNormLayer, pre_norm_layer
from engine.model.checklist import Checklist
from engine.model.config import MAX_INTERMEDIATE, MAX_LAYERS, ModelConfig, grouped_layers, read_common, read_window
from engine.model.decoder import Decoder, Family
from engine.model.experts import Experts, MixtureOfExperts, make_router, separate_experts
from engine.model.fields import Fields
from engine.model.qwen2 import DEFAULT_WINDOW
from engine.model.rotary import Rotary
from engine.model.routing import Router, Softmax, read_experts


@dataclass(frozen=True, slots=True)
class QwenExperts:
    """Which layers of a Qwen have experts, and which."""

    sparse: frozenset[int]
    experts: int
    top: int
    inner: int
    renormalised: bool


def read_qwen_experts(fields: Fields, num_layers: int, *, default: tuple[int, int, int]) -> QwenExperts:
    """Check what Qwen's descriptions say of experts.

    Args:
        fields: of a ``config.json``.
        num_layers: of the model.
        default: experts, experts a token and an expert's inner width of a description that does not say.
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
    """Check a ``config.json``. Windows, where they are used, are in every layer."""
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
    """Router and experts of one layer."""
    hidden, count = config.hidden_size, form.experts
    route = Softmax(form.top, form.renormalised)
    router = make_router(checklist, "gate", hidden=hidden, count=count, route=route)
    return router, separate_experts(checklist, count=count, hidden=hidden, inner=form.inner)


def layer(config: ModelConfig, checklist: Checklist, index: int, place: int) -> PreNormLayer:
    """One layer."""
    extra, below = config.extra, checklist.under("mlp")
    assert isinstance(extra, QwenExperts), "the description was read by this module"
    form = AttentionForm(bias=config.attention_bias, out_bias=config.attention_bias, head_norm=True)
    attention = GroupedAttention(config, checklist.under("self_attn"), place=place, form=form)
    mlp: GatedMlp | MixtureOfExperts
    if index in extra.sparse:
        mlp = MixtureOfExperts(checklist.parallel, *qwen_experts(config, extra, below))
    else:
        mlp = GatedMlp(below, hidden=config.hidden_size, inner=config.intermediate_size)
    return pre_norm_layer(config, checklist, attention, mlp)


def build(config: ModelConfig, checklist: Checklist) -> Decoder:
    """The model."""
    return Decoder(config, checklist, layer, (Rotary(config.rope, config.head_dim, checklist.memory.device),))


QWEN3_MOE = Family(read, build)
