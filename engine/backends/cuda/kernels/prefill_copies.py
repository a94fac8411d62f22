"""Shared memory of the pipeline of ``engine.backends.cuda.kernels.prefill_pipelined``, and the warp that fills it.

The bulk copy engine (TMA) writes a tile in pieces of 16 tokens and 64 numbers, lines of 128 bytes in the engine's own
order. Halves of a head lie one behind the other, as products read wider lines; so pieces of a tile can come from any
blocks of the paged cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

PIECE = gl.constexpr(16)
"""Tokens of one bulk copy; a block of the cache is a multiple of it."""

HALF = gl.constexpr(64)
"""Numbers of a line in one bulk copy: 128 bytes, the widest that the engine can put into the order of products."""

GROUP_LINES = gl.constexpr(64)
"""Lines that a group of four warps computes: the extent of one product."""

BEHIND = gl.constexpr(1 << 30)
"""A row behind the end of any memory: the copy engine writes zeros for it."""


@dataclass(frozen=True, slots=True)
class PipelineForm:
    """What is fixed when the kernel is compiled."""

    block: int
    """Tokens of a block."""
    group: int
    """Query heads that share one key-value head."""
    queries: int
    """Queries of a tile; times ``heads`` they are its lines."""
    heads: int
    """Computed together."""
    parts: int
    """Into which a group of heads falls by that."""
    width: int
    """Numbers of a head."""
    tile: int
    stages: int
    ordered: bool


class PagedMemory(NamedTuple):
    """Keys or values of a layer."""

    base: Tensor
    block: int
    """Numbers from a block to the next."""
    slot: int
    """Numbers from a token to the next."""
    ratio: int
    """Rows from a block to the next."""


class Extent(NamedTuple):
    """Keys and values that a program reads."""

    table: Tensor
    """Blocks."""
    kv_head: Tensor
    highest: Tensor
    """Last position that is read."""
    whole: Tensor
    """Tiles that every query sees whole."""
    tiles: Tensor


class Room(NamedTuple):
    """Tiles in shared memory, and barriers, one for each tile."""

    queries: gl.shared_memory_descriptor
    key_tiles: gl.shared_memory_descriptor
    value_tiles: gl.shared_memory_descriptor
    key_pieces: gl.shared_memory_descriptor
    """Memory of ``key_tiles``, by pieces."""
    value_pieces: gl.shared_memory_descriptor
    full_keys: gl.shared_memory_descriptor
    free_keys: gl.shared_memory_descriptor
    full_values: gl.shared_memory_descriptor
    free_values: gl.shared_memory_descriptor
    turns: gl.shared_memory_descriptor
    """One for each group that computes."""


def paged(memory: Tensor) -> PagedMemory:
    """Keys or values ``(blocks, block_size, heads, width)`` as the kernel takes them."""
    block, slot = memory.stride()[:2]
    return PagedMemory(memory, block, slot, block // slot)


def copies(memory: Tensor) -> TensorDescriptor:
    """What the copy engine knows of them: a token's numbers of all heads in a row; a piece is 16 rows of half a head.

    Triton finds it only where it is an argument of its own."""
    blocks, size, heads, width = memory.shape
    block, slot = memory.stride()[:2]
    rows = (blocks - 1) * (block // slot) + size
    order = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(memory, [rows, heads * width], [slot, 1], [int(PIECE.value), int(HALF.value)], order)


@gluon.jit
def _rows(
    extent: Extent, tile: gl.tensor, ratio: gl.tensor, LAST: gl.constexpr, FORM: gl.constexpr
) -> tuple[gl.tensor, ...]:
    """Rows of a tile's pieces; in the last tile those behind the end for pieces that no query sees."""
    COUNT: gl.constexpr = FORM.tile // PIECE
    rows = ()
    for piece in gl.static_range(COUNT):
        place = tile * FORM.tile + piece * PIECE
        entry = extent.table + place // FORM.block
        if LAST:
            row = gl.load(entry, mask=place <= extent.highest, other=0).to(gl.int32) * ratio + place % FORM.block
            row = gl.where(place <= extent.highest, row, BEHIND)
        else:
            row = gl.load(entry).to(gl.int32) * ratio + place % FORM.block
        rows = rows + (row,)  # type: ignore[assignment] # noqa: RUF005 - unpacking is unknown to Triton
    return rows


@gluon.jit
def _copy_some(
    extent: Extent, memory: PagedMemory, pieces: gl.shared_memory_descriptor, stage: gl.tensor, FORM: gl.constexpr
) -> None:
    """Write the piece in which the last position lies, zeros behind it."""
    SPREAD: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    COUNT: gl.constexpr = FORM.tile // PIECE
    HALVES: gl.constexpr = FORM.width // HALF
    place = extent.highest // PIECE * PIECE
    block = gl.load(extent.table + place // FORM.block).to(gl.int64)
    token = gl.arange(0, PIECE, gl.SliceLayout(1, SPREAD))
    number = gl.arange(0, HALF, gl.SliceLayout(0, SPREAD))
    present = (place + token <= extent.highest)[:, None] & (number >= 0)[None, :]
    slots = block * memory.block + (place % FORM.block + token).to(gl.int64) * memory.slot
    lines = memory.base + extent.kv_head * FORM.width + slots
    for half in gl.static_range(HALVES):
        numbers = gl.load(lines[:, None] + (number + half * HALF)[None, :], mask=present, other=0.0)
        pieces.index((stage * HALVES + half) * COUNT + place % FORM.tile // PIECE).store(numbers)
    # Products read by other means than these stores write. The arrival at the barrier waits for all threads.
    fence_async_shared()


@gluon.jit
def _bring(
    rows: gl.tuple,
    extent: Extent,
    source: tma.tensor_descriptor,
    pieces: gl.shared_memory_descriptor,
    stage: gl.tensor,
    full: gl.shared_memory_descriptor,
    broken: gl.tensor,
    LAST: gl.constexpr,
    FORM: gl.constexpr,
) -> None:
    """Start the bulk copies of a tile; in the last one all but that of the piece ``broken``."""
    COUNT: gl.constexpr = FORM.tile // PIECE
    HALVES: gl.constexpr = FORM.width // HALF
    column = extent.kv_head * FORM.width
    for half in gl.static_range(HALVES):
        for piece in gl.static_range(COUNT):
            target = pieces.index((stage * HALVES + half) * COUNT + piece)
            place = [rows[piece], column + half * HALF]
            if LAST:
                tma.async_copy_global_to_shared(source, place, full, target, pred=broken != piece)
            else:
                tma.async_copy_global_to_shared(source, place, full, target)


@gluon.jit
def _bring_last(
    rows: gl.tuple,
    extent: Extent,
    memory: PagedMemory,
    source: tma.tensor_descriptor,
    pieces: gl.shared_memory_descriptor,
    stage: gl.tensor,
    full: gl.shared_memory_descriptor,
    FORM: gl.constexpr,
) -> None:
    """Have the last tile brought, of which only a part may be read."""
    BYTES: gl.constexpr = FORM.tile * FORM.width * 2
    LESS: gl.constexpr = BYTES - PIECE * FORM.width * 2
    broken = -1
    if (extent.highest + 1) % PIECE != 0:
        broken = extent.highest % FORM.tile // PIECE
        _copy_some(extent, memory, pieces, stage, FORM)
        mbarrier.expect(full, LESS)
    else:
        mbarrier.expect(full, BYTES)
    _bring(rows, extent, source, pieces, stage, full, broken, True, FORM)


@gluon.jit
def load_tiles(
    extent: Extent,
    keys: PagedMemory,
    values: PagedMemory,
    key_source: tma.tensor_descriptor,
    value_source: tma.tensor_descriptor,
    room: Room,
    FORM: gl.constexpr,
) -> None:
    """Bring all tiles, each as soon as its room is free: what the warp that loads does."""
    BYTES: gl.constexpr = FORM.tile * FORM.width * 2
    last = extent.tiles - 1
    for tile in range(last):
        # Where they lie is asked for while room is waited for.
        rows = _rows(extent, tile, keys.ratio, False, FORM)
        stage, turn = tile % FORM.stages, tile // FORM.stages & 1
        # A barrier that is new counts as one whose last phase was odd.
        mbarrier.wait(room.free_keys.index(stage), turn ^ 1)
        mbarrier.expect(room.full_keys.index(stage), BYTES)
        _bring(rows, extent, key_source, room.key_pieces, stage, room.full_keys.index(stage), -1, False, FORM)
        mbarrier.wait(room.free_values.index(stage), turn ^ 1)
        mbarrier.expect(room.full_values.index(stage), BYTES)
        _bring(rows, extent, value_source, room.value_pieces, stage, room.full_values.index(stage), -1, False, FORM)
    rows = _rows(extent, last, keys.ratio, True, FORM)
    stage, turn = last % FORM.stages, last // FORM.stages & 1
    mbarrier.wait(room.free_keys.index(stage), turn ^ 1)
    _bring_last(rows, extent, keys, key_source, room.key_pieces, stage, room.full_keys.index(stage), FORM)
    mbarrier.wait(room.free_values.index(stage), turn ^ 1)
    _bring_last(rows, extent, values, value_source, room.value_pieces, stage, room.full_values.index(stage), FORM)


@gluon.jit
def make_room(TYPE: gl.constexpr, FORM: gl.constexpr) -> Room:
    """All of the program's shared memory; barriers as nothing has arrived yet."""
    ORDER: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    COUNT: gl.constexpr = FORM.stages * (FORM.tile // PIECE) * (FORM.width // HALF)
    queries = gl.allocate_shared_memory(TYPE, [2, GROUP_LINES, FORM.width], ORDER)
    key_pieces = gl.allocate_shared_memory(TYPE, [COUNT, PIECE, HALF], ORDER)
    value_pieces = gl.allocate_shared_memory(TYPE, [COUNT, PIECE, HALF], ORDER)
    full_keys = gl.allocate_shared_memory(gl.int64, [FORM.stages, 1], mbarrier.MBarrierLayout())
    free_keys = gl.allocate_shared_memory(gl.int64, [FORM.stages, 1], mbarrier.MBarrierLayout())
    full_values = gl.allocate_shared_memory(gl.int64, [FORM.stages, 1], mbarrier.MBarrierLayout())
    free_values = gl.allocate_shared_memory(gl.int64, [FORM.stages, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    STAGES: gl.constexpr = FORM.stages
    for stage in gl.static_range(STAGES):
        mbarrier.init(full_keys.index(stage), count=1)
        mbarrier.init(full_values.index(stage), count=1)
        mbarrier.init(free_keys.index(stage), count=2)
        mbarrier.init(free_values.index(stage), count=2)
    mbarrier.init(turns.index(0), count=1)
    mbarrier.init(turns.index(1), count=1)
    fence_async_shared()
    # Products read halves of lines that lie one behind the other, as pieces are brought.
    keys = key_pieces._reinterpret(TYPE, [FORM.stages, FORM.tile, FORM.width], ORDER)
    values = value_pieces._reinterpret(TYPE, [FORM.stages, FORM.tile, FORM.width], ORDER)
    return Room(queries, keys, values, key_pieces, value_pieces, full_keys, free_keys, full_values, free_values, turns)
