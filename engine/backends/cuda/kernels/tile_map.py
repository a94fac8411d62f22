"""Who computes which part of a step's attention: made once a step and reach on the device, used by all layers of it.

Decoding rows differ in length by orders of magnitude. A row's context is cut into *tiles* of consecutive tokens, and
these into *splits*, one partial result each. How a row is cut follows from its own length alone, so its numbers are
the same bits in any batch; how splits are dealt to programs follows from the batch, so that each program has about as
many tiles as any other. The numbers of programs and of tables' entries are those of the bucket, whatever the lengths:
a recorded graph of launches stays valid.

Prompt chunks are cut into tiles of queries from their own beginnings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.backends.cuda.kernels.triton_common import PLAIN_LAUNCH, Threads, first_seen, power_of_two
from engine.core.kv.layout import Reach

AT_ONCE = 16
"""Programs, or tiles, that the maps look at together."""


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """How contexts are cut; one shape for all rows and steps of an engine."""

    tile: int
    """Tokens of a tile, a power of two."""
    span: int
    """Tiles of a split while a row has few."""
    splits: int
    """Most splits of a row, a power of two: a longer row has longer splits."""
    launch: Threads = PLAIN_LAUNCH
    resident: int = 2
    """Programs of the persistent grid for each multiprocessor: while one waits for memory another computes. No more may
    run at once than its shared memory holds tiles for."""


class DecodeMap(NamedTuple):
    """Splits of all rows in the order of rows, and where each program's begin. All int32."""

    unit_rows: Tensor
    """``(rows * splits,)``; entries behind the last program's are not written."""
    unit_splits: Tensor
    """Index of the split within its row; shape as above."""
    begins: Tensor
    """``(programs + 1,)``."""

    @classmethod
    def empty(cls, rows: int, programs: int, shape: DecodeShape, device: torch.device) -> DecodeMap:
        """Room for a bucket of so many rows. Not zeroed: units behind the last program's are not read."""
        units = rows * shape.splits
        return cls(*(torch.empty(size, dtype=torch.int32, device=device) for size in (units, units, programs + 1)))


class ChunkMap(NamedTuple):
    """For each tile of queries its chunk (-1: none) and its first token in that chunk, int32."""

    tile_chunks: Tensor
    tile_firsts: Tensor

    @classmethod
    def empty(cls, tokens: int, chunks: int, tile: int, device: torch.device) -> ChunkMap:
        """Room for every way to cut at most so many tokens and chunks into tiles of ``tile`` queries."""
        most = tokens // tile + chunks
        return cls(*(torch.zeros(most, dtype=torch.int32, device=device) for _ in range(2)))


@triton.jit
def row_tiles(length: tl.tensor, REACH: tl.constexpr, SHAPE: tl.constexpr) -> tuple[tl.tensor, ...]:
    """The first tile that a row's last token attends to, the number of tiles, and the tiles of one split. A row of no
    length has no tiles."""
    begin = first_seen(tl.maximum(length - 1, 0), REACH) // SHAPE.tile
    tiles = tl.maximum((length + SHAPE.tile - 1) // SHAPE.tile - begin, 0)
    return begin, tiles, tl.maximum((tiles + SHAPE.splits - 1) // SHAPE.splits, SHAPE.span)


@triton.jit(do_not_specialize=("num_rows", "num_programs"))
def _decode_map(
    lengths: tl.tensor,
    out: DecodeMap,
    num_rows: tl.tensor,
    num_programs: tl.tensor,
    REACH: tl.constexpr,
    SHAPE: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    row = tl.arange(0, ROWS)
    length = tl.load(lengths + row, mask=row < num_rows, other=0)
    _, tiles, width = row_tiles(length, REACH, SHAPE)
    units = (tiles + width - 1) // width
    first_unit = tl.cumsum(units, 0) - units
    first_tile = tl.cumsum(tiles, 0) - tiles
    total = tl.sum(tiles, 0)
    split = tl.arange(0, SHAPE.splits)
    place = first_unit[:, None] + split[None, :]
    exists = split[None, :] < units[:, None]
    tl.store(out.unit_rows + place, row[:, None] + split[None, :] * 0, mask=exists)
    tl.store(out.unit_splits + place, row[:, None] * 0 + split[None, :], mask=exists)
    for start in range(0, num_programs + 1, STEP):
        program = start + tl.arange(0, STEP)
        # The program's share of all tiles begins here; its splits are those that begin in its share.
        share = (program.to(tl.int64) * total + num_programs - 1) // num_programs
        before = (share.to(tl.int32)[:, None] - first_tile[None, :] + width[None, :] - 1) // width[None, :]
        before = tl.minimum(tl.maximum(before, 0), units[None, :])
        tl.store(out.begins + program, tl.sum(before, 1), mask=program <= num_programs)


@triton.jit(do_not_specialize=("num_chunks", "num_tiles"))
def _chunk_map(
    lengths: tl.tensor,
    out: ChunkMap,
    num_chunks: tl.tensor,
    num_tiles: tl.tensor,
    TILE: tl.constexpr,
    CHUNKS: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    chunk = tl.arange(0, CHUNKS)
    tiles = (tl.load(lengths + chunk, mask=chunk < num_chunks, other=0) + TILE - 1) // TILE
    ends = tl.cumsum(tiles, 0)
    total = tl.sum(tiles, 0)
    for start in range(0, num_tiles, STEP):
        tile = start + tl.arange(0, STEP)
        over = ends[None, :] <= tile[:, None]
        found = tl.sum(over.to(tl.int32), 1)
        first = tile - tl.sum(tl.where(over, tiles[None, :], 0), 1)
        live = tile < total
        tl.store(out.tile_chunks + tile, tl.where(live, found, -1), mask=tile < num_tiles)
        tl.store(out.tile_firsts + tile, tl.where(live, first * TILE, 0), mask=tile < num_tiles)


def map_decode(lengths: Tensor, reach: Reach, shape: DecodeShape, out: DecodeMap) -> None:
    """Fill the map of a step.

    Args:
        lengths: int32 ``(rows,)``: positions that each row's token sees at the most, its own included; 0 for no row.
        reach: how far back the layers look.
        shape: how contexts are cut.
        out: of the bucket.
    """
    rows, programs = len(lengths), len(out.begins) - 1
    _decode_map[(1,)](lengths, out, rows, programs, REACH=reach, SHAPE=shape, ROWS=power_of_two(rows), STEP=AT_ONCE)


def map_chunks(lengths: Tensor, tile: int, out: ChunkMap) -> None:
    """Fill the map of a step's prompt chunks.

    Args:
        lengths: int32 ``(chunks,)``: tokens of each; 0 for no chunk.
        tile: queries of a tile, a power of two.
        out: of the bucket.
    """
    chunks, tiles = len(lengths), len(out.tile_chunks)
    _chunk_map[(1,)](lengths, out, chunks, tiles, TILE=tile, CHUNKS=power_of_two(chunks), STEP=AT_ONCE)
