"""Attention over tiles of the paged cache: the part that decoding and prompts share.

A softmax over tiles keeps, for each query, the largest score so far, the sum of the weights relative to it and the
weighted sum of values (Milakov and Gimelshein, arXiv 1805.02867; FlashAttention, arXiv 2205.14135). A tile that a
query sees nothing of leaves all three as they are, bit by bit. Scores are in powers of two.

Of keys and values only the slots that some query of the tile may see are read: what lies in the same block before or
behind them, or in blocks behind a window, may be somebody else's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from engine.backends.attention import AttentionRule
from engine.backends.cuda.kernels.triton_common import (
    LEAST_DOT,
    LOG2_E,
    dot,
    fused,
    load_lines,
    narrow,
    power_of_two,
    tanh,
)
from engine.backends.cuda.runtime.operations import KvLayer
from engine.core.kv.layout import Reach


class CachedLayer(NamedTuple):
    """Memory of one layer as kernels take it, and the numbers that make its scores."""

    key_memory: Tensor
    value_memory: Tensor
    key_block: int
    """Numbers from a block's keys to those of the next block."""
    key_slot: int
    """Numbers from a token's keys to those of the next token."""
    value_block: int
    value_slot: int
    scale: float
    cap: float
    sinks: Tensor | None
    """A logit for each query head."""


@dataclass(frozen=True, slots=True)
class LayerForm:
    """Facts about a layer that are fixed when a kernel is compiled for it."""

    block_size: int
    group: int
    """Query heads that share one key-value head."""
    key_dim: int
    """Numbers of a key."""
    main: int
    """Width of the first product that makes a score, a power of two; it holds all of a latent value."""
    tail: int
    """Width of the second product, a power of two; 0 where the first is the whole key."""
    value_dim: int
    """Numbers of a value."""
    value_pad: int
    """Width of a tile of values, a power of two."""
    latent: bool
    """Whether values are the first numbers of keys."""
    reach: Reach
    capped: bool


@cache
def _form(block_size: int, group: int, dims: tuple[int, int], latent: bool, reach: Reach, capped: bool) -> LayerForm:
    dim, value = dims
    main = max(power_of_two(dim + 1) // 2, power_of_two(value if latent else 0), LEAST_DOT)
    tail = power_of_two(dim - main, LEAST_DOT) if dim > main else 0
    value_pad = main if latent else power_of_two(value, LEAST_DOT)
    return LayerForm(block_size, group, dim, main, tail, value, value_pad, latent, reach, capped)


def layer_form(layer: KvLayer, heads: int, rule: AttentionRule) -> LayerForm:
    """Form of a layer that has ``heads`` query heads."""
    dims = layer.keys.shape[3], layer.values.shape[3]
    return _form(layer.keys.shape[1], heads // layer.heads, dims, layer.latent, layer.reach, rule.cap > 0)


def cached_layer(layer: KvLayer, rule: AttentionRule) -> CachedLayer:
    """Memory of a layer for one launch."""
    (key_block, key_slot), (value_block, value_slot) = layer.keys.stride()[:2], layer.values.stride()[:2]
    return CachedLayer(
        layer.keys, layer.values, key_block, key_slot, value_block, value_slot, rule.scale, rule.cap, rule.sinks
    )


@triton.jit
def load_query(address: tl.tensor, live: tl.tensor, FORM: tl.constexpr) -> tuple[tl.tensor, ...]:
    """Queries in two parts, for the two products that make a score."""
    query = load_lines(address, live, 0, FORM.main, FORM.key_dim)
    tail = query
    if FORM.tail > 0:
        tail = load_lines(address, live, FORM.main, FORM.tail, FORM.key_dim)
    return query, tail


class Seen(NamedTuple):
    """Which positions a tile of queries reads, and which of them each query sees."""

    lowest: Tensor
    """First position that is read."""
    highest: Tensor
    """Last one."""
    firsts: Tensor
    """First position that each query sees; one entry for each query or one for all."""
    lasts: Tensor
    """Last position that each query sees; shape as above."""


class Sums(NamedTuple):
    """A softmax over the tiles so far, one line for each query."""

    largest: Tensor
    """Largest score."""
    weight: Tensor
    """Sum of the weights relative to it."""
    total: Tensor
    """Weighted sum of values."""


@triton.jit
def no_sums(QUERIES: tl.constexpr, WIDTH: tl.constexpr) -> Sums:
    """A softmax over no tile."""
    return Sums(
        tl.full([QUERIES], -float("inf"), tl.float32),
        tl.zeros([QUERIES], tl.float32),
        tl.zeros([QUERIES, WIDTH], tl.float32),
    )


@triton.jit
def load_tile(
    address: tl.tensor, present: tl.tensor, start: tl.tensor, WIDTH: tl.constexpr, SIZE: tl.constexpr, CUT: tl.constexpr
) -> tl.tensor:
    """Numbers ``start .. start + WIDTH`` of a tile's tokens, zeros from ``SIZE`` on; with ``CUT`` zeros for tokens that
    are not present too. A load without a condition is the fastest, so there is none where none is needed."""
    number = start + tl.arange(0, WIDTH)
    place = address[:, None] + number[None, :]
    if CUT:
        lines = tl.load(place, mask=present[:, None] & (number[None, :] < SIZE), other=0.0)
    elif start + WIDTH > SIZE:
        lines = tl.load(place, mask=number[None, :] < SIZE, other=0.0)
    else:
        lines = tl.load(place)
    return lines


@triton.jit
def _scores(
    query: tl.tensor,
    query_tail: tl.tensor,
    keys: tl.tensor,
    present: tl.tensor,
    layer: CachedLayer,
    FORM: tl.constexpr,
    CUT: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Scores of a tile's keys, and the first part of the keys, which a latent layer's values lie in."""
    key = load_tile(keys, present, 0, FORM.main, FORM.key_dim, CUT)
    score = dot(query, tl.trans(key), tl.zeros([query.shape[0], key.shape[0]], tl.float32))
    if FORM.tail > 0:
        tail = load_tile(keys, present, FORM.main, FORM.tail, FORM.key_dim, CUT)
        score = dot(query_tail, tl.trans(tail), score)
    if FORM.capped:
        score = layer.cap * tanh(score * layer.scale / layer.cap)
    return score, key


@triton.jit
def score_unit(layer: CachedLayer, FORM: tl.constexpr) -> tl.tensor:
    """What a score is multiplied by for an exponent of two."""
    unit = tl.cast(layer.scale * LOG2_E, tl.float32)
    if FORM.capped:
        unit = tl.cast(LOG2_E, tl.float32)
    return unit


@triton.jit
def _blocks(
    table: tl.tensor, place: tl.tensor, end: tl.tensor, seen: Seen, FORM: tl.constexpr, CUT: tl.constexpr
) -> tl.tensor:
    """Blocks of a tile's tokens before ``end``; with ``CUT`` of those that are read."""
    wanted = place < end
    if CUT:
        wanted = wanted & (place >= seen.lowest) & (place <= seen.highest)
    return tl.load(table + place // FORM.block_size, mask=wanted, other=0).to(tl.int64)


@triton.jit
def _over_tiles(
    sums: Sums,
    query: tl.tensor,
    query_tail: tl.tensor,
    layer: CachedLayer,
    table: tl.tensor,
    kv_head: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    seen: Seen,
    FORM: tl.constexpr,
    TILE: tl.constexpr,
    CUT: tl.constexpr,
) -> Sums:
    """The softmax over tiles ``start .. stop`` too. Without ``CUT`` every query sees all of them.

    Both forms give the same bits where both can be used, so it does not matter which other queries a query has beside
    it: products and sums that a compiler might round once or twice are written as one operation.
    """
    unit = score_unit(layer, FORM)
    WIDTH: tl.constexpr = FORM.value_pad
    largest, weight, total = sums.largest, sums.weight, sums.total
    block = _blocks(table, start * TILE + tl.arange(0, TILE), stop * TILE, seen, FORM, CUT)
    for tile in range(start, stop):
        place = tile * TILE + tl.arange(0, TILE)
        present = (place >= seen.lowest) & (place <= seen.highest)
        # Where the next tile lies is asked for while this one is on its way.
        following = _blocks(table, place + TILE, stop * TILE, seen, FORM, CUT)
        slot = place % FORM.block_size
        keys = layer.key_memory + kv_head * FORM.key_dim + (block * layer.key_block + slot * layer.key_slot)
        score, value = _scores(query, query_tail, keys, present, layer, FORM, CUT)
        if CUT:
            visible = (place[None, :] <= seen.lasts[:, None]) & (place[None, :] >= seen.firsts[:, None])
            score = tl.where(visible, score, -float("inf"))
        peak = tl.maximum(largest, tl.max(score, 1))
        base = peak
        if CUT:
            base = tl.where(peak == -float("inf"), 0.0, peak)
        lowered = -(base * unit)
        share = tl.exp2(fused(score, unit, lowered[:, None]))
        fade = tl.exp2((largest - base) * unit)
        if not FORM.latent:
            values = (
                layer.value_memory + kv_head * FORM.value_dim + (block * layer.value_block + slot * layer.value_slot)
            )
            value = load_tile(values, present, 0, WIDTH, FORM.value_dim, CUT)
        weight = fused(weight, fade, tl.sum(share, 1))
        total = dot(narrow(share, value.dtype), value, total * fade[:, None])
        largest, block = peak, following
    return Sums(largest, weight, total)


@triton.jit
def attend(
    query: tl.tensor,
    query_tail: tl.tensor,
    layer: CachedLayer,
    table: tl.tensor,
    kv_head: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    seen: Seen,
    FORM: tl.constexpr,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Attend to tiles ``start .. stop`` of a sequence: largest scores (as powers of two), sums of weights and sums of
    values.

    Most tiles are seen whole by every query; conditions are computed only for those at the ends.
    """
    REACH: tl.constexpr = FORM.reach
    sums = no_sums(query.shape[0], FORM.value_pad)
    # Tiles behind the last query's first position, and before the first query's last one, are seen whole.
    whole = tl.minimum(tl.maximum((tl.min(seen.lasts, 0) + 1) // TILE, start), stop)
    first = start
    if REACH.kind != "full":
        first = tl.minimum(tl.maximum((tl.max(seen.firsts, 0) + TILE - 1) // TILE, start), whole)
        sums = _over_tiles(sums, query, query_tail, layer, table, kv_head, start, first, seen, FORM, TILE, True)
    sums = _over_tiles(sums, query, query_tail, layer, table, kv_head, first, whole, seen, FORM, TILE, False)
    sums = _over_tiles(sums, query, query_tail, layer, table, kv_head, whole, stop, seen, FORM, TILE, True)
    return sums.largest * score_unit(layer, FORM), sums.weight, sums.total
