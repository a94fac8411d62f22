"""Attention of prompt chunks on GPUs of architecture sm_90, as a pipeline of warps that load and warps that compute.

One warp has the bulk copy engine (TMA) bring tiles of keys and values into shared memory, 16 tokens of the paged cache
at a time. Two groups of four warps take 64 lines each and multiply with ``wgmma``, which reads shared memory itself and
runs beside other instructions: the weights of one tile are computed while the values of the tile before are summed
(Shah et al., FlashAttention-3, arXiv 2407.08608). Barriers in shared memory say which tiles are full and which free.

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

from engine.backends.attention import AttentionRule
from engine.backends.cuda.kernels.prefill_attention import ChunkPlaces, heads_together
from engine.backends.cuda.kernels.prefill_copies import (
    GROUP_LINES,
    PIECE,
    Extent,
    PagedMemory,
    PipelineForm,
    Room,
    copies,
    load_tiles,
    make_room,
    paged,
)
from engine.backends.cuda.kernels.tile_map import ChunkMap
from engine.backends.cuda.kernels.triton_common import LOG2_E
from engine.backends.cuda.runtime.operations import KvLayer

WIDTHS = (64, 128)
"""Numbers of a head that the kernel is made for."""

WARPS = 4
"""Warps of a group that computes; the second group and the warp that loads are added to them."""

LAUNCH_REGISTERS = 168
"""Registers of a thread at the launch: three times 128 threads share the 65,536 of a multiprocessor."""

COMPUTER_REGISTERS = gl.constexpr(232)
LOADER_REGISTERS = gl.constexpr(40)
"""Registers of a thread while they run: those that load give some to those that compute."""


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
    """Tokens of the chunk."""
    start: Tensor
    """Position of the chunk's first token."""
    unit: Tensor
    """What a score is multiplied by for an exponent of two."""


@gluon.jit
def _exp2(x: gl.tensor) -> gl.tensor:
    """Powers of two; those below the least normal number are zero, which saves three instructions for each."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _weigh(
    score: gl.tensor,
    largest: gl.tensor,
    weight: gl.tensor,
    unit: gl.tensor,
    place: gl.tensor,
    position: gl.tensor,
    CUT: gl.constexpr,
) -> tuple[gl.tensor, ...]:
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
def _over_tiles(
    sums: gl.tuple,
    begin: gl.tensor,
    end: gl.tensor,
    query: gl.shared_memory_descriptor,
    room: Room,
    own: gl.tensor,
    unit: gl.tensor,
    position: gl.tensor,
    CUT: gl.constexpr,
    FORM: gl.constexpr,
) -> tuple[gl.tensor, ...]:
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
        scoring = warpgroup_mma(
            query, room.key_tiles.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True
        )
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
def _attend(
    lines: Lines, extent: Extent, own: gl.tensor, query: gl.shared_memory_descriptor, room: Room, FORM: gl.constexpr
) -> gl.tensor:
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
def _compute(lines: Lines, extent: Extent, own: gl.tensor, room: Room, FORM: gl.constexpr) -> None:
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


@gluon.jit(do_not_specialize=("table_row", "heads"))
def _prefill_pipelined(
    q: gl.tensor,
    q_row: gl.tensor,
    keys: PagedMemory,
    values: PagedMemory,
    key_source: tma.tensor_descriptor,
    value_source: tma.tensor_descriptor,
    unit: gl.tensor,
    out: gl.tensor,
    tiles: ChunkMap,
    chunks: ChunkPlaces,
    table_row: gl.tensor,
    heads: gl.tensor,
    FORM: gl.constexpr,
) -> None:
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
        room = make_room(q.dtype.element_ty, FORM)
        gl.warp_specialize(
            [
                (_compute, (lines, extent, 0, room, FORM)),
                (_compute, (lines, extent, 1, room, FORM)),
                (load_tiles, (extent, keys, values, key_source, value_source, room, FORM)),
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
        paged(layer.keys),
        paged(layer.values),
        copies(layer.keys),
        copies(layer.values),
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
