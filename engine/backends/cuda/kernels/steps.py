"""The beginning and the end of a step, in one launch each: what ``engine.backends.cuda.runtime.simulated_steps``
computes in some fifty small ones.

A program is a lane. It reads its row's words, compares the stamps of the blocks that the step reads, copies these
entries of the row's block tables, and says what the lane computes. Behind the choice it advances the row, and writes
its lane of the rings. Two lanes may name one row only where that is the padding row, which is not live: nothing is
written to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.backends.cuda.kernels.triton_common import ceil_div, first_seen
from engine.backends.cuda.runtime.loop import FOREIGN, NOTHING, RING_STEPS
from engine.backends.cuda.runtime.loop_state import LoopState, StepRows
from engine.backends.cuda.runtime.operations import Sampled
from engine.backends.cuda.runtime.rows import Field
from engine.core.kv.layout import Reach
from isolation.ipc.messages import MAX_TOP_LOGPROBS

AT_ONCE = 1_024
"""Entries of a block table that are compared together: 16,384 tokens in blocks of 16."""

STOPS_AT_ONCE = 64

SLOT_STEP = 16
"""Slots of a table begin at a multiple of so many: their address decides about no form of a kernel."""

LAST = tl.constexpr(int(Field.LAST))
POSITION = tl.constexpr(int(Field.POSITION))
LIMIT = tl.constexpr(int(Field.LIMIT))
DONE = tl.constexpr(int(Field.DONE))
NO_ROW = tl.constexpr(NOTHING)
NOT_ITS_OWN = tl.constexpr(FOREIGN)
TURNS = tl.constexpr(RING_STEPS)
TOPS = tl.constexpr(MAX_TOP_LOGPROBS)
TOPS_WIDTH = tl.constexpr(32)
"""A power of two that holds all alternatives."""

WORDS = ("fields", "entries", "expected", "lanes", "stops")
"""Parts of the words of all rows: each begins wherever the one before it ends."""


@dataclass(frozen=True, slots=True)
class _TableForm:
    """One table of a row."""

    block_size: int
    reach: Reach


class _Lanes(NamedTuple):
    """What a step computes; see ``StepRows``."""

    rows: Tensor
    tokens: Tensor
    positions: Tensor
    lengths: Tensor
    choosers: Tensor
    places: Tensor
    slots: Tensor
    entries: Tensor


class _Chosen(NamedTuple):
    """What was chosen."""

    tokens: Tensor
    logprobs: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


@triton.jit
def _faults(
    row_entries: tl.tensor,
    row_expected: tl.tensor,
    stamps: tl.tensor,
    num_blocks: tl.tensor,
    target: tl.tensor,
    first: tl.tensor,
    position: tl.tensor,
    length: tl.tensor,
    TABLE: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """Copy the entries of one table that are read, and count those that are another's."""
    begin = (first + first_seen(position, TABLE.reach) // TABLE.block_size).to(tl.int32)
    end = (first + (length + TABLE.block_size - 1) // TABLE.block_size).to(tl.int32)
    wrong = tl.zeros([WIDTH], tl.int32)
    for start in range(begin, end, WIDTH):
        place = start + tl.arange(0, WIDTH)
        live = place < end
        block = tl.load(row_entries + place, mask=live, other=0)
        tl.store(target + place, block, mask=live)
        exists = (block >= 0) & (block < num_blocks)
        stamp = tl.load(stamps + block, mask=live & exists, other=0)
        wanted = tl.load(row_expected + place, mask=live, other=0)
        wrong += (live & ((stamp != wanted) | (exists == 0))).to(tl.int32)
    return tl.sum(wrong, 0)


@triton.jit
def _slot(
    row_entries: tl.tensor,
    first: tl.tensor,
    position: tl.tensor,
    computed: tl.tensor,
    stride: tl.tensor,
    TABLE: tl.constexpr,
) -> tl.tensor:
    block = tl.load(row_entries + first + position // TABLE.block_size, mask=computed, other=0)
    return tl.where(computed, block * stride + position % TABLE.block_size, -1)


@triton.jit(
    do_not_specialize=("lines", "width", "num_blocks", "stride", "padding", "slot_row"),
    do_not_specialize_on_alignment=WORDS,
)
def _begin(
    fields: tl.tensor,
    lines: tl.tensor,
    entries: tl.tensor,
    expected: tl.tensor,
    width: tl.tensor,
    lanes: tl.tensor,
    firsts: tl.tensor,
    stamps: tl.tensor,
    num_blocks: tl.tensor,
    turn: tl.tensor,
    out: _Lanes,
    stride: tl.tensor,
    padding: tl.tensor,
    slot_row: tl.tensor,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    lane = tl.program_id(0)
    row = tl.load(lanes + lane)
    position = tl.load(fields + POSITION * lines + row)
    live = tl.load(fields + DONE * lines + row) == 0
    length = tl.where(live, position + 1, 0)
    row_entries, row_expected = entries + row * width, expected + row * width
    target = out.entries + lane.to(tl.int64) * width
    wrong = _faults(
        row_entries, row_expected, stamps, num_blocks, target, tl.load(firsts), position, length, FIRST, WIDTH
    )
    if SECOND is not None:
        first = tl.load(firsts + 1)
        wrong += _faults(row_entries, row_expected, stamps, num_blocks, target, first, position, length, SECOND, WIDTH)
    if THIRD is not None:
        first = tl.load(firsts + 2)
        wrong += _faults(row_entries, row_expected, stamps, num_blocks, target, first, position, length, THIRD, WIDTH)
    computed = live & (wrong == 0)
    tl.store(out.slots + lane, _slot(row_entries, tl.load(firsts), position, computed, stride, FIRST))
    if SECOND is not None:
        tl.store(
            out.slots + slot_row + lane, _slot(row_entries, tl.load(firsts + 1), position, computed, stride, SECOND)
        )
    if THIRD is not None:
        tl.store(
            out.slots + 2 * slot_row + lane, _slot(row_entries, tl.load(firsts + 2), position, computed, stride, THIRD)
        )
    tl.store(out.rows + lane, row)
    tl.store(out.tokens + lane, tl.load(fields + LAST * lines + row))
    tl.store(out.positions + lane, position)
    tl.store(out.places + lane, position + 1)
    tl.store(out.lengths + lane, tl.where(computed, position + 1, 0).to(tl.int32))
    tl.store(out.choosers + lane, tl.where(computed, row, padding))
    if lane == 0:
        # Read by no program of this launch.
        tl.store(turn, tl.load(turn) + 1)


@triton.jit(
    do_not_specialize=("lines", "num_stops", "num_lanes", "bucket", "padding"), do_not_specialize_on_alignment=WORDS
)
def _end(
    fields: tl.tensor,
    lines: tl.tensor,
    stops: tl.tensor,
    num_stops: tl.tensor,
    begun: _Lanes,
    chosen: _Chosen,
    ring: tl.tensor,
    reports: tl.tensor,
    turn: tl.tensor,
    num_lanes: tl.tensor,
    bucket: tl.tensor,
    padding: tl.tensor,
    WIDTH: tl.constexpr,
) -> None:
    lane = tl.program_id(0)
    line = (tl.load(turn) - 1) % TURNS * num_lanes + lane
    if lane < bucket:
        row = tl.load(begun.rows + lane)
        live = tl.load(fields + DONE * lines + row) == 0
        computed = tl.load(begun.choosers + lane) != padding
        pick = tl.load(chosen.tokens + lane).to(tl.int64)
        position = tl.load(begun.positions + lane)
        stopped = tl.zeros([WIDTH], tl.int32)
        for start in range(0, num_stops, WIDTH):
            place = start + tl.arange(0, WIDTH)
            stop = tl.load(stops + row * num_stops + place, mask=place < num_stops, other=-1)
            stopped += ((stop == pick) & (place < num_stops)).to(tl.int32)
        limit = tl.load(fields + LIMIT * lines + row)
        over = (tl.sum(stopped, 0) > 0) | (pick < 0) | (position + 2 >= limit)
        token = tl.where(computed, pick, tl.load(begun.tokens + lane))
        # Every load of the row's words is in front of what is written.
        tl.debug_barrier()
        tl.store(fields + LAST * lines + row, tl.maximum(token, 0), mask=live)
        tl.store(fields + POSITION * lines + row, position + computed.to(tl.int64), mask=live)
        tl.store(fields + DONE * lines + row, ((computed == 0) | over).to(tl.int64), mask=live)
        tl.store(ring + line, tl.where(computed, pick, tl.where(live, NOT_ITS_OWN, NO_ROW)))
        report = reports + line * (1 + 2 * TOPS)
        own = tl.load(chosen.logprobs + lane)
        tl.store(report, own.to(tl.int32, bitcast=True))
        top = tl.arange(0, TOPS_WIDTH)
        ids = tl.load(chosen.top_ids + lane * TOPS + top, mask=top < TOPS, other=0)
        tl.store(report + 1 + top, ids, mask=top < TOPS)
        tops = tl.load(chosen.top_logprobs + lane * TOPS + top, mask=top < TOPS, other=0.0)
        tl.store(report + 1 + TOPS + top, tops.to(tl.int32, bitcast=True), mask=top < TOPS)
    else:
        tl.store(ring + line, tl.load(turn) * 0 + NO_ROW)


MOST_TABLES = 3
"""Block tables of a row at the most."""


def begins(state: LoopState) -> bool:
    """Whether these kernels know rows of so many block tables."""
    return len(state.tables.groups) <= MOST_TABLES


def begin_step(state: LoopState, bucket: int) -> StepRows:
    """See ``engine.backends.cuda.runtime.operations.Operations``."""
    device, layout, groups = state.lanes.device, state.layout, state.tables.groups
    long = [torch.empty(bucket, dtype=torch.int64, device=device) for _ in range(5)]
    rows, tokens, positions, choosers, places = long
    lengths = torch.empty(bucket, dtype=torch.int32, device=device)
    room = ceil_div(bucket, SLOT_STEP) * SLOT_STEP
    slots = torch.empty(len(groups), room, dtype=torch.int64, device=device)
    entries = torch.empty(bucket, layout.width, dtype=torch.int64, device=device)
    forms = [_TableForm(group.block_size, group.reach) for group in groups]
    first, second, third = (*forms, None, None, None)[:MOST_TABLES]
    _begin[(bucket,)](
        state.fields,
        layout.lines,
        state.entries,
        state.expected,
        layout.width,
        state.lanes,
        state.firsts,
        state.stamps,
        len(state.stamps),
        state.turn,
        _Lanes(rows, tokens, positions, lengths, choosers, places, slots, entries),
        state.tables.stride,
        layout.rows,
        room,
        FIRST=first,
        SECOND=second,
        THIRD=third,
        WIDTH=AT_ONCE,
    )
    cut = tuple(line[:bucket] for line in slots)
    return StepRows(rows, tokens, positions, cut, state.tables.split(entries), lengths, choosers, places)


def end_step(state: LoopState, begun: StepRows, sampled: Sampled) -> None:
    """See ``engine.backends.cuda.runtime.operations.Operations``."""
    layout = state.layout
    lanes = _Lanes(
        begun.rows,
        begun.tokens,
        begun.positions,
        begun.lengths,
        begun.choosers,
        begun.places,
        begun.slots[0],
        begun.tables[0],
    )
    _end[(layout.lanes,)](
        state.fields,
        layout.lines,
        state.stops,
        layout.stops,
        lanes,
        _Chosen(sampled.tokens, sampled.logprobs, sampled.top_ids, sampled.top_logprobs),
        state.ring,
        state.reports,
        state.turn,
        layout.lanes,
        len(begun.rows),
        layout.rows,
        WIDTH=STOPS_AT_ONCE,
        num_warps=1,
    )
