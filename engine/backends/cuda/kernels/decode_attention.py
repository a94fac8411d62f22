"""Attention of decoding rows over the paged cache: one token a row, contexts split between programs, then combined.

Programs are as many as the bucket says, whatever the lengths (a persistent grid): each works through the splits that
the step's map deals to it (``engine.backends.cuda.kernels.tile_map``). All query heads that share a key-value head are
computed together, so that keys are read once. A row's numbers are the same bits in any batch and for any number of
programs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.backends.attention import AttentionRule
from engine.backends.cuda.kernels.attention_tile import CachedLayer, attend, cached_layer, layer_form, load_query
from engine.backends.cuda.kernels.tile_map import DecodeMap, DecodeShape, row_tiles
from engine.backends.cuda.kernels.triton_common import (
    LEAST_DOT,
    LOG2_E,
    ceil_div,
    first_seen,
    load_lines,
    narrow,
    power_of_two,
    store_lines,
)
from engine.backends.cuda.runtime.operations import KvLayer

MOST_HEADS = 64
"""Query heads that one program computes together: more do not fit the registers with a latent's values."""


class Partials(NamedTuple):
    """Results of splits, float32; reused by all layers."""

    outputs: Tensor
    """``(rows, splits, heads, value_dim)``, each a mean of values."""
    scales: Tensor
    """``(rows, splits, heads)``: the logarithm to base 2 of each mean's sum of weights."""

    @classmethod
    def empty(cls, rows: int, heads: int, value_dim: int, shape: DecodeShape, device: torch.device) -> Partials:
        """Room for a bucket."""
        sizes = (rows, shape.splits, heads)
        return cls(torch.zeros(*sizes, value_dim, device=device), torch.zeros(sizes, device=device))


@triton.jit(do_not_specialize=("table_row",))
def _decode(
    q: tl.tensor,
    q_row: tl.tensor,
    layer: CachedLayer,
    partials: Partials,
    dealt: DecodeMap,
    tables: tl.tensor,
    table_row: tl.tensor,
    lengths: tl.tensor,
    heads: tl.tensor,
    FORM: tl.constexpr,
    SHAPE: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    # By a name: Triton before 3.7 passes on no object that is a field of another.
    REACH: tl.constexpr = FORM.reach
    program = tl.program_id(0)
    kv_head = tl.program_id(1) // PARTS
    member = tl.program_id(1) % PARTS * HEADS + tl.arange(0, HEADS)
    live = member < FORM.group
    head = kv_head * FORM.group + member
    for unit in range(tl.load(dealt.begins + program), tl.load(dealt.begins + program + 1)):
        row = tl.load(dealt.unit_rows + unit).to(tl.int64)
        split = tl.load(dealt.unit_splits + unit)
        length = tl.load(lengths + row)
        first = first_seen(length - 1, REACH)
        begin, tiles, width = row_tiles(length, REACH, SHAPE)
        start, stop = begin + split * width, begin + tl.minimum((split + 1) * width, tiles)
        query, query_tail = load_query(q + row * q_row + head * FORM.key_dim, live, FORM)
        table, last = tables + row * table_row, length - 1
        firsts, lasts = tl.zeros([1], tl.int32) + first, tl.zeros([1], tl.int32) + last
        largest, weight, total = attend(
            query, query_tail, layer, table, kv_head, start, stop, first, last, firsts, lasts, FORM, SHAPE.tile
        )
        out = (row * SHAPE.splits + split) * heads + head
        tl.store(partials.scales + out, largest + tl.log2(weight), mask=live)
        store_lines(partials.outputs + out * FORM.value_dim, live, 0, total / weight[:, None], FORM.value_dim)


@triton.jit
def _combine(
    partials: Partials,
    lengths: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    heads: tl.tensor,
    FORM: tl.constexpr,
    SHAPE: tl.constexpr,
) -> None:
    REACH: tl.constexpr = FORM.reach
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    _, tiles, width = row_tiles(tl.load(lengths + row), REACH, SHAPE)
    split = tl.arange(0, SHAPE.splits)
    exists = split * width < tiles
    place = (row * SHAPE.splits + split) * heads + head
    size = tl.load(partials.scales + place, mask=exists, other=-float("inf"))
    # A row of no length has no split: zeros come out of it.
    peak = tl.max(tl.where(exists, size, -3.0e38), 0)
    whole = 0.0
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        peak = tl.maximum(peak, sink)
        whole = tl.exp2(sink - peak)
    share = tl.where(exists, tl.exp2(size - peak), 0.0)
    whole += tl.sum(share, 0)
    part = load_lines(partials.outputs + place * FORM.value_dim, exists, 0, FORM.value_pad, FORM.value_dim)
    mean = tl.sum(part * share[:, None], 0) / tl.where(tiles == 0, 1.0, whole)
    column = tl.arange(0, FORM.value_pad)
    address = out + (row * heads + head) * FORM.value_dim + column
    tl.store(address, narrow(mean, out.dtype.element_ty), mask=column < FORM.value_dim)


def decode_attention(
    q: Tensor,
    layer: KvLayer,
    rows: tuple[Tensor, Tensor],
    mapped: tuple[DecodeMap, DecodeShape, Partials],
    rule: AttentionRule,
    out: Tensor,
) -> None:
    """Attend with one token a row.

    Args:
        q: ``(rows, heads, key_dim)``, contiguous in the last two axes.
        layer: keys and values, this step's own written already.
        rows: block tables int32 ``(rows, width)``, and lengths int32 ``(rows,)`` as ``map_decode`` had them.
        mapped: the step's map for the layer's reach, how it was cut, and room for partial results.
        rule: how the layer weighs.
        out: ``(rows, heads, value_dim)``, contiguous; rows of no length become zeros.
    """
    (tables, lengths), (dealt, shape, partials) = rows, mapped
    heads, form = q.shape[1], layer_form(layer, q.shape[1], rule)
    together = min(power_of_two(form.group, LEAST_DOT), MOST_HEADS)
    parts = ceil_div(form.group, together)
    _decode[(len(dealt.begins) - 1, layer.heads * parts)](
        q,
        q.stride(0),
        cached_layer(layer, rule),
        partials,
        dealt,
        tables,
        tables.stride(0),
        lengths,
        heads,
        FORM=form,
        SHAPE=shape,
        HEADS=together,
        PARTS=parts,
        **shape.launch.options,
    )
    _combine[(len(q), heads)](partials, lengths, rule.sinks, out, heads, FORM=form, SHAPE=shape)
