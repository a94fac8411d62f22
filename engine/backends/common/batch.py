"""Rows of a host backend, and the arrays of a step made from them: token ids, positions, slots, block tables.

Rows live here between steps (``engine.backends.common.intake``): block tables, known tokens, computed tokens. A plan
brings only what changed, so a decode step costs a few array operations however long the sequences are. The stamps of
all blocks (``engine.core.kv.tags``) live here too, and are compared with those that the rows expect (``foreign``).

Order of a step's tokens: decoding rows, as planned or by falling length, so that rows of similar length are neighbours;
then the prompt chunks as planned.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.backends.common.block_table import BlockTables, first_seen
from engine.backends.common.intake import Ints, RowIntake, TableRows
from engine.backends.common.storage import KvStorage
from engine.core.kv.layout import FULL
from engine.core.kv.tags import NO_STAMP, NOWHERE
from engine.core.scheduler.limits import SchedulerLimits
from engine.core.scheduler.plan import NO_ROWS, Admission, Chunk, StepPlan

_NO_ADAPTERS: Ints = np.zeros(0, dtype=np.int64)


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
    """Tables of all rows, in the order of the layout's tables."""
    stamps: Ints
    """Stamps of all blocks, and ``NOWHERE`` behind the last."""
    wanted: Ints
    """For each of the plan's ``logit_lines`` the index of its token in the step."""
    num_decode: int
    """Leading tokens that decode, one a row."""
    adapters: Ints
    """Adapter of each token, 0 for none; empty when no row has one."""

    @property
    def next_positions(self) -> Ints:
        """For each of the plan's ``logit_lines`` the position of the token to be chosen or scored."""
        return self.positions[self.wanted] + 1


class BatchBuilder:
    """Rows of a host backend: their intake and tables, and the arrays of each step."""

    def __init__(self, limits: SchedulerLimits, storage: KvStorage, *, adapters: bool = False) -> None:
        """``adapters``: whether the backend computes rows that have an adapter."""
        max_num_seqs, max_num_tokens = limits.max_num_seqs, limits.max_num_batched_tokens
        layout = storage.layout
        stride = layout.block_rows if len(layout.tables) > 1 else None
        self._storage = storage
        self.intake = RowIntake(max_num_seqs, layout, self, adapters=adapters)
        self._known, self._computed, self._last = self.intake.known, self.intake.computed, self.intake.last
        self._tables = tuple(
            BlockTables(max_num_seqs, limits.max_context, group.block_size, stride) for group in layout.tables
        )
        self._reaches = [group.reach for group in layout.tables]
        self._keeps_only = self._reaches == [FULL]
        self.stamps: Ints = np.full(layout.num_blocks + 2, NO_STAMP, dtype=np.int64)
        self.stamps[-1] = NOWHERE
        self._decode_list: list[int] = []
        self._decode_rows: Ints = np.zeros(0, dtype=np.int64)
        """Rows of ``_decode_list``."""
        self._decode_stamps: Ints | None = None
        """Stamps that those rows expect of their blocks; None: to be gathered."""
        self._token_ids = np.zeros(max_num_tokens, dtype=np.int64)
        self._num_filled = 0
        """Leading entries of ``_token_ids`` that hold tokens of the step."""
        self._positions = np.zeros(max_num_tokens, dtype=np.int64)
        self._slots = np.zeros(max_num_tokens, dtype=np.int64)
        self._rows = np.zeros(max_num_tokens, dtype=np.int64)

    @property
    def tables(self) -> tuple[BlockTables, ...]:
        """Block tables of all rows, one for each table of the layout."""
        return self._tables

    def assign(self, admission: Admission, blocks: TableRows, stamps: TableRows) -> None:
        """Replace the block tables of an admitted row; see ``RowStore``."""
        self._decode_stamps = None
        for tables, given, expected in zip(self._tables, blocks, stamps, strict=False):
            tables.assign(admission.row, given, expected)

    def extend(
        self, rows: list[int], tables: list[int], indices: list[int], blocks: list[int], stamps: list[int]
    ) -> None:
        """Append one block to a table of each row; see ``RowStore``."""
        self._decode_stamps = None
        if not tables:
            self._tables[0].grow(rows, indices, blocks, stamps)
            return
        grown = np.array((tables, rows, indices, blocks, stamps))
        for place, one in enumerate(self._tables):
            _, own, places, new, expected = grown[:, grown[0] == place].tolist()
            one.grow(own, places, new, expected)

    def renew(self, blocks: list[int], stamps: list[int]) -> None:
        """Zero the blocks and stamp them; see ``RowStore``."""
        if blocks:
            self._storage.zero(blocks)
            self.stamp(blocks, stamps)

    def stamp(self, blocks: list[int], stamps: list[int]) -> None:
        """Give blocks the stamps of their next holders; no stamps at all: none was given any."""
        if stamps:
            self.stamps[blocks] = stamps

    def foreign(self, plan: StepPlan) -> frozenset[int]:
        """Rows whose tables name, where this step reads or writes, a missing block or the block of another row."""
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
            adapters=self.intake.adapter[self._rows[:place]] if self.intake.any_adapter else _NO_ADAPTERS,
        )

    def scored_tokens(self, chunk: Chunk) -> Ints:
        """Tokens of the prompt that a chunk scores."""
        return self._known[chunk.row][chunk.score_from : chunk.score_from + chunk.num_scored]

    def advance(self, plan: StepPlan, token_ids: list[int]) -> None:
        """Note what a plan computed and which tokens were sampled (one for each of its ``sample_rows``)."""
        self._computed[plan.decode_rows] += 1
        for chunk in plan.prefills:
            self._computed[chunk.row] = chunk.start + chunk.length
        self._last[plan.sample_rows] = token_ids
        self._token_ids[: self._num_filled] = 0
        self._num_filled = 0

    def _agrees(self, rows: Ints) -> bool:
        """Whether all blocks of decoding rows are theirs. The stamps that rows expect are gathered once and kept until
        a row grows; tables and stamps of blocks are compared in every step."""
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
        positions = self._positions[part] = np.arange(chunk.start, end)
        self._slots[part] = self._tables[0].slots(chunk.row, positions)
        self._rows[part] = chunk.row
