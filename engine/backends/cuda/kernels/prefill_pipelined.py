"""Attention of prompt chunks on GPUs of architecture sm_90, as a pipeline of warps that load and warps that compute.

One warp has the bulk copy engine (TMA) bring tiles of keys and values into shared memory, 16 tokens of the paged cache
at a time. Two groups of four warps take 64 lines each and multiply with ``wgmma``, which reads shared memory itself and
runs beside other instructions: the weights of one tile are computed while the values of the tile before are summed
(Shah et al., FlashAttention-3, arXiv 2407.08608). Barriers in shared memory say which tiles are full and which are free.

It computes what ``engine.backends.cuda.kernels.prefill_attention`` computes, for layers that see whole contexts and
have heads of one width (``fits``). A line's operations do not depend on the lines beside it: a tile that a query sees
nothing of leaves its sums as they are, bit by bit.

Slots that no query of the tile may see are not read: pieces behind the last position are filled with zeros, and the
piece in which it lies is copied by plain loads under a condition. The language is Gluon, which Triton's interpreter
does not know: a card runs the tests of ``prefill_attention`` with it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from engine.backends.attention import AttentionRule
from engine.backends.cuda.kernels.prefill_attention import ChunkPlaces, heads_together
from engine.backends.cuda.kernels.tile_map import ChunkMap
from engine.backends.cuda.kernels.triton_common import LOG2_E
from engine.backends.cuda.runtime.operations import KvLayer

PIECE = gl.constexpr(16)
"""Tokens of one bulk copy; a block of the cache is a multiple of it."""

HALF = gl.constexpr(64)
"""Numbers of a line in one bulk copy: 128 bytes, the widest that the engine can put into the order of products."""

GROUP_LINES = gl.constexpr(64)
"""Lines that a group of four warps computes: the extent of one product."""

BEHIND = gl.constexpr(1 << 30)
"""A row behind the end of any memory: the copy engine writes zeros for it."""

WIDTHS = (64, 128)
"""Of heads that the kernel is made for."""

WARPS = 4
"""Of a group that computes; the second one and the warp that loads are added to them."""

LAUNCH_REGISTERS = 168
"""Of a thread at the launch: three times 128 threads share the 65,536 of a multiprocessor."""

COMPUTER_REGISTERS = gl.constexpr(232)
LOADER_REGISTERS = gl.constexpr(40)
"""Of a thread while they run: those that load give some to those that compute."""


@dataclass(frozen=True, slots=True)
class PipelinedShape:
    """Extents of a tile, and how the pipeline runs."""

    tile: int = 128
    """Tokens of keys and values, a power of two; 64 at least."""
    stages: int = 2
    """Tiles of keys, and of values, that have room in shared memory."""
    ordered: bool = False
    """Whether the two groups start their products by turns, so that one computes weights while the other multiplies."""

    @property
    def lines(self) -> int:
        """Queries times the heads that are computed together."""
        return 2 * int(GROUP_LINES.value)


@dataclass(frozen=True, slots=True)
class PipelineForm:
    """What is fixed when the kernel is compiled."""

    block: int
    """Tokens of a block."""
    group: int
    """Query heads that share one key-value head."""
    queries: int
    """Of a tile, times ``heads`` the tile's lines."""
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

    pieces: TensorDescriptor
    """A token's numbers of all heads in a row; a piece is 16 rows of half a head."""
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


class Lines(NamedTuple):
    """Queries of a program."""

    q: Tensor
    q_row: Tensor
    out: Tensor
    heads: Tensor
    part: Tensor
    begin: Tensor
    """Index of the chunk's first token in the step."""
    first: Tensor
    """The tile's first query in its chunk."""
    length: Tensor
    """Of the chunk."""
    start: Tensor
    """Position of the chunk's first token."""
    unit: Tensor
    """What a score is multiplied by for an exponent of two."""


class Room(NamedTuple):
    """Tiles in shared memory, and barriers, one for each tile."""

    queries: Tensor
    key_tiles: Tensor
    value_tiles: Tensor
    key_pieces: Tensor
    """The same memory as ``key_tiles``, by pieces."""
    value_pieces: Tensor
    full_keys: Tensor
    free_keys: Tensor
    full_values: Tensor
    free_values: Tensor
    turns: Tensor
    """One for each group that computes."""


@gluon.jit
def _rows(extent, tile, ratio, LAST: gl.constexpr, FORM: gl.constexpr):
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
        rows = rows + (row,)  # noqa: RUF005 - Triton has no unpacking
    return rows


@gluon.jit
def _copy_some(extent, memory, pieces, stage, FORM: gl.constexpr):
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
def _bring(rows, extent, memory, pieces, stage, full, broken, LAST: gl.constexpr, FORM: gl.constexpr):
    """Start the bulk copies of a tile; in the last one all but that of the piece ``broken``."""
    COUNT: gl.constexpr = FORM.tile // PIECE
    HALVES: gl.constexpr = FORM.width // HALF
    column = extent.kv_head * FORM.width
    for half in gl.static_range(HALVES):
        for piece in gl.static_range(COUNT):
            target = pieces.index((stage * HALVES + half) * COUNT + piece)
            place = [rows[piece], column + half * HALF]
            if LAST:
                tma.async_copy_global_to_shared(memory.pieces, place, full, target, pred=broken != piece)
            else:
                tma.async_copy_global_to_shared(memory.pieces, place, full, target)


@gluon.jit
def _bring_last(rows, extent, memory, pieces, stage, full, FORM: gl.constexpr):
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
    _bring(rows, extent, memory, pieces, stage, full, broken, True, FORM)


@gluon.jit
def _load(extent, keys, values, room, FORM: gl.constexpr):
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
        _bring(rows, extent, keys, room.key_pieces, stage, room.full_keys.index(stage), -1, False, FORM)
        mbarrier.wait(room.free_values.index(stage), turn ^ 1)
        mbarrier.expect(room.full_values.index(stage), BYTES)
        _bring(rows, extent, values, room.value_pieces, stage, room.full_values.index(stage), -1, False, FORM)
    rows = _rows(extent, last, keys.ratio, True, FORM)
    stage, turn = last % FORM.stages, last // FORM.stages & 1
    mbarrier.wait(room.free_keys.index(stage), turn ^ 1)
    _bring_last(rows, extent, keys, room.key_pieces, stage, room.full_keys.index(stage), FORM)
    mbarrier.wait(room.free_values.index(stage), turn ^ 1)
    _bring_last(rows, extent, values, room.value_pieces, stage, room.full_values.index(stage), FORM)


@gluon.jit
def _exp2(x):
    """Powers of two; those below the least normal number are zero, which saves three instructions for each."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _weigh(score, largest, weight, unit, place, position, CUT: gl.constexpr):
    """A tile's weights, the factor of the sums so far, the largest score and the sum of weights. With and without
    ``CUT`` the same bits where every query sees the whole tile."""
    if CUT:
        score = gl.where(place[None, :] <= position[:, None], score, -float("inf"))
    # Every query sees position 0, so from the first tile on there is a largest score.
    peak = gl.maximum(largest, gl.max(score, 1))
    lowered = -(peak * unit)
    share = _exp2(gl.fma(score, unit, lowered[:, None]))
    fade = _exp2((largest - peak) * unit)
    return share, fade, peak, gl.fma(weight, fade, gl.sum(share, 1))


@gluon.jit
def _over_tiles(sums, begin, end, query, room, own, unit, position, CUT: gl.constexpr, FORM: gl.constexpr):
    """Scores and weights of tiles ``begin .. end``, and the values of the tile before each; 1 at least is ``begin``."""
    TILE: gl.constexpr = FORM.tile
    WIDTH: gl.constexpr = FORM.width
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    SHARES: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    largest, weight, total, share = sums
    number = gl.arange(0, TILE, gl.SliceLayout(0, SCORES))
    for tile in range(begin, end):
        stage, before = tile % FORM.stages, (tile - 1) % FORM.stages
        mbarrier.wait(room.full_keys.index(stage), tile // FORM.stages & 1)
        if FORM.ordered:
            # The first group begins; each passes the turn on when its products are under way.
            mbarrier.wait(room.turns.index(own), (tile - own) & 1)
        nothing = gl.zeros([GROUP_LINES, TILE], gl.float32, SCORES)
        scoring = warpgroup_mma(query, room.key_tiles.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        mbarrier.wait(room.full_values.index(before), (tile - 1) // FORM.stages & 1)
        summing = warpgroup_mma(share, room.value_tiles.index(before), total, is_async=True)
        if FORM.ordered:
            mbarrier.arrive(room.turns.index(1 - own), count=1)
        score = warpgroup_mma_wait(1, deps=(scoring,))
        mbarrier.arrive(room.free_keys.index(stage), count=1)
        place = tile * TILE + number
        weights, fade, largest, weight = _weigh(score, largest, weight, unit, place, position, CUT)
        total, share = warpgroup_mma_wait(0, deps=(summing, share))
        mbarrier.arrive(room.free_values.index(before), count=1)
        total = total * gl.convert_layout(fade, gl.SliceLayout(1, SUMS))[:, None]
        share = gl.convert_layout(weights.to(share.dtype), SHARES)
    return largest, weight, total, share


@gluon.jit
def _attend(lines, extent, own, query, room, FORM: gl.constexpr):
    """Sums of the lines of one group over all tiles, divided by their weights."""
    TILE: gl.constexpr = FORM.tile
    WIDTH: gl.constexpr = FORM.width
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    SHARES: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    line = own * GROUP_LINES + gl.arange(0, GROUP_LINES, gl.SliceLayout(1, SCORES))
    position = lines.start + gl.minimum(lines.first + line // FORM.heads, lines.length - 1)
    # The first tile has none before it.
    mbarrier.wait(room.full_keys.index(0), 0)
    nothing = gl.zeros([GROUP_LINES, TILE], gl.float32, SCORES)
    scoring = warpgroup_mma(query, room.key_tiles.index(0).permute((1, 0)), nothing, use_acc=False, is_async=True)
    score = warpgroup_mma_wait(0, deps=(scoring,))
    mbarrier.arrive(room.free_keys.index(0), count=1)
    largest = gl.full([GROUP_LINES], -float("inf"), gl.float32, gl.SliceLayout(1, SCORES))
    weight = gl.zeros([GROUP_LINES], gl.float32, gl.SliceLayout(1, SCORES))
    place = gl.arange(0, TILE, gl.SliceLayout(0, SCORES))
    weights, _fade, largest, weight = _weigh(score, largest, weight, lines.unit, place, position, True)
    share = gl.convert_layout(weights.to(query.dtype), SHARES)
    sums = largest, weight, gl.zeros([GROUP_LINES, WIDTH], gl.float32, SUMS), share
    whole = gl.maximum(extent.whole, 1)
    sums = _over_tiles(sums, 1, whole, query, room, own, lines.unit, position, False, FORM)
    sums = _over_tiles(sums, whole, extent.tiles, query, room, own, lines.unit, position, True, FORM)
    largest, weight, total, share = sums
    last = extent.tiles - 1
    mbarrier.wait(room.full_values.index(last % FORM.stages), last // FORM.stages & 1)
    total = warpgroup_mma(share, room.value_tiles.index(last % FORM.stages), total, is_async=True)
    total = warpgroup_mma_wait(0, deps=(total,))
    return total * gl.convert_layout(1.0 / weight, gl.SliceLayout(1, SUMS))[:, None]


@gluon.jit
def _compute(lines, extent, own, room, FORM: gl.constexpr):
    """Read 64 lines, attend, write: what a group of four warps does, the first or the second of the program."""
    SPREAD: gl.constexpr = gl.BlockedLayout([1, 8], [256 // FORM.width, FORM.width // 8], [4, 1], [1, 0])
    query = room.queries.index(own)
    line = own * GROUP_LINES + gl.arange(0, GROUP_LINES, gl.SliceLayout(1, SPREAD))
    number = gl.arange(0, FORM.width, gl.SliceLayout(0, SPREAD))
    member = lines.part * FORM.heads + line % FORM.heads
    token = lines.first + line // FORM.heads
    live = ((token < lines.length) & (member < FORM.group))[:, None] & (number >= 0)[None, :]
    head = extent.kv_head * FORM.group + member
    index = (lines.begin + token).to(gl.int64)
    source = lines.q + (index * lines.q_row + head * FORM.width)[:, None] + number[None, :]
    query.store(gl.load(source, mask=live, other=0.0))
    fence_async_shared()
    result = _attend(lines, extent, own, query, room, FORM)
    # Nothing reads the queries any more: from their room whole lines are written.
    query.store(result.to(query.dtype))
    target = lines.out + ((index * lines.heads + head) * FORM.width)[:, None] + number[None, :]
    gl.store(target, query.load(SPREAD), mask=live)


@gluon.jit
def _make_room(TYPE: gl.constexpr, FORM: gl.constexpr):
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
    return Room(
        queries, keys, values, key_pieces, value_pieces, full_keys, free_keys, full_values, free_values, turns
    )


@gluon.jit(do_not_specialize=("table_row", "heads"))
def _prefill_pipelined(q, q_row, keys, values, unit, out, tiles, chunks, table_row, heads, FORM: gl.constexpr):
    # The last tiles of a chunk see most of it, so they begin first.
    program = gl.num_programs(0) - 1 - gl.program_id(0)
    chunk = gl.load(tiles.tile_chunks + program)
    if chunk >= 0:
        first = gl.load(tiles.tile_firsts + program)
        length = gl.load(chunks.lengths + chunk)
        start = gl.load(chunks.starts + chunk)
        begin = gl.load(chunks.begins + chunk)
        kv_head = gl.program_id(1) // FORM.parts
        highest = start + gl.minimum(first + FORM.queries, length) - 1
        table = chunks.tables + chunk.to(gl.int64) * table_row
        extent = Extent(table, kv_head, highest, (start + first + 1) // FORM.tile, highest // FORM.tile + 1)
        lines = Lines(q, q_row, out, heads, gl.program_id(1) % FORM.parts, begin, first, length, start, unit)
        room = _make_room(q.dtype.element_ty, FORM)
        gl.warp_specialize(
            [
                (_compute, (lines, extent, 0, room, FORM)),
                (_compute, (lines, extent, 1, room, FORM)),
                (_load, (extent, keys, values, room, FORM)),
            ],
            [4, 1],
            [COMPUTER_REGISTERS, LOADER_REGISTERS],
        )


def fits(q: Tensor, layer: KvLayer, rule: AttentionRule) -> bool:
    """Whether the kernel is made for such queries and such a layer."""
    width = q.shape[2]
    memories = (layer.keys, layer.values)
    return (
        width in WIDTHS
        and layer.reach.kind == "full"
        and rule.plain
        and not layer.latent
        and layer.keys.shape[1] % int(PIECE.value) == 0
        and layer.keys.stride() == layer.values.stride()
        and all(one.dtype == torch.bfloat16 for one in (q, *memories))
        and all(one.shape[3] == width and one.stride(0) % one.stride(1) == 0 for one in memories)
    )


def _paged(memory: Tensor) -> PagedMemory:
    blocks, size, heads, width = memory.shape
    block, slot = memory.stride()[:2]
    rows = (blocks - 1) * (block // slot) + size
    order = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    piece = [int(PIECE.value), int(HALF.value)]
    return PagedMemory(
        TensorDescriptor(memory, [rows, heads * width], [slot, 1], piece, order), memory, block, slot, block // slot
    )


def prefill_pipelined(
    q: Tensor,
    layer: KvLayer,
    chunks: ChunkPlaces,
    mapped: tuple[ChunkMap, PipelinedShape],
    rule: AttentionRule,
    out: Tensor,
) -> None:
    """Attend with the tokens of prompt chunks, as ``prefill_attention.prefill_attention`` does, where ``fits`` says so.

    Args:
        q: ``(N, heads, width)`` of all tokens of the step, contiguous in the last two axes.
        layer: keys and values, this step's own written already.
        chunks: where they are.
        mapped: the step's map, made for the queries of a tile that ``heads_together`` gives; and the tile's shape.
        rule: how the layer weighs.
        out: ``(N, heads, width)``, contiguous.
    """
    tiles, shape = mapped
    heads = q.shape[1]
    together, parts, queries = heads_together(heads, layer.heads, shape.lines)
    form = PipelineForm(
        block=layer.keys.shape[1],
        group=heads // layer.heads,
        queries=queries,
        heads=together,
        parts=parts,
        width=q.shape[2],
        tile=shape.tile,
        stages=shape.stages,
        ordered=shape.ordered,
    )
    _prefill_pipelined[(len(tiles.tile_chunks), layer.heads * parts)](
        q,
        q.stride(0),
        _paged(layer.keys),
        _paged(layer.values),
        rule.scale * LOG2_E.value,
        out,
        tiles,
        chunks,
        chunks.tables.stride(0),
        heads,
        FORM=form,
        num_warps=WARPS,
        maxnreg=LAUNCH_REGISTERS,
    )
