"""Attention of decoding rows over the paged cache: one token a row, contexts split between programs, then combined.

Programs are as many as the bucket says, whatever the lengths (a persistent grid): each works through the splits that
the step's map deals to it (``engine.backends.cuda.kernels.tile_map``). All query heads that share a key-value head are
computed together, so that keys are read once. A row's numbers are the same bits in any batch and for any number of
programs.

Splits are combined in their order: with few rows by the program that finishes a row's last split, else by a launch of
its own.
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
    power_of_two,
    store_lines,
)
from engine.backends.cuda.runtime.operations import KvLayer

MOST_HEADS = 64
"""Query heads that one program computes together: more do not fit the registers with a latent's values."""


MOST_JOINED_ROWS = 16
"""Rows up to which the last program of a row combines its splits: so many counters are looked after, and with more rows
a launch is no matter."""

MOST_JOINED_NUMBERS = 2_048
"""Numbers of a program's heads at the most where it combines splits: more would not fit the registers."""

TOGETHER_AT_ONCE = tl.constexpr(8)
"""Splits that are read at once when they are combined: those of 2,048 tokens while a context is short."""


class Partials(NamedTuple):
    """Results of splits; reused by all layers."""

    outputs: Tensor
    """float32 ``(rows, splits, heads, value_dim)``, each a mean of values."""
    scales: Tensor
    """float32 ``(rows, splits, heads)``: the logarithm to base 2 of each mean's sum of weights."""
    arrived: Tensor
    """int32, zeros before and after each launch: splits that were computed, by row and group of heads."""

    @classmethod
    def empty(
        cls,
        rows: int,
        heads: int,
        value_dim: int,
        shape: DecodeShape,
        device: torch.device,
        arrived: Tensor | None = None,
    ) -> Partials:
        """Room for a bucket; ``arrived``: counters that are there already."""
        sizes = (rows, shape.splits, heads)
        if arrived is None:
            arrived = counters(heads, device)
        return cls(torch.empty(*sizes, value_dim, device=device), torch.empty(sizes, device=device), arrived)


def counters(heads: int, device: torch.device) -> Tensor:
    """Counters of splits for as many rows as have them."""
    return torch.zeros(MOST_JOINED_ROWS * heads, dtype=torch.int32, device=device)


@triton.jit
def _join(
    partials: Partials,
    row: tl.tensor,
    head: tl.tensor,
    live: tl.tensor,
    units: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    heads: tl.tensor,
    FORM: tl.constexpr,
    SHAPE: tl.constexpr,
) -> None:
    """Combine the splits of a row for some heads, in the order of splits: number by number, so that no layout decides
    about a bit. A row of no splits becomes zeros."""
    WIDTH: tl.constexpr = FORM.value_pad
    split = tl.arange(0, SHAPE.splits)
    place = (row * SHAPE.splits + split)[:, None] * heads + head[None, :]
    exists = (split < units)[:, None] & live[None, :]
    size = tl.load(partials.scales + place, mask=exists, other=-float("inf"), cache_modifier=".cg")
    peak = tl.max(tl.where(exists, size, -3.0e38), 0)
    whole = peak * 0.0
    if sinks is not None:
        sink = tl.load(sinks + head, mask=live, other=0.0).to(tl.float32) * LOG2_E
        peak = tl.maximum(peak, sink)
        whole = tl.exp2(sink - peak)
    total = tl.zeros([head.shape[0], WIDTH], tl.float32)
    column = tl.arange(0, WIDTH)
    for start in range(0, units, TOGETHER_AT_ONCE):
        for offset in tl.static_range(TOGETHER_AT_ONCE):
            there = live & (start + offset < units)
            line = (row * SHAPE.splits + start + offset) * heads + head
            scale = tl.load(partials.scales + line, mask=there, other=-float("inf"), cache_modifier=".cg")
            address = partials.outputs + line[:, None] * FORM.value_dim + column[None, :]
            wanted = there[:, None] & (column < FORM.value_dim)[None, :]
            part = tl.load(address, mask=wanted, other=0.0, cache_modifier=".cg")
            share = tl.exp2(scale - peak)
            whole += share
            total += part * share[:, None]
    mean = total / tl.where(units == 0, 1.0, whole)[:, None]
    store_lines(out + (row * heads + head) * FORM.value_dim, live, 0, mean, FORM.value_dim)


@triton.jit(do_not_specialize=("table_row", "num_rows"))
def _decode(
    q: tl.tensor,
    q_row: tl.tensor,
    layer: CachedLayer,
    partials: Partials,
    dealt: DecodeMap,
    tables: tl.tensor,
    table_row: tl.tensor,
    lengths: tl.tensor,
    num_rows: tl.tensor,
    out: tl.tensor,
    heads: tl.tensor,
    FORM: tl.constexpr,
    SHAPE: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    JOINED: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    kv_head = tl.program_id(1) // PARTS
    member = tl.program_id(1) % PARTS * HEADS + tl.arange(0, HEADS)
    live = member < FORM.group
    head = kv_head * FORM.group + member
    if JOINED:
        # Rows without a split would be combined by no program.
        for idle in range(program, num_rows, tl.num_programs(0)):
            length = tl.load(lengths + idle)
            if length == 0:
                _join(partials, length.to(tl.int64) + idle, head, live, length, layer.sinks, out, heads, FORM, SHAPE)
    for unit in range(tl.load(dealt.begins + program), tl.load(dealt.begins + program + 1)):
        row = tl.load(dealt.unit_rows + unit).to(tl.int64)
        split = tl.load(dealt.unit_splits + unit)
        length = tl.load(lengths + row)
        first = first_seen(length - 1, FORM.reach)
        begin, tiles, width = row_tiles(length, FORM.reach, SHAPE)
        start, stop = begin + split * width, begin + tl.minimum((split + 1) * width, tiles)
        query, query_tail = load_query(q + row * q_row + head * FORM.key_dim, live, FORM)
        table, last = tables + row * table_row, length - 1
        firsts, lasts = tl.zeros([1], tl.int32) + first, tl.zeros([1], tl.int32) + last
        largest, weight, total = attend(
            query, query_tail, layer, table, kv_head, start, stop, first, last, firsts, lasts, FORM, SHAPE.tile
        )
        place = (row * SHAPE.splits + split) * heads + head
        tl.store(partials.scales + place, largest + tl.log2(weight), mask=live)
        store_lines(partials.outputs + place * FORM.value_dim, live, 0, total / weight[:, None], FORM.value_dim)
        if JOINED:
            units = (tiles + width - 1) // width
            counter = partials.arrived + row * tl.num_programs(1) + tl.program_id(1)
            # What all threads of this program have stored has to be there for the program that arrives last.
            tl.debug_barrier()
            if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == units - 1:
                tl.store(counter, 0)
                _join(partials, row, head, live, units, layer.sinks, out, heads, FORM, SHAPE)


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
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) + tl.arange(0, 1)
    _, tiles, width = row_tiles(tl.load(lengths + row), FORM.reach, SHAPE)
    units = (tiles + width - 1) // width
    _join(partials, row, head, head >= 0, units, sinks, out, heads, FORM, SHAPE)


def decode_attention(
    q: Tensor,
    layer: KvLayer,
    rows: tuple[Tensor, Tensor],
    mapped: tuple[DecodeMap, DecodeShape, Partials],
    rule: AttentionRule,
    out: Tensor,
    *,
    join: bool = True,
) -> None:
    """Attend with one token a row.

    Args:
        q: ``(rows, heads, key_dim)``, contiguous in the last two axes.
        layer: keys and values, this step's own written already.
        rows: block tables int32 ``(rows, width)``, and lengths int32 ``(rows,)`` as ``map_decode`` had them.
        mapped: the step's map for the layer's reach, how it was cut, and room for partial results.
        rule: how the layer weighs.
        out: ``(rows, heads, value_dim)``, contiguous; rows of no length become zeros.
        join: whether the splits of few rows are combined in the same launch.
    """
    (tables, lengths), (dealt, shape, partials) = rows, mapped
    heads, form = q.shape[1], layer_form(layer, q.shape[1], rule)
    together = min(power_of_two(form.group, LEAST_DOT), MOST_HEADS)
    joined = join and len(q) <= MOST_JOINED_ROWS and together * form.value_pad <= MOST_JOINED_NUMBERS
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
        len(q),
        out,
        heads,
        FORM=form,
        SHAPE=shape,
        HEADS=together,
        PARTS=parts,
        JOINED=joined,
        **shape.launch.options,
    )
    if not joined:
        _combine[(len(q), heads)](partials, lengths, rule.sinks, out, heads, FORM=form, SHAPE=shape)
