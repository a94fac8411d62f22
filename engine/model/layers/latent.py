"""Multi-head latent attention, absorbed (DeepSeek-V2, arXiv 2405.04434, section 2.1).

Keys and values of all heads are maps of one latent vector a token. That vector and one rotated key, which all heads
share, are all that is stored. The map from the latent to a head's keys is applied to its query instead, the map to its
values to what comes out of attention: so attention is that of many query heads to one head, whose value is the first
part of its key.

Shape suffixes: N tokens, H heads of this rank, P numbers of a head without position, R rotated numbers, L numbers of
the latent, V of a head's value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.backends.attention import AttentionRule
from engine.core.kv.layout import LayerLayout
from engine.model.checkpoint.checklist import Checklist
from engine.model.checkpoint.config import ModelConfig
from engine.model.layers.blocks import StepContext
from engine.model.layers.layers import Linear, RmsNorm
from engine.model.layers.rotary import pairs_apart, rotate
from engine.model.layers.sharded import Columns, RowLinear, column_linear, rms_norm

LATENT_EPS = 1e-6
"""Epsilon of the norms of latent vectors, whatever the other norms have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentForm:
    """Widths of latent attention."""

    query_rank: int | None
    """Width of the latent that queries are made of; None: they are made of the hidden vector."""
    kv_rank: int
    plain_dim: int
    """Numbers of a head's query and key without position."""
    rotated_dim: int
    value_dim: int
    neighbours: bool
    """Whether rotated pairs are published side by side."""
    scale: float
    bias: bool

    @property
    def layout(self) -> LayerLayout:
        """What a layer stores."""
        return LayerLayout(heads=1, key_dim=self.kv_rank + self.rotated_dim, value_dim=self.kv_rank, latent=True)


class LatentQuery:
    """Queries of this rank's heads, from the hidden vector or through a normalised latent of their own."""

    def __init__(self, checklist: Checklist, form: LatentForm, hidden: int, heads: int) -> None:
        first, last = checklist.parallel.heads(heads)
        width = form.plain_dim + form.rotated_dim
        part = first * width, last * width
        self._narrow: Linear | None = None
        self._norm: RmsNorm | None = None
        if form.query_rank is None:
            self._wide = column_linear(checklist, [Columns("q_proj", heads * width, part)], hidden)
            return
        rank = form.query_rank
        self._narrow = column_linear(checklist, [Columns("q_a_proj", rank, (0, rank))], hidden, bias=form.bias)
        self._norm = rms_norm(checklist, "q_a_layernorm", rank, LATENT_EPS)
        self._wide = column_linear(checklist, [Columns("q_b_proj", heads * width, part)], rank)

    def __call__(self, x: Tensor) -> Tensor:
        """Map rows ``(N, hidden)`` to queries ``(N, H * (P + R))``."""
        if self._narrow is not None and self._norm is not None:
            x = self._norm(self._narrow(x))
        return self._wide(x)


class LatentAttention:
    """Each rank has some of the heads; all store the same latent."""

    def __init__(self, config: ModelConfig, checklist: Checklist, form: LatentForm, *, place: int) -> None:
        hidden, heads, rank = config.hidden_size, config.num_heads, form.kv_rank
        first, last = checklist.parallel.heads(heads)
        self._place, self._form, self._heads = place, form, last - first
        self._query = LatentQuery(checklist, form, hidden, heads)
        stored = rank + form.rotated_dim
        columns = [Columns("kv_a_proj_with_mqa", stored, (0, stored))]
        self._latent = column_linear(checklist, columns, hidden, bias=form.bias)
        self._norm = rms_norm(checklist, "kv_a_layernorm", rank, LATENT_EPS)
        width = form.plain_dim + form.value_dim
        maps = checklist.memory.empty((last - first) * width, rank)
        checklist.want("kv_b_proj.weight", (heads * width, rank), maps, part={0: (first * width, last * width)})
        both = maps.view(last - first, width, rank)
        self._to_latent_hpl = both[:, : form.plain_dim]
        self._from_latent_hlv = both[:, form.plain_dim :].transpose(1, 2)
        self._out = RowLinear(
            checklist,
            "o_proj",
            inputs=heads * form.value_dim,
            outputs=hidden,
            part=(first * form.value_dim, last * form.value_dim),
            bias=form.bias,
        )
        self._rule = AttentionRule(form.scale)

    def __call__(self, x: Tensor, step: StepContext, /) -> Tensor:
        """Attend; rows of shape ``(N, hidden)``."""
        form, tokens = self._form, len(x)
        q_nhd = self._query(x).view(tokens, self._heads, -1)
        stored = self._latent(x)
        rotated = torch.cat((q_nhd[..., form.plain_dim :], stored[:, form.kv_rank :].unsqueeze(1)), 1)
        if form.neighbours:
            rotated = pairs_apart(rotated)
        rotated = rotate(rotated, *step.tables[0])
        q_hnl = torch.bmm(q_nhd[..., : form.plain_dim].transpose(0, 1), self._to_latent_hpl)
        q_nhs = torch.cat((q_hnl.transpose(0, 1), rotated[:, :-1]), -1)
        k_n1s = torch.cat((self._norm(stored[:, : form.kv_rank]).unsqueeze(1), rotated[:, -1:]), -1)
        seen_nhl = step.attend(self._place, (q_nhs, k_n1s, None), self._rule).view(tokens, self._heads, -1)
        out_hnv = torch.bmm(seen_nhl.transpose(0, 1), self._from_latent_hlv)
        return self._out(out_hnv.transpose(0, 1).flatten(1))
