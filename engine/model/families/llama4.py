"""Llama 4, text only: chunked attention, experts, and in every fourth layer full attention without positions.

Queries and keys are rotated in neighbouring pairs and then normalised without a gain. In layers without positions,
queries are scaled by the logarithm of their position (arXiv 2501.19399), so that attention stays sharp over long
contexts. A token is multiplied by the sigmoid of its score before it enters its experts, and always passes the shared
one.

Published checkpoints contain a vision part, which ``LLAMA4_WITH_VISION`` leaves unread.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch.nn.functional as F
from torch import Tensor

from engine.core.kv.layout import FULL, Reach
from engine.model.checkpoint.checklist import Checklist
from engine.model.checkpoint.config import (
    MAX_INTERMEDIATE,
    MAX_LAYERS,
    MAX_POSITIONS,
    ModelConfig,
    grouped_layers,
    read_common,
)
from engine.model.checkpoint.fields import Fields
from engine.model.layers.blocks import AttentionForm, GatedMlp, GroupedAttention, Layer, StepContext, pre_norm_layer
from engine.model.layers.decoder import Family
from engine.model.layers.experts import MixtureOfExperts, make_router, stacked_experts
from engine.model.layers.rotary import pairs_apart, rotate
from engine.model.layers.routing import SigmoidOfTop, read_experts
from engine.model.layers.text_part import text_part

LAYER_TYPES = ("full_attention", "chunked_attention")
"""Valid values in ``layer_types``."""

DEFAULT_CHUNK = 8_192
DEFAULT_THETA = 500_000.0


@dataclass(frozen=True, slots=True)
class Tuning:
    """Query scale of a layer without positions: ``1 + gain * log(1 + floor((position + 1) / step))``."""

    step: int
    gain: float

    def __call__(self, positions: Tensor) -> Tensor:
        """Return the factors, float32 of shape ``(N, 1, 1)``."""
        steps = (positions + 1) // self.step
        # float64: see ``engine.model.layers.routing.sigmoid``.
        return steps.double().log1p().mul_(self.gain).add_(1.0).float().view(-1, 1, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama4Config:
    """Family-specific part of the description."""

    rotated: tuple[bool, ...]
    sparse: frozenset[int]
    """Indices of layers with experts."""
    experts: int
    top: int
    dense_inner: int
    """Inner width of the MLP in layers without experts."""
    normalised: bool
    tuning: Tuning | None


class Llama4Attention:
    """Grouped-query attention with this family's treatment of query and key."""

    def __init__(self, config: ModelConfig, checklist: Checklist, *, index: int, place: int) -> None:
        extra = config.extra_of(Llama4Config)
        form = AttentionForm(bias=config.attention_bias, out_bias=config.attention_bias, table=None)
        self._inner = GroupedAttention(config, checklist, place=place, form=form)
        self._rotated = extra.rotated[index]
        self._norm_eps = config.rms_norm_eps if extra.normalised else None
        self._tuning = None if self._rotated else extra.tuning

    def __call__(self, x: Tensor, step: StepContext, /) -> Tensor:
        """Attend; rows of shape ``(N, hidden)``."""
        both, v = self._inner.project(x)
        if self._rotated:
            both = rotate(pairs_apart(both), *step.tables[0])
            if self._norm_eps is not None:
                both = F.rms_norm(both, both.shape[-1:], None, self._norm_eps)
        q, k = both[:, : self._inner.heads], both[:, self._inner.heads :]
        if self._tuning is not None:
            q = (q * self._tuning(step.positions)).to(q.dtype)
        return self._inner.attend(q, k, v, step)


def read(fields: Fields) -> ModelConfig:
    """Validate a ``config.json``."""
    fields.only("hidden_act", ("silu",), default="silu")
    common = read_common(
        fields,
        ("Llama4ForCausalLM",),
        default_kv_heads=8,
        default_head_dim=128,
        default_positions=131_072,
        default_theta=DEFAULT_THETA,
        default_eps=1e-5,
    )
    count = common.num_layers
    rotated = _rotated(fields, count)
    chunk = Reach("chunk", fields.integer("attention_chunk_size", 1, MAX_POSITIONS, default=DEFAULT_CHUNK))
    types = fields.words("layer_types", count, LAYER_TYPES)
    chunked = rotated if types is None else tuple(one == "chunked_attention" for one in types)
    experts, top = read_experts(fields, "num_local_experts", count, default=16, default_top=1)
    every = fields.integer("interleave_moe_layer_step", 1, MAX_LAYERS, default=1)
    sparse = fields.indices("moe_layers", count)
    tuning = Tuning(
        fields.integer("floor_scale", 1, MAX_POSITIONS, default=8_192),
        fields.number("attn_scale", 0.0, 1e3, default=0.1),
    )
    return replace(
        common,
        attention_bias=fields.boolean("attention_bias"),
        layers=grouped_layers(common, tuple(chunk if one else FULL for one in chunked)),
        extra=Llama4Config(
            rotated=rotated,
            sparse=frozenset(range(every - 1, count, every)) if sparse is None else sparse,
            experts=experts,
            top=top,
            dense_inner=fields.integer("intermediate_size_mlp", 1, MAX_INTERMEDIATE, default=16_384),
            normalised=fields.boolean("use_qk_norm", default=True),
            tuning=tuning if fields.boolean("attn_temperature_tuning", default=True) else None,
        ),
    )


def _rotated(fields: Fields, count: int) -> tuple[bool, ...]:
    """Return which layers rotate; published descriptions have an empty list for the default."""
    every = fields.integer("no_rope_layer_interval", 1, MAX_LAYERS, default=4)
    if not fields.values.get("no_rope_layers"):
        return tuple((index + 1) % every != 0 for index in range(count))
    given = fields.integers("no_rope_layers", count, 0, 1)
    assert given is not None, "the list is there"
    return tuple(map(bool, given))


def layer(config: ModelConfig, checklist: Checklist, index: int, place: int) -> Layer:
    """Build one layer."""
    extra, below, hidden = config.extra_of(Llama4Config), checklist.under("feed_forward"), config.hidden_size
    attention = Llama4Attention(config, checklist.under("self_attn"), index=index, place=place)
    if index not in extra.sparse:
        dense = GatedMlp(below, hidden=hidden, inner=extra.dense_inner)
        return pre_norm_layer(config, checklist, attention, dense)
    mlp = MixtureOfExperts(
        checklist.parallel,
        make_router(below, "router", hidden=hidden, count=extra.experts, route=SigmoidOfTop(extra.top)),
        stacked_experts(below, count=extra.experts, hidden=hidden, inner=config.intermediate_size),
        shared=GatedMlp(below.under("shared_expert"), hidden=hidden, inner=config.intermediate_size),
        weigh_inputs=True,
    )
    return pre_norm_layer(config, checklist, attention, mlp)


LLAMA4 = Family.of_layers(read, layer)
LLAMA4_WITH_VISION = text_part(
    LLAMA4,
    outer="Llama4ForConditionalGeneration",
    inner="Llama4ForCausalLM",
    unread=("vision_model.", "multi_modal_projector."),
)
