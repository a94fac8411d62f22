"""Attention of prompt chunks over the paged cache, chunks of any lengths in one launch.

The chunk's own keys and values are written before, so everything is read from the cache. A tile holds some consecutive
queries of one chunk with all query heads that share a key-value head; tiles are dealt by the step's map
(``engine.kernels.gpu.tile_map``), as many as the bucket may have, whatever the lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

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
from engine.kernels.gpu.dialect import LOG2_E, PLAIN_LAUNCH, Launch, ceil_div, first_seen, narrow, power_of_two
from engine.kernels.gpu.tile_map import ChunkMap
from engine.model.attention import AttentionRule

MOST_HEADS = 16
"""Query heads of a key-value head that one program computes together; more would leave few queries to a tile."""


@dataclass(frozen=True, slots=True)
class PrefillShape:
    """Extents of a tile, powers of two; 16 at least."""

    lines: int
    """Queries times the heads that are computed together."""
    tile: int
    """Tokens of keys and values."""
    launch: Launch = PLAIN_LAUNCH


@dataclass(frozen=True, slots=True)
class Chunks:
    """The prompt chunks of a step, int32, one entry each; those of no length are none."""

    begins: Tensor
    """Index of the first token in the step."""
    lengths: Tensor
    starts: Tensor
    """Position of the first token in its sequence."""
    tables: Tensor
    """Block tables, ``(chunks, width)``."""


@triton.jit(do_not_specialize=("table_row",))
def _prefill(
    q: tl.tensor, keys: tl.tensor, values: tl.tensor, out: tl.tensor, tile_chunks: tl.tensor, tile_firsts: tl.tensor,
    begins: tl.tensor, lengths: tl.tensor, starts: tl.tensor, tables: tl.tensor, sinks: tl.tensor, scale: tl.tensor,
    cap: tl.tensor, q_row: tl.tensor, table_row: tl.tensor, key_block: tl.tensor, key_slot: tl.tensor,
    value_block: tl.tensor, value_slot: tl.tensor, heads: tl.tensor,
    BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr,
    VALUE: tl.constexpr, VALUE_PAD: tl.constexpr, LATENT: tl.constexpr, REACH: tl.constexpr, SIZE: tl.constexpr,
    CAPPED: tl.constexpr, SINKS: tl.constexpr, TILE: tl.constexpr, QUERIES: tl.constexpr, HEADS: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:  # fmt: skip
    chunk = tl.load(tile_chunks + tl.program_id(0))
    if chunk >= 0:
        kv_head = tl.program_id(1) // PARTS
        line = tl.arange(0, QUERIES * HEADS)
        member = tl.program_id(1) % PARTS * HEADS + line % HEADS
        token = tl.load(tile_firsts + tl.program_id(0)) + line // HEADS
        length = tl.load(lengths + chunk)
        live = (token < length) & (member < GROUP)
        start = tl.load(starts + chunk)
        position = start + tl.minimum(token, length - 1)
        first = first_seen(position, REACH, SIZE)
        head = kv_head * GROUP + member
        index = (tl.load(begins + chunk) + token).to(tl.int64)
        address = q + index * q_row + head * DIM
        query = load_query(address, live, 0, MAIN, DIM)
        query_tail = query
        if TAIL > 0:
            query_tail = load_query(address, live, MAIN, TAIL, DIM)
        largest = tl.full([QUERIES * HEADS], -float("inf"), tl.float32)
        weight = tl.zeros([QUERIES * HEADS], tl.float32)
        total = tl.zeros([QUERIES * HEADS, VALUE_PAD], tl.float32)
        # What the tile's queries see together: from the first one's first position to the last one's own.
        lowest = tl.min(first, 0)
        highest = tl.max(position, 0)
        for tile in range(lowest // TILE, highest // TILE + 1):
            place = tile * TILE + tl.arange(0, TILE)
            present = (place >= lowest) & (place <= highest)
            block = tl.load(tables + chunk.to(tl.int64) * table_row + place // BLOCK_SIZE, mask=present, other=0)
            block = block.to(tl.int64)
            visible = (place[None, :] <= position[:, None]) & (place[None, :] >= first[:, None])
            largest, weight, total = attend_tile(
                query, query_tail, largest, weight, total, keys + kv_head * DIM, values + kv_head * VALUE,
                block * key_block + (place % BLOCK_SIZE) * key_slot,
                block * value_block + (place % BLOCK_SIZE) * value_slot, present, visible, scale, cap, DIM, MAIN,
                TAIL, VALUE, VALUE_PAD, LATENT, CAPPED,
            )  # fmt: skip
        if SINKS:
            sink = tl.load(sinks + head, mask=live, other=0.0).to(tl.float32) * LOG2_E
            peak = tl.maximum(largest, sink)
            fade = tl.exp2(largest - peak)
            weight = weight * fade + tl.exp2(sink - peak)
            total = total * fade[:, None]
        column = tl.arange(0, VALUE_PAD)
        tl.store(
            out + (index * heads + head)[:, None] * VALUE + column[None, :],
            narrow(total / weight[:, None], out.dtype.element_ty),
            mask=live[:, None] & (column[None, :] < VALUE),
        )


def heads_together(heads: int, kv_heads: int, queries: int) -> tuple[int, int, int]:
    """How many query heads of a key-value head a tile holds, in how many parts, and how many queries that leaves of
    ``queries`` lines."""
    together = min(power_of_two(heads // kv_heads), MOST_HEADS)
    return together, ceil_div(heads // kv_heads, together), queries // together


def prefill_attention(
    q: Tensor,
    layer: PagedLayer,
    chunks: Chunks,
    mapped: tuple[ChunkMap, PrefillShape],
    rule: AttentionRule,
    out: Tensor,
) -> None:
    """Attend with the tokens of prompt chunks; tokens of the step that are in no chunk are left alone.

    Args:
        q: ``(N, heads, key_dim)`` of all tokens of the step, contiguous in the last two axes.
        layer: keys and values, this step's own written already.
        chunks: where they are.
        mapped: the step's map, made for the queries of a tile that ``heads_together`` gives; and the tile's shape.
        rule: how the layer weighs.
        out: ``(N, heads, value_dim)``, contiguous.
    """
    map_, shape = mapped
    heads = q.shape[1]
    together, parts, queries = heads_together(heads, layer.heads, shape.lines)
    _prefill[(len(map_.tile_chunks), layer.heads * parts)](
        q,
        layer.keys,
        layer.values,
        out,
        map_.tile_chunks,
        map_.tile_firsts,
        chunks.begins,
        chunks.lengths,
        chunks.starts,
        chunks.tables,
        out if rule.sinks is None else rule.sinks,
        rule.scale,
        rule.cap,
        q.stride(0),
        chunks.tables.stride(0),
        *layer.keys.stride()[:2],
        *layer.values.stride()[:2],
        heads,
        **layer_constants(layer, heads, rule),
        SINKS=rule.sinks is not None,
        TILE=shape.tile,
        QUERIES=queries,
        HEADS=together,
        PARTS=parts,
        **shape.launch.options,
    )


def reference(q: Tensor, layer: PagedLayer, chunks: Chunks, rule: AttentionRule, out: Tensor) -> None:
    """The specification, a token after another in float64; writes the tokens of chunks."""
    columns = (part.tolist() for part in (chunks.begins, chunks.lengths, chunks.starts, chunks.tables))
    for begin, length, start, table in zip(*columns, strict=True):
        for token in range(length):
            keys, values = seen_tokens(layer, table, start + token)
            out[begin + token] = attend_reference(q[begin + token], keys, values, rule)
