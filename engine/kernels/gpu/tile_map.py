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

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.gpu.dialect import PLAIN_LAUNCH, Launch, ceil_div, first_seen, power_of_two, reach_code
from engine.kv.layout import Reach

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
    launch: Launch = PLAIN_LAUNCH


@dataclass(frozen=True, slots=True)
class DecodeMap:
    """Splits of all rows in the order of rows, and where each program's begin. All int32."""

    unit_rows: Tensor
    """``(rows * splits,)``; entries behind the last program's are not written."""
    unit_splits: Tensor
    """The same shape: which split of its row it is."""
    begins: Tensor
    """``(programs + 1,)``."""

    @classmethod
    def empty(cls, rows: int, programs: int, shape: DecodeShape, device: torch.device) -> DecodeMap:
        """Room for a bucket of so many rows."""
        units = rows * shape.splits
        return cls(*(torch.zeros(size, dtype=torch.int32, device=device) for size in (units, units, programs + 1)))


@dataclass(frozen=True, slots=True)
class ChunkMap:
    """For each tile of queries its chunk (-1: none) and its first token in that chunk, int32."""

    tile_chunks: Tensor
    tile_firsts: Tensor

    @classmethod
    def empty(cls, tokens: int, chunks: int, tile: int, device: torch.device) -> ChunkMap:
        """Room for every way to cut at most so many tokens and chunks into tiles of ``tile`` queries."""
        most = tokens // tile + chunks
        return cls(*(torch.zeros(most, dtype=torch.int32, device=device) for _ in range(2)))


@triton.jit
def split_width(tiles: tl.tensor, SPAN: tl.constexpr, SPLITS: tl.constexpr) -> tl.tensor:
    """Tiles of one split of a row that has so many."""
    return tl.maximum((tiles + SPLITS - 1) // SPLITS, SPAN)


@triton.jit
def row_tiles(length: tl.tensor, REACH: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr) -> tuple[tl.tensor, ...]:
    """The first tile that a row's last token attends to, and their number: none for a row of no length."""
    begin = first_seen(tl.maximum(length - 1, 0), REACH, SIZE) // TILE
    return begin, tl.maximum((length + TILE - 1) // TILE - begin, 0)


@triton.jit(do_not_specialize=("num_rows", "num_programs"))
def _decode_map(
    lengths: tl.tensor,
    unit_rows: tl.tensor,
    unit_splits: tl.tensor,
    begins: tl.tensor,
    num_rows: tl.tensor,
    num_programs: tl.tensor,
    REACH: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SPAN: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    row = tl.arange(0, ROWS)
    length = tl.load(lengths + row, mask=row < num_rows, other=0)
    _, tiles = row_tiles(length, REACH, SIZE, TILE)
    width = split_width(tiles, SPAN, SPLITS)
    units = (tiles + width - 1) // width
    first_unit = tl.cumsum(units, 0) - units
    first_tile = tl.cumsum(tiles, 0) - tiles
    total = tl.sum(tiles, 0)
    split = tl.arange(0, SPLITS)
    place = first_unit[:, None] + split[None, :]
    exists = split[None, :] < units[:, None]
    tl.store(unit_rows + place, row[:, None] + split[None, :] * 0, mask=exists)
    tl.store(unit_splits + place, row[:, None] * 0 + split[None, :], mask=exists)
    for start in range(0, num_programs + 1, STEP):
        program = start + tl.arange(0, STEP)
        # The program's share of all tiles begins here; its splits are those that begin in its share.
        share = (program.to(tl.int64) * total + num_programs - 1) // num_programs
        before = (share.to(tl.int32)[:, None] - first_tile[None, :] + width[None, :] - 1) // width[None, :]
        before = tl.minimum(tl.maximum(before, 0), units[None, :])
        tl.store(begins + program, tl.sum(before, 1), mask=program <= num_programs)


@triton.jit(do_not_specialize=("num_chunks", "num_tiles"))
def _chunk_map(
    lengths: tl.tensor,
    tile_chunks: tl.tensor,
    tile_firsts: tl.tensor,
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
        tl.store(tile_chunks + tile, tl.where(live, found, -1), mask=tile < num_tiles)
        tl.store(tile_firsts + tile, tl.where(live, first * TILE, 0), mask=tile < num_tiles)


def map_decode(lengths: Tensor, reach: Reach, shape: DecodeShape, out: DecodeMap) -> None:
    """Fill the map of a step.

    Args:
        lengths: int32 ``(rows,)``: positions that each row's token sees at the most, its own included; 0 for no row.
        reach: how far back the layers look.
        shape: how contexts are cut.
        out: of the bucket.
    """
    rows, programs = len(lengths), len(out.begins) - 1
    code, size = reach_code(reach)
    _decode_map[(1,)](
        lengths,
        out.unit_rows,
        out.unit_splits,
        out.begins,
        rows,
        programs,
        REACH=code,
        SIZE=size,
        TILE=shape.tile,
        SPAN=shape.span,
        SPLITS=shape.splits,
        ROWS=power_of_two(rows),
        STEP=AT_ONCE,
    )


def map_chunks(lengths: Tensor, tile: int, out: ChunkMap) -> None:
    """Fill the map of a step's prompt chunks.

    Args:
        lengths: int32 ``(chunks,)``: tokens of each; 0 for no chunk.
        tile: queries of a tile, a power of two.
        out: of the bucket.
    """
    _chunk_map[(1,)](
        lengths,
        out.tile_chunks,
        out.tile_firsts,
        len(lengths),
        len(out.tile_chunks),
        TILE=tile,
        CHUNKS=power_of_two(len(lengths)),
        STEP=AT_ONCE,
    )


def decode_units(lengths: list[int], reach: Reach, shape: DecodeShape) -> list[tuple[int, int, int]]:
    """The specification of what ``map_decode`` cuts: row, split and number of tiles of every split, in order."""
    units = []
    for row, length in enumerate(lengths):
        if length:
            begin, end = reach.first_seen(length - 1) // shape.tile, ceil_div(length, shape.tile)
            width = max(ceil_div(end - begin, shape.splits), shape.span)
            for split in range(ceil_div(end - begin, width)):
                units.append((row, split, min(width, end - begin - split * width)))
    return units
