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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.backends.attention import AttentionRule
from engine.backends.cuda.kernels.attention_tile import CachedLayer, Seen, attend, cached_layer, layer_form, load_query
from engine.backends.cuda.kernels.tile_map import DecodeMap, DecodeShape, row_tiles
from engine.backends.cuda.kernels.triton_common import (
    EMULATED,
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
        # Not zeroed: a split that no program computes is not read.
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


@triton.jit
def _compute_split(
    q: tl.tensor,
    layer: CachedLayer,
    partials: Partials,
    table: tl.tensor,
    place: tl.tensor,
    length: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    head: tl.tensor,
    live: tl.tensor,
    kv_head: tl.tensor,
    FORM: tl.constexpr,
    SHAPE: tl.constexpr,
) -> None:
    """Attend to one split of a row, with some heads, and store the partial result at ``place`` of each."""
    REACH: tl.constexpr = FORM.reach
    first = first_seen(length - 1, REACH)
    query, query_tail = load_query(q + head * FORM.key_dim, live, FORM)
    seen = Seen(first, length - 1, tl.zeros([1], tl.int32) + first, tl.zeros([1], tl.int32) + length - 1)
    largest, weight, total = attend(query, query_tail, layer, table, kv_head, start, stop, seen, FORM, SHAPE.tile)
    tl.store(partials.scales + place, largest + tl.log2(weight), mask=live)
    store_lines(partials.outputs + place * FORM.value_dim, live, 0, total / weight[:, None], FORM.value_dim)


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
    """A persistent grid: each program computes the splits that the map deals to it."""
    program = tl.program_id(0)
    kv_head = tl.program_id(1) // PARTS
    member = tl.program_id(1) % PARTS * HEADS + tl.arange(0, HEADS)
    live = member < FORM.group
    head = kv_head * FORM.group + member
    REACH: tl.constexpr = FORM.reach
    unit_begin, unit_end = tl.load(dealt.begins + program), tl.load(dealt.begins + program + 1)
    row = tl.load(dealt.unit_rows + unit_begin, mask=unit_begin < unit_end, other=0).to(tl.int64)
    split = tl.load(dealt.unit_splits + unit_begin, mask=unit_begin < unit_end, other=0)
    length = tl.load(lengths + row)
    for unit in range(unit_begin, unit_end):
        # What the next split is, is asked for while this one is computed.
        next_row = tl.load(dealt.unit_rows + unit + 1, mask=unit + 1 < unit_end, other=0).to(tl.int64)
        next_split = tl.load(dealt.unit_splits + unit + 1, mask=unit + 1 < unit_end, other=0)
        begin, tiles, width = row_tiles(length, REACH, SHAPE)
        start, stop = begin + split * width, begin + tl.minimum((split + 1) * width, tiles)
        place = (row * SHAPE.splits + split) * heads + head
        table = tables + row * table_row
        query = q + row * q_row
        _compute_split(query, layer, partials, table, place, length, start, stop, head, live, kv_head, FORM, SHAPE)
        next_length = tl.load(lengths + next_row)
        row, split, length = next_row, next_split, next_length


@triton.jit(do_not_specialize=("table_row",))
def _decode_joined(
    q: tl.tensor,
    q_row: tl.tensor,
    layer: CachedLayer,
    partials: Partials,
    tables: tl.tensor,
    table_row: tl.tensor,
    lengths: tl.tensor,
    out: tl.tensor,
    heads: tl.tensor,
    FORM: tl.constexpr,
    SHAPE: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """A program for each split that a row may have: few rows need no map, and the program that finishes a row's last
    split combines them all."""
    if EARLY:
        # The product behind this may fetch its matrix meanwhile; it waits for the end of this launch.
        gdc_launch_dependents()
        gdc_wait()
    row = (tl.program_id(0) // SHAPE.splits).to(tl.int64)
    split = tl.program_id(0) % SHAPE.splits
    kv_head = tl.program_id(1) // PARTS
    member = tl.program_id(1) % PARTS * HEADS + tl.arange(0, HEADS)
    live = member < FORM.group
    head = kv_head * FORM.group + member
    REACH: tl.constexpr = FORM.reach
    length = tl.load(lengths + row)
    begin, tiles, width = row_tiles(length, REACH, SHAPE)
    units = (tiles + width - 1) // width
    if split < units:
        start, stop = begin + split * width, begin + tl.minimum((split + 1) * width, tiles)
        place = (row * SHAPE.splits + split) * heads + head
        table = tables + row * table_row
        query = q + row * q_row
        _compute_split(query, layer, partials, table, place, length, start, stop, head, live, kv_head, FORM, SHAPE)
        counter = partials.arrived + row * tl.num_programs(1) + tl.program_id(1)
        # What all threads of this program have stored has to be there for the program that arrives last.
        tl.debug_barrier()
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == units - 1:
            tl.store(counter, 0)
            _join(partials, row, head, live, units, layer.sinks, out, heads, FORM, SHAPE)
    if (units == 0) & (split == 0):
        # A row without a split would be combined by no program.
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
    REACH: tl.constexpr = FORM.reach
    _, tiles, width = row_tiles(tl.load(lengths + row), REACH, SHAPE)
    units = (tiles + width - 1) // width
    _join(partials, row, head, head >= 0, units, sinks, out, heads, FORM, SHAPE)


def joins(rows: int, group: int, value_dim: int) -> bool:
    """Whether the splits of so many rows are combined in the launch that computes them, which needs no map.

    Args:
        rows: of the step.
        group: query heads that share a key-value head.
        value_dim: numbers of a value.
    """
    together = min(power_of_two(group, LEAST_DOT), MOST_HEADS)
    return rows <= MOST_JOINED_ROWS and together * power_of_two(value_dim, LEAST_DOT) <= MOST_JOINED_NUMBERS


def decode_attention(
    q: Tensor,
    layer: KvLayer,
    rows: tuple[Tensor, Tensor],
    mapped: tuple[DecodeMap | None, DecodeShape, Partials],
    rule: AttentionRule,
    out: Tensor,
    *,
    early: bool = False,
) -> None:
    """Attend with one token a row.

    Args:
        q: ``(rows, heads, key_dim)``, contiguous in the last two axes.
        layer: keys and values, this step's own written already.
        rows: block tables int32 ``(rows, width)``, and lengths int32 ``(rows,)`` as ``map_decode`` had them.
        mapped: the step's map for the layer's reach, how it was cut, and room for partial results; no map where the
            splits are combined in the same launch, as ``joins`` allows.
        rule: how the layer weighs.
        out: ``(rows, heads, value_dim)``, contiguous; rows of no length become zeros.
        early: whether this launch may begin before the one in front of it is over, and the one behind it before its own
            end (programmatic dependent launch, sm_90).
    """
    (tables, lengths), (dealt, shape, partials) = rows, mapped
    heads, form = q.shape[1], layer_form(layer, q.shape[1], rule)
    together = min(power_of_two(form.group, LEAST_DOT), MOST_HEADS)
    parts = ceil_div(form.group, together)
    given = q, q.stride(0), cached_layer(layer, rule), partials
    placed = tables, tables.stride(0), lengths
    fixed = {"FORM": form, "SHAPE": shape, "HEADS": together, "PARTS": parts, **shape.launch.options}
    if dealt is None:
        grid = len(q) * shape.splits, layer.heads * parts
        early = early and not EMULATED.value
        options = {"launch_pdl": True} if early else {}
        _decode_joined[grid](*given, *placed, out, heads, EARLY=early, **fixed, **options)
        return
    _decode[(len(dealt.begins) - 1, layer.heads * parts)](*given, dealt, *placed, heads, **fixed)
    _combine[(len(q), heads)](partials, lengths, rule.sinks, out, heads, FORM=form, SHAPE=shape)
