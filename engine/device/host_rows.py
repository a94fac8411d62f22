"""What the host knows of the rows on a device, and what it has to tell the device about them.

The device may be ahead: of a decoding row it may have computed tokens that no plan has asked for yet. The host keeps
both counts apart: ``position``, tokens computed as far as plans go, and ``ahead``, what the device will have computed
when all that was started is over. Where they are the same the device needs no word about the row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from engine.device.rows import Deltas, Numbers
from engine.device.storage import DeviceStorage
from engine.device.tables import Tables
from engine.kv.layout import FULL
from engine.kv.tags import NO_STAMP
from engine.penalties import WIDEST as WIDEST_PENALTY
from engine.sampler import WIDEST
from engine.scheduler.limits import SchedulerLimits
from engine.scheduler.plan import Admission, StepPlan
from isolation.ipc.messages import Sampling

Ints = NDArray[np.int64]

DEVICE_STOPS = 16
"""Stop ids of a row that the device compares; one of more is noticed by the scheduler, a step later."""

UNKNOWN = -1
"""In ``ahead``: the device has to be told where the row is."""


def spare_stamps(spares: Ints) -> Ints:
    """The stamps of spare blocks by their numbers: below all that a pool gives."""
    return -2 - spares


def numbers_of(sampling: Sampling, logprobs: int, vocab_size: int) -> Numbers:
    """What the device computes with: in the bounds that ``engine.sampler`` and ``engine.penalties`` keep."""
    return Numbers(
        temperature=min(sampling.temperature, WIDEST),
        top_k=sampling.top_k if sampling.top_k < vocab_size else 0,
        top_p=sampling.top_p,
        log_min_p=math.log(sampling.min_p) if sampling.min_p else -math.inf,
        seed=sampling.seed,
        repetition=min(max(sampling.repetition_penalty, 1 / WIDEST_PENALTY), WIDEST_PENALTY),
        presence=min(max(sampling.presence_penalty, -WIDEST_PENALTY), WIDEST_PENALTY),
        frequency=min(max(sampling.frequency_penalty, -WIDEST_PENALTY), WIDEST_PENALTY),
        logprobs=logprobs,
    )


class HostRows:
    """Rows ``0 .. max_num_seqs``."""

    def __init__(self, limits: SchedulerLimits, storage: DeviceStorage, deltas: Deltas, tables: Tables) -> None:
        rows = limits.max_num_seqs
        self._storage = storage
        self._deltas = deltas
        self._vocab_size = limits.vocab_size
        self._max_context = limits.max_context
        self._tables = tables
        self._keeps_all = tables.groups[0].reach == FULL
        self._sizes: Ints = np.array([group.block_size for group in tables.groups], dtype=np.int64)
        self._moves: list[tuple[int, Ints]] = []
        self.known: list[Ints] = [np.zeros(0, dtype=np.int64)] * rows
        self.position: Ints = np.zeros(rows, dtype=np.int64)
        self.last: Ints = np.zeros(rows, dtype=np.int64)
        self.ahead: Ints = np.full(rows, UNKNOWN, dtype=np.int64)
        self.limit: Ints = np.zeros(rows, dtype=np.int64)
        self.asked: Ints = np.full(rows, -1, dtype=np.int64)
        """Alternatives whose log-probabilities a row wants beside its tokens'; -1: none at all."""
        self.guided = np.zeros(rows, dtype=np.bool_)
        """Rows that choose under masks: each token of theirs waits for one, so nobody runs ahead of them."""
        self.any_asked = self.any_guided = False
        """Whether some row does, so that a step where none does looks at no row for it."""

    def forget(self, rows: list[int]) -> None:
        """Overwrite the tokens of these rows."""
        for row in rows:
            self.known[row].fill(0)
            self.known[row] = np.zeros(0, dtype=np.int64)
            self.asked[row], self.guided[row] = -1, False
        self.any_asked, self.any_guided = bool((self.asked >= 0).any()), bool(self.guided.any())

    def admit(self, admission: Admission) -> None:
        """A request takes a row."""
        row, sampling = admission.row, admission.sampling
        self.known[row] = np.array(admission.token_ids, dtype=np.int64)
        self.position[row], self.ahead[row] = 0, UNKNOWN
        self.asked[row], self.guided[row] = admission.logprobs, False
        self.any_asked |= admission.logprobs >= 0
        limit = self.limit[row] = admission.limit or self._max_context
        numbers = numbers_of(sampling, admission.logprobs, self._vocab_size)
        self._deltas.admit(row, limit, sorted(admission.stop_ids)[:DEVICE_STOPS], numbers)
        given, expected = admission.local, admission.local_stamps
        if self._keeps_all:
            given, expected = (admission.blocks, *given), (admission.stamps, *expected)
        for table in range(len(self._tables.groups)):
            blocks: Ints = np.array(given[table] if table < len(given) else (), dtype=np.int64)
            stamps = (expected[table] if table < len(expected) else ()) or (NO_STAMP,) * len(blocks)
            where = np.full(len(blocks), row), np.full(len(blocks), table), np.arange(len(blocks))
            self._put(*where, blocks, np.array(stamps, dtype=np.int64))
            self._put_spares(np.array([row]), np.array([table]), np.array([len(blocks)]))

    def guide(self, rows: Iterable[int]) -> None:
        """These rows choose under masks from now on."""
        for row in rows:
            if not self.guided[row]:
                self.guided[row] = self.any_guided = True
                self._deltas.guide(row)

    def clear(self) -> None:
        """No row has anybody: what the rows of a warm-up asked for is forgotten."""
        self.asked.fill(-1)
        self.guided.fill(False)
        self.any_asked = self.any_guided = False

    def grow(self, plan: StepPlan) -> None:
        """Rows' tables get the plan's blocks. What the device has written into spare ones meanwhile is to be moved."""
        rows, indices, blocks = np.array((plan.grown_rows, plan.grown_indices, plan.grown_blocks), dtype=np.int64)
        tables: Ints = np.array(plan.grown_tables or (0,) * len(rows), dtype=np.int64)
        stamps = plan.grown_stamps or (NO_STAMP,) * len(rows)
        # The spare ones first: if a row gets two blocks, the second takes the place of the first one's spare.
        self._put_spares(rows, tables, indices + 1)
        self._put(rows, tables, indices, blocks, np.array(stamps, dtype=np.int64))
        written = np.maximum(self.ahead[rows] - indices * self._sizes[tables], 0)
        spares = self._storage.spares(rows, tables)
        for table in range(len(self._sizes)) if written.any() else ():
            counts = np.where(tables == table, written, 0)
            ends = counts.cumsum()
            if ends[-1]:
                which = np.repeat(np.arange(len(rows)), counts)
                places = np.arange(len(which)) - (ends - counts)[which]
                self._moves.append((table, np.stack((spares[which], places, blocks[which], places))))

    def take_moves(self) -> list[tuple[int, Ints]]:
        """Tokens to be moved: the table, and ``(4, tokens)`` as ``DeviceStorage.move`` wants them."""
        moves, self._moves = self._moves, []
        return moves

    def resume(self, rows: Ints) -> None:
        """Tell the device where these decoding rows are, if it does not know."""
        for row in rows[self.ahead[rows] != self.position[rows]].tolist():
            self._deltas.resume(row, int(self.last[row]), int(self.position[row]))
        self.ahead[rows] = self.position[rows]

    def _put(self, rows: Ints, tables: Ints, indices: Ints, blocks: Ints, stamps: Ints) -> None:
        self._deltas.put(rows, self._tables.places(tables, indices), blocks, stamps)

    def _put_spares(self, rows: Ints, tables: Ints, indices: Ints) -> None:
        spares = self._storage.spares(rows, tables)
        self._put(rows, tables, indices, spares, spare_stamps(self._storage.numbers(spares)))
