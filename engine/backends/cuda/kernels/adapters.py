"""What adapters (LoRA) add to the results of a linear map, for many adapters in one batch.

An adapter's factors lie in a *slot* of the map's tables, which are taken once; loading one writes its slot. The slot of
a row is a number in memory, so a recorded step serves whatever adapters its rows have, and rows without one have slot
0. Rows of one adapter are put together into groups of at most ``GROUP_ROWS``, once for each step. Then a map has two
launches: its inputs to the rank, and the rank to its outputs, where the sum is added to what the map gave. Rows without
an adapter are in no group: nothing is added to them, not even zero.

A map may be several published ones side by side, as a fused projection of query, key and value is: each *piece* has
factors of its own, and each output is in one piece.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.backends.cuda.kernels.triton_common import Threads, ceil_div, dot, narrow, power_of_two

GROUP_ROWS = tl.constexpr(16)
"""Rows of a group at the most: the least extent of a product's operand."""

LEAST_RANK = 16
"""Ranks are padded with zeros to a power of two, at least this."""

MOST_ROWS = 256
"""Rows of a step at the most: all pairs of them are compared by one program."""

NO_SLOT = 0
"""Slot of a row without an adapter."""


@dataclass(frozen=True, slots=True)
class AdapterTile:
    """Extents of a product's tile, powers of two; 16 at least."""

    depth: int = 256
    """Inputs of a tile."""
    share: int = 1_024
    """Inputs of a program, a multiple of ``depth``: more programs than groups read a slot's first factor."""
    outputs: int = 128
    """Outputs of a tile."""
    walkers: int = 8
    """Programs that share the groups of a tile of outputs."""
    launch: Threads = Threads(4, 3)  # noqa: RUF009 - a named tuple does not change


class Groups(NamedTuple):
    """Rows of a step by adapter. All int32."""

    number: Tensor
    """``(1,)``: groups that there are."""
    slots: Tensor
    """``(rows,)``: the slot of each."""
    rows: Tensor
    """``(rows, GROUP_ROWS)``: rows of each; -1 for none."""

    @classmethod
    def empty(cls, rows: int, device: torch.device) -> Groups:
        """Room for every way to have adapters."""
        sizes = ((1,), (rows,), (rows, int(GROUP_ROWS.value)))
        return cls(*(torch.zeros(size, dtype=torch.int32, device=device) for size in sizes))


class SlotFactors(NamedTuple):
    """Factors of all adapters for one map, and which outputs they change."""

    down: Tensor
    """``(slots, pieces * rank, inputs)``; slot 0 is never read."""
    up: Tensor
    """``(slots, outputs, rank)``, with the adapter's scale."""
    tiles: Tensor
    """int32 ``(tiles, 3)``: of a tile of outputs its first, the one behind its last, and its piece."""

    @property
    def rank(self) -> int:
        """Rank that slots have room for."""
        return self.up.shape[2]

    @classmethod
    def empty(
        cls,
        slots: int,
        inputs: int,
        pieces: list[tuple[int, int]],
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
        tile: AdapterTile,
    ) -> SlotFactors:
        """Room for so many slots beside slot 0; ``pieces``: first output and number of outputs of each."""
        rank = power_of_two(rank, LEAST_RANK)
        outputs = max(first + count for first, count in pieces)
        tiles = [
            (begin, min(begin + tile.outputs, first + count), piece)
            for piece, (first, count) in enumerate(pieces)
            for begin in range(first, first + count, tile.outputs)
        ]
        return cls(
            torch.zeros(slots + 1, len(pieces) * rank, inputs, dtype=dtype, device=device),
            torch.zeros(slots + 1, outputs, rank, dtype=dtype, device=device),
            torch.tensor(tiles, dtype=torch.int32, device=device),
        )

    def load(self, slot: int, piece: int, first: int, down: Tensor, up: Tensor) -> None:
        """Write one piece of a slot, in the queue in which steps are launched: nothing is allocated on the device where
        the factors lie there or in page-locked memory.

        Args:
            slot: from 1.
            piece: which.
            first: its first output.
            down: ``(rank, inputs)``.
            up: ``(outputs of the piece, rank)``, with the scale.
        """
        assert slot != NO_SLOT, "slot 0 is that of rows without an adapter"
        own, count = len(down), len(up)
        room = self.down[slot, piece * self.rank : (piece + 1) * self.rank]
        room[own:].zero_()
        room[:own].copy_(down, non_blocking=True)
        room = self.up[slot, first : first + count]
        room[:, own:].zero_()
        room[:, :own].copy_(up, non_blocking=True)


@dataclass(frozen=True, slots=True)
class _Form:
    """Facts that are fixed when a kernel is compiled."""

    inputs: int
    outputs: int
    rank: int
    ranks: int
    """Those of all pieces together."""
    depth: int
    share: int
    parts: int
    wide: int
    walkers: int


@triton.jit(do_not_specialize=("rows",))
def _group(slot_of: tl.tensor, out: Groups, rows: tl.tensor, ROOM: tl.constexpr) -> None:
    """One program: a row's group follows from the rows before it that have its slot."""
    row = tl.arange(0, ROOM)
    lane = tl.arange(0, GROUP_ROWS)
    slot = tl.load(slot_of + row, mask=row < rows, other=0)
    tl.store(
        out.rows + row[:, None] * GROUP_ROWS + lane[None, :],
        tl.full([ROOM, GROUP_ROWS], -1, tl.int32),
        mask=(row < rows)[:, None],
    )
    tl.debug_barrier()
    # The same numbers along the other axis: by a second read, for no thread has both.
    other = tl.load(slot_of + row, mask=row < rows, other=0)
    alike = slot[:, None] == other[None, :]
    earlier = row[None, :] < row[:, None]
    before = tl.sum((alike & earlier).to(tl.int32), 1)
    leads = (before % GROUP_ROWS == 0) & (slot > 0)
    # Of each row: groups that begin before it, counted over the leaders.
    began = tl.cumsum(leads.to(tl.int32), 0)
    tl.store(out.slots + began - 1, slot, mask=leads)
    # A row's leader is the one of its slot with as many whole groups before it; the same along the other axis.
    before_other = tl.sum((alike & (row[:, None] < row[None, :])).to(tl.int32), 0)
    leads_other = (before_other % GROUP_ROWS == 0) & (other > 0)
    began_other = tl.cumsum(leads_other.to(tl.int32), 0)
    first = before // GROUP_ROWS * GROUP_ROWS
    leader = alike & (before_other[None, :] == first[:, None]) & leads_other[None, :]
    number = tl.sum(tl.where(leader, began_other[None, :] - 1, 0), 1)
    tl.store(out.rows + number * GROUP_ROWS + before % GROUP_ROWS, row, mask=(slot > 0) & (row < rows))
    tl.store(out.number, tl.sum(leads.to(tl.int32), 0))


@triton.jit
def _shrink(
    x: tl.tensor, x_row: tl.tensor, groups: Groups, given: SlotFactors, sums: tl.tensor, FORM: tl.constexpr
) -> None:
    """Inputs of a group to the rank, a share of them: float32 ``(parts, groups, GROUP_ROWS, ranks)``."""
    RANK: tl.constexpr = FORM.rank
    group = tl.program_id(0)
    if group < tl.load(groups.number):
        part = tl.program_id(1)
        first = tl.program_id(2) * FORM.rank
        slot = tl.load(groups.slots + group).to(tl.int64)
        lane = tl.arange(0, GROUP_ROWS)
        rank = first + tl.arange(0, FORM.rank)
        depth = tl.arange(0, FORM.depth)
        row = tl.load(groups.rows + group * GROUP_ROWS + lane)
        inputs = x + row.to(tl.int64)[:, None] * x_row
        lines = given.down + (slot * FORM.ranks + rank)[:, None] * FORM.inputs
        total = tl.zeros([GROUP_ROWS, RANK], tl.float32)
        for start in range(0, FORM.share, FORM.depth):
            place = part * FORM.share + start + depth
            live = (place < FORM.inputs)[None, :]
            value = tl.load(inputs + place[None, :], mask=live & (row >= 0)[:, None], other=0.0)
            total = dot(value, tl.trans(tl.load(lines + place[None, :], mask=live, other=0.0)), total)
        most = tl.num_programs(0)
        target = sums + ((part * most + group) * GROUP_ROWS + lane)[:, None] * FORM.ranks + rank[None, :]
        tl.store(target, total)


@triton.jit(do_not_specialize=("most",))
def _expand(
    groups: Groups, given: SlotFactors, sums: tl.tensor, out: tl.tensor, most: tl.tensor, FORM: tl.constexpr
) -> None:
    """The rank to a tile of outputs, added to them, for some of the groups."""
    RANK: tl.constexpr = FORM.rank
    WIDE: tl.constexpr = FORM.wide
    PARTS: tl.constexpr = FORM.parts
    tile = tl.program_id(0)
    count = tl.load(groups.number)
    begin = tl.load(given.tiles + 3 * tile)
    end = tl.load(given.tiles + 3 * tile + 1)
    first = tl.load(given.tiles + 3 * tile + 2) * FORM.rank
    lane = tl.arange(0, GROUP_ROWS)
    rank = tl.arange(0, FORM.rank)
    number = begin + tl.arange(0, FORM.wide)
    exists = number < end
    for group in range(tl.program_id(1), count, FORM.walkers):
        slot = tl.load(groups.slots + group).to(tl.int64)
        row = tl.load(groups.rows + group * GROUP_ROWS + lane)
        lines = given.up + (slot * FORM.outputs + number)[:, None] * FORM.rank + rank[None, :]
        weight = tl.load(lines, mask=exists[:, None], other=0.0)
        inner = tl.zeros([GROUP_ROWS, RANK], tl.float32)
        for part in tl.static_range(PARTS):
            place = ((part * most + group) * GROUP_ROWS + lane)[:, None] * FORM.ranks + first + rank[None, :]
            inner += tl.load(sums + place)
        total = tl.zeros([GROUP_ROWS, WIDE], tl.float32)
        total = dot(narrow(inner, weight.dtype), tl.trans(weight), total)
        address = out + row.to(tl.int64)[:, None] * FORM.outputs + number[None, :]
        live = (row >= 0)[:, None] & exists[None, :]
        before = tl.load(address, mask=live, other=0.0).to(tl.float32)
        tl.store(address, narrow(before + total, out.dtype.element_ty), mask=live)


def group_rows(slots: Tensor, out: Groups) -> None:
    """Put the rows of a step together, once for all maps.

    Args:
        slots: int32 ``(rows,)``: each row's slot, ``NO_SLOT`` for none; ``MOST_ROWS`` at the most.
        out: with room for as many rows.
    """
    rows = len(slots)
    assert rows <= MOST_ROWS, "all pairs of rows are compared at once"
    room = power_of_two(rows, 16)
    _group[(1,)](slots, out, rows, ROOM=room, num_warps=max(4, room // 16))


def sums_needed(given: SlotFactors, rows: int, tile: AdapterTile) -> int:
    """float32 numbers between the two launches."""
    parts = ceil_div(given.down.shape[2], tile.share)
    return parts * rows * int(GROUP_ROWS.value) * given.down.shape[1]


def shrink(x: Tensor, groups: Groups, given: SlotFactors, sums: Tensor, tile: AdapterTile) -> None:
    """Inputs ``(rows, inputs)`` to the rank. It does not need the map's result, so it may run beside the map."""
    form = _form(given, tile)
    grid = (len(x), form.parts, form.ranks // form.rank)
    _shrink[grid](x, x.stride(0), groups, given, sums, FORM=form, **tile.launch.options)


def expand(groups: Groups, given: SlotFactors, sums: Tensor, out: Tensor, tile: AdapterTile) -> None:
    """The rank to the outputs, added to ``out`` ``(rows, outputs)``, contiguous, the map's result."""
    form = _form(given, tile)
    grid = (len(given.tiles), min(tile.walkers, len(out)))
    _expand[grid](groups, given, sums, out, len(out), FORM=form, **tile.launch.options)


def _form(given: SlotFactors, tile: AdapterTile) -> _Form:
    _, ranks, inputs = given.down.shape
    return _Form(
        inputs=inputs,
        outputs=given.up.shape[1],
        rank=given.rank,
        ranks=ranks,
        depth=tile.depth,
        share=tile.share,
        parts=ceil_div(inputs, tile.share),
        wide=tile.outputs,
        walkers=tile.walkers,
    )
