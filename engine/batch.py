"""Turns a step plan into arrays and tensors: token ids, positions, slots, and (``engine.grouping``) what is attended.

``arrays`` is what every backend needs; ``build`` adds the rectangles that the plain attention gathers.

Rows live here between steps: block table, known tokens, number of computed tokens. A plan brings only what changed,
so a decode step costs a handful of array operations however long the sequences are. The stamps of all blocks
(``engine.kv.tags``) live here too, and are compared with what the rows expect (``foreign``).

Order of a step's tokens: decoding rows by falling length, so that rows of similar length are neighbours and can be
attended in one rectangle; then the prompt chunks as planned.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.grouping import Grouping, first_seen
from engine.kv.block_table import BlockTables
from engine.kv.layout import FULL
from engine.kv.storage import KvStorage
from engine.kv.tags import NO_STAMP, NOWHERE
from engine.model.attention import AttentionBatch
from engine.scheduler.limits import SchedulerLimits
from engine.scheduler.plan import NO_ROWS, Admission, Chunk, StepPlan

Ints = NDArray[np.int64]

_NOTHING: Ints = np.zeros(0, dtype=np.int64)
"""The tokens of a row without a request."""


@dataclass(frozen=True, slots=True)
class StepArrays:
    """The tokens of one step as flat, contiguous arrays of int64 on the host; valid until the next step is built."""

    token_ids: Ints
    positions: Ints
    slots: tuple[Ints, ...]
    """By each block table."""
    rows: Ints
    """For each token the row of ``tables`` that its sequence has."""
    tables: tuple[BlockTables, ...]
    """Of all rows; of the layout's first table the first."""
    stamps: Ints
    """Of all blocks, and ``NOWHERE`` behind the last."""
    wanted: Ints
    """For each of the plan's ``logit_lines`` the index of its token in the step."""
    num_decode: int
    """Leading tokens that decode, one a row."""

    @property
    def next_positions(self) -> Ints:
        """For each of the plan's ``logit_lines`` the position of the token to be chosen or scored."""
        return self.positions[self.wanted] + 1


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Inputs of one forward pass."""

    token_ids: Tensor
    positions: Tensor
    attention: AttentionBatch
    wanted: Tensor
    """For each of the plan's ``logit_lines`` the index of its token in the step."""
    next_positions: Ints
    """For each of the plan's ``logit_lines`` the position of the token to be chosen or scored."""


class BatchBuilder:
    """State of all rows, and the step's tensors made from it."""

    def __init__(self, limits: SchedulerLimits, storage: KvStorage) -> None:
        max_num_seqs, max_num_tokens = limits.max_num_seqs, limits.max_num_batched_tokens
        layout = storage.layout
        stride = layout.block_rows if len(layout.tables) > 1 else None
        self._tables = tuple(
            BlockTables(max_num_seqs, limits.max_context, group.block_size, stride) for group in layout.tables
        )
        self._reaches = [group.reach for group in layout.tables]
        self._keeps_all = layout.tables[0].reach == FULL
        self._keeps_only = self._reaches == [FULL]
        self.stamps: Ints = np.full(layout.num_blocks + 2, NO_STAMP, dtype=np.int64)
        self.stamps[-1] = NOWHERE
        self._grouping = Grouping(storage, self._tables)
        self._device = storage.device
        self._decode_list: list[int] = []
        self._decode_rows: Ints = np.zeros(0, dtype=np.int64)
        """Of that list."""
        self._decode_stamps: Ints | None = None
        """What they expect of their blocks; None: to be gathered."""
        self._known: list[Ints] = [_NOTHING] * max_num_seqs
        self._computed = np.zeros(max_num_seqs, dtype=np.int64)
        self._last = np.zeros(max_num_seqs, dtype=np.int64)
        self._token_ids = np.zeros(max_num_tokens, dtype=np.int64)
        self._num_filled = 0
        """Leading ones that hold tokens of the step."""
        self._positions = np.zeros(max_num_tokens, dtype=np.int64)
        self._slots = np.zeros(max_num_tokens, dtype=np.int64)
        self._rows = np.zeros(max_num_tokens, dtype=np.int64)

    def admit(self, admission: Admission) -> None:
        """A request takes a row."""
        row = admission.row
        self._decode_stamps = None
        given, expected = admission.local, admission.local_stamps
        if self._keeps_all:
            given, expected = (admission.blocks, *given), (admission.stamps, *expected)
        none: tuple[tuple[int, ...], ...] = ((),) * len(self._tables)
        for tables, blocks, stamps in zip(self._tables, (*given, *none), (*expected, *none), strict=False):
            tables.assign(row, blocks, stamps)
        self._known[row].fill(0)
        self._known[row] = np.array(admission.token_ids, dtype=np.int64)

    def forget(self, rows: list[int]) -> None:
        """Overwrite the tokens of these rows."""
        for row in rows:
            self._known[row].fill(0)
            self._known[row] = _NOTHING
        self._last[rows] = 0

    def grow(self, plan: StepPlan) -> None:
        """Take up the blocks that rows got."""
        if plan.grown_rows:
            self._decode_stamps = None
        expected = plan.grown_stamps or [NO_STAMP] * len(plan.grown_rows)
        if not plan.grown_tables:
            self._tables[0].grow(plan.grown_rows, plan.grown_indices, plan.grown_blocks, expected)
            return
        grown = np.array((plan.grown_tables, plan.grown_rows, plan.grown_indices, plan.grown_blocks, expected))
        for place, tables in enumerate(self._tables):
            _, rows, indices, blocks, stamps = grown[:, grown[0] == place].tolist()
            tables.grow(rows, indices, blocks, stamps)

    def stamp(self, blocks: list[int], stamps: list[int]) -> None:
        """The blocks are zero and their next holders'."""
        if stamps:
            self.stamps[blocks] = stamps

    def foreign(self, plan: StepPlan) -> frozenset[int]:
        """The rows whose tables name, where this step reads or writes, a block that does not exist or is not theirs."""
        chunks = plan.prefills
        rows = self._decoding(plan)
        if not chunks and self._keeps_only and self._agrees(rows):
            return NO_ROWS
        firsts = lasts = self._computed[rows]
        if chunks:
            rows = np.concatenate((rows, [chunk.row for chunk in chunks]))
            firsts = np.concatenate((firsts, [chunk.start for chunk in chunks]))
            lasts = np.concatenate((lasts, [chunk.start + chunk.length - 1 for chunk in chunks]))
        found = NO_ROWS
        for reach, tables in zip(self._reaches, self._tables, strict=True):
            size = tables.block_size
            begins = None if reach == FULL else first_seen(reach, firsts) // size
            wrong = tables.mismatched(self.stamps, rows, begins, lasts // size + 1)
            if wrong is not None:
                found |= frozenset(rows[wrong].tolist())
        return found

    def arrays(self, plan: StepPlan, *, by_length: bool = False) -> StepArrays:
        """The tokens of a plan that computes at least one; its admissions and what grew were taken already.

        Args:
            by_length: put decoding rows in the order of falling length instead of the plan's.
        """
        rows = self._decoding(plan)
        place = len(rows)
        wanted = np.arange(place)
        if by_length:
            order = np.argsort(-self._computed[rows], kind="stable")
            rows = rows[order]
            wanted[order] = np.arange(place)
        computed = self._computed[rows]
        self._token_ids[:place] = self._last[rows]
        self._positions[:place] = computed
        self._slots[:place] = self._tables[0].slots(rows, computed)
        self._rows[:place] = rows
        ends: list[int] = []
        scored: list[int] = []
        for chunk in plan.prefills:
            self._put_chunk(chunk, place)
            if chunk.num_scored:
                begin = place + chunk.score_from - 1 - chunk.start
                scored += range(begin, begin + chunk.num_scored)
            place += chunk.length
            if chunk.last:
                ends.append(place - 1)
        if ends or scored:
            wanted = np.concatenate((wanted, np.array(ends + scored, dtype=np.int64)))
        self._num_filled = max(self._num_filled, place)
        further = [tables.slots(self._rows[:place], self._positions[:place]) for tables in self._tables[1:]]
        return StepArrays(
            token_ids=self._token_ids[:place],
            positions=self._positions[:place],
            slots=(self._slots[:place], *further),
            rows=self._rows[:place],
            tables=self._tables,
            stamps=self.stamps,
            wanted=wanted,
            num_decode=len(rows),
        )

    def scored_tokens(self, chunk: Chunk) -> Ints:
        """The prompt's tokens that a chunk scores."""
        return self._known[chunk.row][chunk.score_from : chunk.score_from + chunk.num_scored]

    def build(self, plan: StepPlan) -> StepBatch:
        """The inputs of the plain path for a plan that computes at least one token."""
        arrays = self.arrays(plan, by_length=True)
        rows = arrays.rows[: arrays.num_decode]
        attention = self._grouping.batch(arrays.slots, rows, self._computed[rows] + 1, plan.prefills)
        return StepBatch(
            token_ids=self._tensor(arrays.token_ids),
            positions=self._tensor(arrays.positions),
            attention=attention,
            wanted=self._tensor(arrays.wanted),
            next_positions=arrays.next_positions,
        )

    def advance(self, plan: StepPlan, token_ids: list[int]) -> None:
        """Note what a plan computed and which tokens were sampled (one for each of its ``sample_rows``)."""
        self._computed[plan.decode_rows] += 1
        for chunk in plan.prefills:
            self._computed[chunk.row] = chunk.start + chunk.length
        self._last[plan.sample_rows] = token_ids
        self._token_ids[: self._num_filled] = 0
        self._num_filled = 0

    def _agrees(self, rows: Ints) -> bool:
        """Whether all blocks of decoding rows are theirs. What they expect stays the same until one of them grows, so
        it is gathered once; what lies in their tables, and the stamps, are looked at in every step."""
        tables = self._tables[0]
        if self._decode_stamps is None:
            width = int(self._computed[rows].max()) // tables.block_size + 1
            self._decode_stamps = tables.expected[:, :width][rows]
        return tables.agrees(self.stamps, rows, self._decode_stamps)

    def _decoding(self, plan: StepPlan) -> Ints:
        """The plan's decoding rows; the scheduler keeps the list as long as they are the same."""
        if plan.decode_rows is not self._decode_list:
            self._decode_stamps = None
            self._decode_list = plan.decode_rows
            self._decode_rows = np.array(plan.decode_rows, dtype=np.int64)
        return self._decode_rows

    def _put_chunk(self, chunk: Chunk, place: int) -> None:
        end = chunk.start + chunk.length
        part = slice(place, place + chunk.length)
        self._token_ids[part] = self._known[chunk.row][chunk.start : end]
        self._positions[part] = np.arange(chunk.start, end)
        self._slots[part] = self._tables[0].chunk_slots(chunk.row, chunk.start, chunk.length)
        self._rows[part] = chunk.row

    def _tensor(self, values: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values).to(self._device)
