"""Attention of decoding rows over the paged cache: one token a row, contexts split between programs, then combined.

Programs are as many as the bucket says, whatever the lengths (a persistent grid): each works through the splits that
the step's map deals to it (``engine.kernels.gpu.tile_map``). All query heads that share a key-value head are computed
together, so that keys are read once. A row's numbers are the same bits in any batch and for any number of programs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.gpu.attention_tile import (
    PagedLayer,
    attend_reference,
    attend_tile,
    layer_constants,
    load_query,
    seen_tokens,
)
from engine.kernels.gpu.dialect import LEAST_DOT, LOG2_E, ceil_div, first_seen, narrow, power_of_two
from engine.kernels.gpu.tile_map import DecodeMap, DecodeShape, row_tiles, split_width
from engine.model.attention import AttentionRule

MOST_HEADS = 64
"""Query heads that one program computes together: more do not fit the registers with a latent's values."""


@dataclass(frozen=True, slots=True)
class Partials:
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
    q: tl.tensor, keys: tl.tensor, values: tl.tensor, outputs: tl.tensor, scales: tl.tensor, unit_rows: tl.tensor,
    unit_splits: tl.tensor, begins: tl.tensor, tables: tl.tensor, lengths: tl.tensor, scale: tl.tensor,
    cap: tl.tensor, q_row: tl.tensor, table_row: tl.tensor, key_block: tl.tensor, key_slot: tl.tensor,
    value_block: tl.tensor, value_slot: tl.tensor, heads: tl.tensor,
    BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr,
    VALUE: tl.constexpr, VALUE_PAD: tl.constexpr, LATENT: tl.constexpr, REACH: tl.constexpr, SIZE: tl.constexpr,
    CAPPED: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr, SPLITS: tl.constexpr, HEADS: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:  # fmt: skip
    program = tl.program_id(0)
    kv_head = tl.program_id(1) // PARTS
    member = tl.program_id(1) % PARTS * HEADS + tl.arange(0, HEADS)
    live = member < GROUP
    head = kv_head * GROUP + member
    column = tl.arange(0, VALUE_PAD)
    for unit in range(tl.load(begins + program), tl.load(begins + program + 1)):
        row = tl.load(unit_rows + unit).to(tl.int64)
        split = tl.load(unit_splits + unit)
        length = tl.load(lengths + row)
        first = first_seen(length - 1, REACH, SIZE)
        begin, tiles = row_tiles(length, REACH, SIZE, TILE)
        width = split_width(tiles, SPAN, SPLITS)
        address = q + row * q_row + head * DIM
        query = load_query(address, live, 0, MAIN, DIM)
        query_tail = query
        if TAIL > 0:
            query_tail = load_query(address, live, MAIN, TAIL, DIM)
        largest = tl.full([HEADS], -float("inf"), tl.float32)
        weight = tl.zeros([HEADS], tl.float32)
        total = tl.zeros([HEADS, VALUE_PAD], tl.float32)
        for tile in range(split * width, tl.minimum((split + 1) * width, tiles)):
            place = (begin + tile) * TILE + tl.arange(0, TILE)
            present = (place >= first) & (place < length)
            block = tl.load(tables + row * table_row + place // BLOCK_SIZE, mask=present, other=0).to(tl.int64)
            largest, weight, total = attend_tile(
                query, query_tail, largest, weight, total, keys + kv_head * DIM, values + kv_head * VALUE,
                block * key_block + (place % BLOCK_SIZE) * key_slot,
                block * value_block + (place % BLOCK_SIZE) * value_slot, present, present[None, :], scale, cap, DIM,
                MAIN, TAIL, VALUE, VALUE_PAD, LATENT, CAPPED,
            )  # fmt: skip
        out = (row * SPLITS + split) * heads + head
        tl.store(scales + out, largest + tl.log2(weight), mask=live)
        tl.store(
            outputs + out[:, None] * VALUE + column[None, :],
            total / weight[:, None],
            mask=live[:, None] & (column[None, :] < VALUE),
        )


@triton.jit
def _combine(
    outputs: tl.tensor,
    scales: tl.tensor,
    lengths: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    heads: tl.tensor,
    VALUE: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    REACH: tl.constexpr,
    SIZE: tl.constexpr,
    SINKS: tl.constexpr,
    TILE: tl.constexpr,
    SPAN: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    _, tiles = row_tiles(tl.load(lengths + row), REACH, SIZE, TILE)
    width = split_width(tiles, SPAN, SPLITS)
    split = tl.arange(0, SPLITS)
    column = tl.arange(0, VALUE_PAD)
    exists = split * width < tiles
    place = (row * SPLITS + split) * heads + head
    size = tl.load(scales + place, mask=exists, other=-float("inf"))
    # A row of no length has no split: zeros come out of it.
    peak = tl.max(tl.where(exists, size, -3.0e38), 0)
    whole = 0.0
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        peak = tl.maximum(peak, sink)
        whole = tl.exp2(sink - peak)
    share = tl.where(exists, tl.exp2(size - peak), 0.0)
    whole += tl.sum(share, 0)
    part = tl.load(
        outputs + place[:, None] * VALUE + column[None, :], mask=exists[:, None] & (column[None, :] < VALUE), other=0.0
    )
    mean = tl.sum(part * share[:, None], 0) / tl.where(tiles == 0, 1.0, whole)
    address = out + (row * heads + head) * VALUE + column
    tl.store(address, narrow(mean, out.dtype.element_ty), mask=column < VALUE)


def decode_attention(
    q: Tensor,
    layer: PagedLayer,
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
    (tables, lengths), (map_, shape, partials) = rows, mapped
    heads = q.shape[1]
    constants = layer_constants(layer, heads, rule)
    together = min(power_of_two(heads // layer.heads, LEAST_DOT), MOST_HEADS)
    parts = ceil_div(heads // layer.heads, together)
    shape_constants = {"TILE": shape.tile, "SPAN": shape.span, "SPLITS": shape.splits}
    _decode[(len(map_.begins) - 1, layer.heads * parts)](
        q,
        layer.keys,
        layer.values,
        partials.outputs,
        partials.scales,
        map_.unit_rows,
        map_.unit_splits,
        map_.begins,
        tables,
        lengths,
        rule.scale,
        rule.cap,
        q.stride(0),
        tables.stride(0),
        *layer.keys.stride()[:2],
        *layer.values.stride()[:2],
        heads,
        **constants,
        **shape_constants,
        HEADS=together,
        PARTS=parts,
        **shape.launch.options,
    )
    kept = {name: constants[name] for name in ("VALUE", "VALUE_PAD", "REACH", "SIZE")}
    sinks = partials.scales if rule.sinks is None else rule.sinks
    _combine[(len(q), heads)](
        partials.outputs,
        partials.scales,
        lengths,
        sinks,
        out,
        heads,
        **kept,
        **shape_constants,
        SINKS=rule.sinks is not None,
    )


def reference(q: Tensor, layer: PagedLayer, tables: Tensor, lengths: Tensor, rule: AttentionRule) -> Tensor:
    """The specification, a row after another in float64; gives ``(rows, heads, value_dim)``."""
    rows = []
    for query, table, length in zip(q, tables.tolist(), lengths.tolist(), strict=True):
        keys, values = seen_tokens(layer, table, length - 1) if length else (layer.keys[0, :0], layer.values[0, :0])
        rows.append(attend_reference(query, keys, values, rule))
    return torch.stack(rows) if rows else q.new_zeros(0, q.shape[1], layer.values.shape[3])
