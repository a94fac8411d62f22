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


def spare_stamp(spare: int) -> int:
    """The stamp of a spare block by its number: below all that a pool gives."""
    return -2 - spare


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
        sizes = [group.block_size for group in tables.groups]
        self._shapes = list(zip(tables.firsts, tables.widths, sizes, strict=True))
        """Of each table its first entry in a row, its entries, and tokens of a block."""
        self._moves: list[tuple[list[int], list[int]]] = [([], []) for _ in tables.groups]
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
            blocks = given[table] if table < len(given) else ()
            self._tables.place(table, len(blocks))
            stamps = (expected[table] if table < len(expected) else ()) or (NO_STAMP,) * len(blocks)
            spare = self._storage.spare(row, table)
            self._deltas.put(
                row, self._tables.place(table, 0), (*blocks, spare), (*stamps, spare_stamp(self._storage.number(spare)))
            )

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
        # In plain Python: a step has a dozen, and numpy takes longer for the call than this for all of them.
        count, storage, deltas = len(plan.grown_rows), self._storage, self._deltas
        stamps, numbers = plan.grown_stamps or (NO_STAMP,) * count, plan.grown_tables or (0,) * count
        grown = zip(plan.grown_rows, numbers, plan.grown_indices, plan.grown_blocks, stamps, strict=True)
        for row, table, index, block, stamp in grown:
            first, width, size = self._shapes[table]
            if index + 1 >= width:
                self._tables.place(table, index + 1)
            spare = storage.spare(row, table)
            deltas.extend(row, first + index, (block, stamp), (spare, spare_stamp(storage.number(spare))))
            written = int(self.ahead[row]) - index * size
            if written > 0:
                sources, targets = self._moves[table]
                sources += range(spare * storage.stride, spare * storage.stride + written)
                targets += range(block * storage.stride, block * storage.stride + written)

    def take_moves(self) -> list[tuple[Ints, Ints]]:
        """Tokens to be moved: slots that are read and slots that are written, of all layers, by table."""
        moves = []
        for table, pair in enumerate(self._moves):
            if pair[0]:
                sources, targets = (self._storage.in_all_layers(table, np.array(slots)) for slots in pair)
                moves.append((sources, targets))
                for slots in pair:
                    slots.clear()
        return moves

    def resume(self, rows: Ints) -> None:
        """Tell the device where these decoding rows are, if it does not know."""
        for row in rows[self.ahead[rows] != self.position[rows]].tolist():
            self._deltas.resume(row, int(self.last[row]), int(self.position[row]))
        self.ahead[rows] = self.position[rows]
