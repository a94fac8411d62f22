"""Attention of prompt chunks over the paged cache, chunks of any lengths in one launch.

The chunk's own keys and values are written before, so everything is read from the cache. A tile holds some consecutive
queries of one chunk with all query heads that share a key-value head; tiles are dealt by the step's map
(``engine.backends.cuda.kernels.tile_map``), as many as the bucket may have, whatever the lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from engine.backends.attention import AttentionRule
from engine.backends.cuda.kernels.attention_tile import CachedLayer, Seen, attend, cached_layer, layer_form, load_query
from engine.backends.cuda.kernels.tile_map import ChunkMap
from engine.backends.cuda.kernels.triton_common import (
    LOG2_E,
    PLAIN_LAUNCH,
    Threads,
    ceil_div,
    first_seen,
    power_of_two,
    store_lines,
)
from engine.backends.cuda.runtime.operations import KvLayer

MOST_HEADS = 16
"""Query heads of a key-value head that one program computes together; more would leave few queries to a tile."""


@dataclass(frozen=True, slots=True)
class PrefillShape:
    """Extents of a tile, powers of two; 16 at least."""

    lines: int
    """Queries times the heads that are computed together."""
    tile: int
    """Tokens of keys and values."""
    launch: Threads = PLAIN_LAUNCH


class ChunkPlaces(NamedTuple):
    """Prompt chunks of a step, int32, one entry each; those of no length are none."""

    begins: Tensor
    """Index of the first token in the step."""
    lengths: Tensor
    starts: Tensor
    """Position of the first token in its sequence."""
    tables: Tensor
    """Block tables, ``(chunks, width)``."""


@triton.jit
def _add_sinks(
    sinks: tl.tensor, live: tl.tensor, largest: tl.tensor, weight: tl.tensor, total: tl.tensor
) -> tuple[tl.tensor, ...]:
    """Sums of weights and of values with the weight of each query head's sink, which brings no value."""
    sink = tl.load(sinks, mask=live, other=0.0).to(tl.float32) * LOG2_E
    peak = tl.maximum(largest, sink)
    fade = tl.exp2(largest - peak)
    return weight * fade + tl.exp2(sink - peak), total * fade[:, None]


@triton.jit(do_not_specialize=("table_row",))
def _prefill(
    q: tl.tensor,
    q_row: tl.tensor,
    layer: CachedLayer,
    out: tl.tensor,
    tiles: ChunkMap,
    chunks: ChunkPlaces,
    table_row: tl.tensor,
    heads: tl.tensor,
    FORM: tl.constexpr,
    TILE: tl.constexpr,
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    # The last tiles of a chunk see most of it, so they begin first.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    chunk = tl.load(tiles.tile_chunks + program)
    if chunk >= 0:
        kv_head = tl.program_id(1) // PARTS
        line = tl.arange(0, QUERIES * HEADS)
        member = tl.program_id(1) % PARTS * HEADS + line % HEADS
        token = tl.load(tiles.tile_firsts + program) + line // HEADS
        length = tl.load(chunks.lengths + chunk)
        live = (token < length) & (member < FORM.group)
        position = tl.load(chunks.starts + chunk) + tl.minimum(token, length - 1)
        REACH: tl.constexpr = FORM.reach
        first = first_seen(position, REACH)
        head = kv_head * FORM.group + member
        index = (tl.load(chunks.begins + chunk) + token).to(tl.int64)
        query, query_tail = load_query(q + index * q_row + head * FORM.key_dim, live, FORM)
        # What the tile's queries see together: from the first query's first position to the last query's position.
        lowest, highest = tl.min(first, 0), tl.max(position, 0)
        start, stop = lowest // TILE, highest // TILE + 1
        table = chunks.tables + chunk.to(tl.int64) * table_row
        seen = Seen(lowest, highest, first, position)
        largest, weight, total = attend(query, query_tail, layer, table, kv_head, start, stop, seen, FORM, TILE)
        if layer.sinks is not None:
            weight, total = _add_sinks(layer.sinks + head, live, largest, weight, total)
        store_lines(out + (index * heads + head) * FORM.value_dim, live, 0, total / weight[:, None], FORM.value_dim)


def heads_together(heads: int, kv_heads: int, queries: int) -> tuple[int, int, int]:
    """How many query heads of a key-value head a tile holds, in how many parts, and how many queries that leaves of
    ``queries`` lines."""
    together = min(power_of_two(heads // kv_heads), MOST_HEADS)
    return together, ceil_div(heads // kv_heads, together), queries // together


def prefill_attention(
    q: Tensor,
    layer: KvLayer,
    chunks: ChunkPlaces,
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
    tiles, shape = mapped
    heads = q.shape[1]
    together, parts, queries = heads_together(heads, layer.heads, shape.lines)
    _prefill[(len(tiles.tile_chunks), layer.heads * parts)](
        q,
        q.stride(0),
        cached_layer(layer, rule),
        out,
        tiles,
        chunks,
        chunks.tables.stride(0),
        heads,
        FORM=layer_form(layer, heads, rule),
        TILE=shape.tile,
        QUERIES=queries,
        HEADS=together,
        PARTS=parts,
        **shape.launch.options,
    )
