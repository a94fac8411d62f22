"""Experts' products: pairs of token and expert sorted by expert, multiplied in tiles, and added up for each token.

Dropless, and without a number that comes back to the host: the launches are those of the bucket, whatever is routed
where. A tile holds pairs of one expert only. A token's sum runs in float32 and in the order of its experts, as on the
CPU, whatever else is in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.backends.cuda.kernels.routing import NO_EXPERT, Routed
from engine.backends.cuda.kernels.triton_common import (
    PLAIN_LAUNCH,
    Threads,
    ceil_div,
    dot,
    load_lines,
    narrow,
    power_of_two,
    store_lines,
)

PAIRS_AT_ONCE = 1_024
"""Looked at together while pairs are sorted."""


@dataclass(frozen=True, slots=True)
class ProductTile:
    """Extents of a tile of a product, powers of two; 16 at least."""

    rows: int = 64
    columns: int = 64
    depth: int = 32
    launch: Threads = PLAIN_LAUNCH


class Dealt(NamedTuple):
    """Pairs ``token * top + place`` of a step, by expert. All int32."""

    order: Tensor
    """``(N * top,)``: pairs of expert 0 in the order of tokens, then of expert 1, ..."""
    counts: Tensor
    """``(E,)``: pairs of each expert."""
    tile_experts: Tensor
    """``(tiles,)``: the expert of a tile, -1 for none."""
    tile_begins: Tensor
    """Index of the tile's first entry in ``order``; shape as above."""
    tile_ends: Tensor
    """Index after its expert's last entry in ``order``; shape as above."""

    @classmethod
    def empty(cls, tokens: int, top: int, experts: int, tile: int, device: torch.device) -> Dealt:
        """Room for every way to route at most so many tokens."""
        most = tokens * top // tile + min(experts, tokens * top)
        sizes = (tokens * top, experts, most, most, most)
        return cls(*(torch.zeros(size, dtype=torch.int32, device=device) for size in sizes))


class ExpertMap(NamedTuple):
    """One map of every expert of a layer."""

    weight: Tensor
    """``(E, outputs, inputs)``, contiguous."""
    bias: Tensor | None = None
    """``(E, outputs)``."""


@triton.jit(do_not_specialize=("pairs",))
def _count(experts: tl.tensor, counts: tl.tensor, pairs: tl.tensor, BLOCK: tl.constexpr) -> None:
    expert = tl.program_id(0)
    found = tl.zeros([BLOCK], tl.int32)
    for start in range(0, pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        found += (tl.load(experts + pair, mask=pair < pairs, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(found, 0))


@triton.jit(do_not_specialize=("pairs", "num_tiles"))
def _deal(
    experts: tl.tensor,
    out: Dealt,
    pairs: tl.tensor,
    num_experts: tl.tensor,
    num_tiles: tl.tensor,
    TILE: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    expert = tl.program_id(0)
    other = tl.arange(0, EXPERTS)
    count = tl.load(out.counts + other, mask=other < num_experts, other=0)
    tiles = (count + TILE - 1) // TILE
    begin = tl.sum(tl.where(other < expert, count, 0), 0)
    end = begin + tl.sum(tl.where(other == expert, count, 0), 0)
    first = tl.sum(tl.where(other < expert, tiles, 0), 0)
    if expert == num_experts:
        # The last program marks the tiles that no expert has.
        for start in range(first, num_tiles, BLOCK):
            tile = start + tl.arange(0, BLOCK)
            tl.store(out.tile_experts + tile, tl.full([BLOCK], -1, tl.int32), mask=tile < num_tiles)
    else:
        for start in range(0, end - begin, BLOCK * TILE):
            place = start + tl.arange(0, BLOCK) * TILE
            tile = first + place // TILE
            live = place < end - begin
            tl.store(out.tile_experts + tile, tl.full([BLOCK], 0, tl.int32) + expert, mask=live)
            tl.store(out.tile_begins + tile, begin + place, mask=live)
            tl.store(out.tile_ends + tile, tl.full([BLOCK], 0, tl.int32) + end, mask=live)
        for start in range(0, pairs, BLOCK):
            pair = start + tl.arange(0, BLOCK)
            own = (tl.load(experts + pair, mask=pair < pairs, other=-1) == expert).to(tl.int32)
            tl.store(out.order + begin + tl.cumsum(own, 0) - own, pair, mask=own == 1)
            begin += tl.sum(own, 0)


@triton.jit
def _product(
    x: tl.tensor,
    x_row: tl.tensor,
    linear: ExpertMap,
    factors: tl.tensor,
    out: tl.tensor,
    dealt: Dealt,
    inputs: tl.tensor,
    outputs: tl.tensor,
    TOP: tl.constexpr,
    GATHERS: tl.constexpr,
    WEIGH: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    ROWS: tl.constexpr = TILE.rows
    COLUMNS: tl.constexpr = TILE.columns
    expert = tl.load(dealt.tile_experts + tl.program_id(0)).to(tl.int64)
    if expert >= 0:
        place = tl.load(dealt.tile_begins + tl.program_id(0)) + tl.arange(0, ROWS)
        live = place < tl.load(dealt.tile_ends + tl.program_id(0))
        pair = tl.load(dealt.order + place, mask=live, other=0).to(tl.int64)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        source = pair
        if GATHERS:
            source = pair // TOP
        factor = tl.load(factors + pair, mask=live, other=0.0)
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        own = linear.weight + (expert * outputs + column[None, :]) * inputs
        for start in range(0, inputs, TILE.depth):
            number = start + tl.arange(0, TILE.depth)
            part = load_lines(x + source * x_row, live, start, TILE.depth, inputs)
            if WEIGH == "before":
                scaled = narrow(factor, x.dtype.element_ty).to(tl.float32)[:, None] * part.to(tl.float32)
                part = narrow(scaled, x.dtype.element_ty)
            shares = tl.load(
                own + number[:, None], mask=(number[:, None] < inputs) & (column[None, :] < outputs), other=0.0
            )
            total = dot(part, shares, total)
        if linear.bias is not None:
            added = tl.load(linear.bias + expert * outputs + column, mask=column < outputs, other=0.0)
            total += added.to(tl.float32)[None, :]
        if WEIGH == "after":
            total = total * factor[:, None]
        store_lines(out + pair * outputs, live, tl.program_id(1) * COLUMNS, total, outputs)


@triton.jit(do_not_specialize=("pairs",))
def _places(order: tl.tensor, places: tl.tensor, pairs: tl.tensor, BLOCK: tl.constexpr) -> None:
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = place < pairs
    tl.store(places + tl.load(order + place, mask=live, other=0), place, mask=live)


@triton.jit
def _gather(
    x: tl.tensor,
    x_row: tl.tensor,
    order: tl.tensor,
    factors: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    TOP: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64)
    pair = tl.load(order + place).to(tl.int64)
    number = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    live = number < size
    value = tl.load(x + (pair // TOP) * x_row + number, mask=live, other=0.0)
    if factors is not None:
        factor = narrow(tl.load(factors + pair), x.dtype.element_ty).to(tl.float32)
        value = narrow(value.to(tl.float32) * factor, x.dtype.element_ty)
    tl.store(out + place * size + number, value, mask=live)


@triton.jit
def _add_up(
    parts: tl.tensor,
    experts: tl.tensor,
    places: tl.tensor,
    factors: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    TOP: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    live = number < size
    total = tl.zeros([WIDTH], tl.float32)
    last = tl.cast(-1, tl.int32)
    for _ in range(TOP):
        following = tl.cast(NO_EXPERT, tl.int32)
        found = tl.cast(0, tl.int32)
        for place in range(TOP):
            expert = tl.load(experts + token * TOP + place)
            nearer = (expert > last) & (expert < following)
            following = tl.where(nearer, expert, following)
            found = tl.where(nearer, place, found)
        last = following
        pair = token * TOP + found
        line = pair
        if places is not None:
            line = tl.load(places + pair).to(tl.int64)
        part = tl.load(parts + line * size + number, mask=live, other=0.0).to(tl.float32)
        if factors is not None:
            part = part * tl.load(factors + pair)
        total += part
    tl.store(out + token * size + number, narrow(total, out.dtype.element_ty), mask=live)


def deal(routed: Routed, tile: int, out: Dealt) -> None:
    """Sort the pairs of a step by expert, and cut them into tiles of ``tile`` pairs at most."""
    pairs, experts = routed.experts.numel(), len(out.counts)
    if pairs:
        _count[(experts,)](routed.experts, out.counts, pairs, BLOCK=PAIRS_AT_ONCE)
        _deal[(experts + 1,)](
            routed.experts,
            out,
            pairs,
            experts,
            len(out.tile_experts),
            TILE=tile,
            EXPERTS=power_of_two(experts),
            BLOCK=PAIRS_AT_ONCE,
        )


def multiply(
    x: Tensor, linear: ExpertMap, routed: Routed, dealt: Dealt, out: Tensor, *, tile: ProductTile, weigh: str = "no"
) -> None:
    """Apply each pair's expert.

    Args:
        x: rows of tokens ``(N, inputs)``, or of pairs ``(N * top, inputs)``.
        linear: the map.
        routed: weights of the pairs.
        dealt: their order, made for tiles of ``tile.rows``.
        out: ``(N * top, outputs)``, contiguous, pairs in their own order.
        tile: extents.
        weigh: whether rows are multiplied by their weights ``before`` the map or ``after`` it; or ``no``.
    """
    _, outputs, inputs = linear.weight.shape
    pairs = routed.experts.numel()
    if pairs:
        _product[(len(dealt.tile_experts), ceil_div(outputs, tile.columns))](
            x,
            x.stride(0),
            linear,
            routed.weights,
            out,
            dealt,
            inputs,
            outputs,
            TOP=routed.experts.shape[1],
            GATHERS=len(x) != pairs,
            WEIGH=weigh,
            TILE=tile,
            **tile.launch.options,
        )


def add_up(parts: Tensor, routed: Routed, out: Tensor, *, order: Tensor | None = None, weigh: bool = False) -> None:
    """Sum the pairs of each token in float32, in the order of experts.

    Args:
        parts: ``(N * top, size)``, pairs in their own order, or in ``order``.
        routed: experts of the pairs, and their weights.
        out: ``(N, size)``, contiguous.
        order: pairs by expert, as ``Dealt`` has them; None: pairs are in their own order.
        weigh: multiply each pair by its weight.
    """
    tokens, size = out.shape
    if not tokens:
        return
    places, pairs = None, routed.experts.numel()
    if order is not None:
        places = torch.empty_like(order)
        _places[(ceil_div(pairs, PAIRS_AT_ONCE),)](order, places, pairs, BLOCK=PAIRS_AT_ONCE)
    grid = (tokens, ceil_div(size, PAIRS_AT_ONCE))
    factors, top = routed.weights if weigh else None, routed.experts.shape[1]
    _add_up[grid](parts, routed.experts, places, factors, out, size, TOP=top, WIDTH=PAIRS_AT_ONCE)


def gather(x: Tensor, routed: Routed, order: Tensor, out: Tensor, *, weigh: bool = False) -> None:
    """Copy the row of each pair, by expert: ``x`` ``(N, size)`` to ``(N * top, size)``, contiguous.

    Args:
        x: rows of tokens; they may be further apart than that.
        routed: weights of the pairs.
        order: pairs by expert, as ``Dealt`` has them.
        out: takes the rows.
        weigh: multiply each row by its pair's weight.
    """
    pairs, size = out.shape
    if pairs:
        grid, factors = (pairs, ceil_div(size, PAIRS_AT_ONCE)), routed.weights if weigh else None
        top = routed.experts.shape[1]
        _gather[grid](x, x.stride(0), order, factors, out, size, TOP=top, WIDTH=PAIRS_AT_ONCE)


def multiply_by_torch(sorted_rows: Tensor, linear: ExpertMap, counts: Tensor, experts: Tensor | None) -> Tensor:
    """Apply experts to rows that are sorted by expert, by torch's product of groups; gives ``(pairs, outputs)``.

    Where groups end stays on the device, and the launches are those of the bucket.

    Args:
        sorted_rows: bfloat16 ``(pairs, inputs)``.
        linear: the map.
        counts: int32, rows of each expert.
        experts: the expert of each row, int64; needed for a bias.
    """
    ends = counts.cumsum(0, dtype=torch.int32)
    out: Tensor = torch._grouped_mm(sorted_rows, linear.weight.transpose(1, 2), offs=ends)
    if linear.bias is not None:
        assert experts is not None, "a bias is that of an expert"
        out = out.add_(linear.bias.index_select(0, experts))
    return out
