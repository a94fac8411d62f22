"""Blocks that decoder families are made of: grouped-query attention, the gated MLP, and the layer that joins two.

A block is built with the checklist of its own prefix and declares there which published tensors it needs. What it may
use in a step is a ``StepContext``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.backends.attention import Attention, AttentionRule
from engine.model.checkpoint.checklist import Checklist
from engine.model.checkpoint.config import ModelConfig
from engine.model.layers.layers import RmsNorm, silu_mul
from engine.model.layers.parallel import Span
from engine.model.layers.rotary import rotate
from engine.model.layers.sharded import Columns, NormMaker, RowLinear, SplitRmsNorm, adaptable, column_linear, rms_norm

NO_ADAPTERS = torch.zeros(0, dtype=torch.int64)
"""``StepContext.adapters`` of a step in which no row has an adapter."""


@dataclass(frozen=True, slots=True)
class StepContext:
    """Inputs that all layers of one step share."""

    positions: Tensor
    """int64 of shape ``(N,)``."""
    tables: tuple[tuple[Tensor, Tensor], ...]
    """Cosines and signed sines, one pair for each of the model's rotary embeddings."""
    attend: Attention
    """Attention of this step."""
    adapters: Tensor = NO_ADAPTERS
    """Adapter of each token, int64 of shape ``(N,)``, 0 for none; empty when no token of the step has one."""


class Block(Protocol):
    """A part of a layer: rows in, rows out, both of shape ``(N, hidden)``."""

    def __call__(self, x: Tensor, step: StepContext, /) -> Tensor:
        """Apply to normalised rows; the result is a fresh tensor, the same on every rank."""
        ...


@dataclass(frozen=True, slots=True)
class Sublayer:
    """One step of the residual stream: ``x += share * after(block(before(x)))``."""

    before: RmsNorm | None
    """None: the block takes the stream itself."""
    block: Block
    after: RmsNorm | None = None
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer: sublayers that add to the residual stream, one after the other.

    Backends may compute a block by an operation of their own.
    """

    sublayers: tuple[Sublayer, ...]

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """Advance the residual stream ``x`` of shape ``(N, hidden)``, in place."""
        for one in self.sublayers:
            y = one.block(x if one.before is None else one.before(x), step)
            x = x.add_(y if one.after is None else one.after(y), alpha=one.share)
        return x


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionForm:
    """In what grouped-query attention differs between families and layers."""

    bias: bool = False
    """Whether query, key and value have biases."""
    out_bias: bool = False
    head_norm: bool = False
    """Whether each head of query and key is normalised before it is rotated."""
    flat_norm: bool = False
    """Whether all heads of query are normalised together before they are rotated, and all of key."""
    norm: NormMaker = rms_norm
    """Makes the norms of heads."""
    fused: bool = False
    """Whether query, key and value are published as one map, ``qkv_proj``."""
    table: int | None = 0
    """Which of the model's rotary embeddings; None for a layer without positions."""
    scale: float | None = None
    """None: ``head_dim ** -0.5``."""
    cap: float = 0.0
    sinks: bool = False
    """Whether each head has a learnt sink."""


PLAIN_ATTENTION = AttentionForm()


class GroupedAttention:
    """Rotary grouped-query attention. Query, key and value share one matrix: one product instead of three."""

    def __init__(
        self, config: ModelConfig, checklist: Checklist, *, place: int, form: AttentionForm = PLAIN_ATTENTION
    ) -> None:
        parallel, dim, hidden = checklist.parallel, config.head_dim, config.hidden_size
        first, last = parallel.heads(config.num_heads)
        kv_first, kv_last = parallel.kv_heads(config.num_kv_heads)
        self.form = form
        self.place = place
        """In the KV."""
        self._dim = dim
        self.heads, self._rotated = last - first, last - first + kv_last - kv_first
        wide, narrow = config.num_heads * dim, config.num_kv_heads * dim
        kv_part = kv_first * dim, kv_last * dim
        part = first * dim, last * dim
        names = ("qkv_proj",) * 3 if form.fused else ("q_proj", "k_proj", "v_proj")
        rows = wide + 2 * narrow if form.fused else None
        columns = [
            Columns(names[0], wide, part, 0, rows),
            Columns(names[1], narrow, kv_part, wide if form.fused else 0, rows),
            Columns(names[2], narrow, kv_part, wide + narrow if form.fused else 0, rows),
        ]
        self.qkv = adaptable(checklist, columns, hidden, column_linear(checklist, columns, hidden, bias=form.bias))
        self.out = RowLinear(checklist, "o_proj", inputs=wide, outputs=hidden, part=part, bias=form.out_bias)
        self._q_norm = _heads_norm(checklist, "q_norm", config, form, (wide, part))
        self._k_norm = _heads_norm(checklist, "k_norm", config, form, (narrow, kv_part))
        sinks = checklist.vector("sinks", config.num_heads, part=(first, last)) if form.sinks else None
        self.rule = AttentionRule(dim**-0.5 if form.scale is None else form.scale, form.cap, sinks)

    @property
    def head_norms(self) -> tuple[RmsNorm, RmsNorm] | None:
        """Norms of single heads of query and of key; None where there are none, or where they are of all heads."""
        if isinstance(self._q_norm, RmsNorm) and isinstance(self._k_norm, RmsNorm):
            return self._q_norm, self._k_norm
        return None

    @property
    def head_gains(self) -> Tensor | None:
        """Gains of query heads, then of key heads, ``(2 D)``; None where heads are not normalised."""
        if self._q_norm is None or self._k_norm is None:
            return None
        return torch.cat((self._q_norm.weight, self._k_norm.weight))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Heads of query and key side by side, as they come out of the map, and those of values: ``(N, heads, D)``."""
        qkv = self.qkv(x).view(x.shape[0], -1, self._dim)
        return qkv[:, : self._rotated], qkv[:, self._rotated :]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: StepContext) -> Tensor:
        """Attend with rotated queries and keys, and project; gives ``(N, hidden)``."""
        return self.out(step.attend(self.place, (q, k, v), self.rule))

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """Attend; rows of shape ``(N, hidden)``."""
        both, v = self.project(x)
        q, k = both[:, : self.heads], both[:, self.heads :]
        if self._q_norm is not None and self._k_norm is not None:
            if self.form.flat_norm:
                q, k = self._q_norm(q.flatten(1)).view_as(q), self._k_norm(k.flatten(1)).view_as(k)
            else:
                q, k = self._q_norm(q), self._k_norm(k)
        if self.form.table is not None:
            tables = step.tables[self.form.table]
            if self._q_norm is None:
                both = rotate(both, *tables)
                q, k = both[:, : self.heads], both[:, self.heads :]
            else:
                q, k = rotate(q, *tables), rotate(k, *tables)
        return self.attend(q, k, v, step)


def _heads_norm(
    checklist: Checklist, name: str, config: ModelConfig, form: AttentionForm, held: tuple[int, Span]
) -> RmsNorm | SplitRmsNorm | None:
    """The norm of heads, if there is one; ``held``: numbers of all heads, and the part of them that is held."""
    if form.flat_norm:
        return SplitRmsNorm(checklist, name, held[0], config.rms_norm_eps, held[1])
    return form.norm(checklist, name, config.head_dim, config.rms_norm_eps) if form.head_norm else None


class GatedMlp:
    """``down(act(gate(x)) * up(x))``; gate and up share one matrix, which is published whole where it is ``fused``."""

    def __init__(
        self,
        checklist: Checklist,
        *,
        hidden: int,
        inner: int,
        bias: bool = False,
        activation: Callable[[Tensor], Tensor] = silu_mul,
        fused: bool = False,
    ) -> None:
        part = checklist.parallel.share(inner)
        columns = [Columns("gate_proj", inner, part), Columns("up_proj", inner, part)]
        if fused:
            columns = [Columns("gate_up_proj", inner, part, first, 2 * inner) for first in (0, inner)]
        self.gate_up = adaptable(checklist, columns, hidden, column_linear(checklist, columns, hidden, bias=bias))
        self.down = RowLinear(checklist, "down_proj", inputs=inner, outputs=hidden, part=part, bias=bias)
        self.activation = activation

    def __call__(self, x: Tensor, _step: StepContext, /) -> Tensor:
        """Apply to rows of shape ``(N, hidden)``."""
        return self.down(self.activation(self.gate_up(x)))


def pre_norm_layer(
    config: ModelConfig, checklist: Checklist, attention: Block, mlp: Block, *, share: float = 1.0
) -> Layer:
    """Layer of Llama and most later families: ``x += attention(norm(x)); x += mlp(norm(x))``, with norms of the usual
    names; ``share`` multiplies what is added."""
    size, eps = config.hidden_size, config.rms_norm_eps
    first = Sublayer(rms_norm(checklist, "input_layernorm", size, eps), attention, share=share)
    return Layer((first, Sublayer(rms_norm(checklist, "post_attention_layernorm", size, eps), mlp, share=share)))


def llama_layer(
    config: ModelConfig, checklist: Checklist, place: int, form: AttentionForm, *, share: float = 1.0
) -> Layer:
    """Pre-norm layer of grouped-query attention and a gated MLP, whose projections are fused where attention's are."""
    attention = GroupedAttention(config, checklist.under("self_attn"), place=place, form=form)
    inner, bias = config.intermediate_size, config.mlp_bias
    mlp = GatedMlp(checklist.under("mlp"), hidden=config.hidden_size, inner=inner, bias=bias, fused=form.fused)
    return pre_norm_layer(config, checklist, attention, mlp, share=share)
