"""What the host knows of the rows on a device, and what it has to tell the device about them.

The device may be ahead: of a decoding row it may have computed tokens that no plan has asked for yet. The host keeps
both counts apart: ``position``, tokens computed as far as plans go, and ``ahead``, what the device will have computed
when all that was started is over. Where they are the same the device needs no word about the row.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from engine.device.rows import Deltas, Numbers
from engine.device.storage import DeviceStorage
from engine.device.tables import Tables
from engine.kv.layout import FULL
from engine.kv.tags import NO_STAMP
from engine.sampler import WIDEST
from engine.scheduler.limits import SchedulerLimits
from engine.scheduler.plan import Admission

Ints = NDArray[np.int64]

DEVICE_STOPS = 16
"""Stop ids of a row that the device compares; one of more is noticed by the scheduler, a step later."""

UNKNOWN = -1
"""In ``ahead``: the device has to be told where the row is."""


def spare_stamp(spare: int) -> int:
    """The stamp of a spare block by its number: below all that a pool gives."""
    return -2 - spare


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
        self._moves: list[list[tuple[int, int, int, int]]] = [[] for _ in tables.groups]
        self.known: list[Ints] = [np.zeros(0, dtype=np.int64)] * rows
        self.position: Ints = np.zeros(rows, dtype=np.int64)
        self.last: Ints = np.zeros(rows, dtype=np.int64)
        self.ahead: Ints = np.full(rows, UNKNOWN, dtype=np.int64)
        self.limit: Ints = np.zeros(rows, dtype=np.int64)
        self.by_host = np.zeros(rows, dtype=np.bool_)
        """Rows whose tokens the host chooses: with penalties, or with log-probabilities to report."""

    def forget(self, rows: list[int]) -> None:
        """Overwrite the tokens of these rows."""
        for row in rows:
            self.known[row].fill(0)
            self.known[row] = np.zeros(0, dtype=np.int64)

    def admit(self, admission: Admission) -> None:
        """A request takes a row."""
        row, sampling = admission.row, admission.sampling
        self.known[row] = np.array(admission.token_ids, dtype=np.int64)
        self.position[row], self.ahead[row] = 0, UNKNOWN
        penalties = sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty
        self.by_host[row] = penalties != (1, 0, 0) or admission.logprobs >= 0
        numbers = Numbers(
            temperature=min(sampling.temperature, WIDEST),
            top_k=sampling.top_k if sampling.top_k < self._vocab_size else 0,
            top_p=sampling.top_p,
            log_min_p=math.log(sampling.min_p) if sampling.min_p else -math.inf,
            seed=sampling.seed,
        )
        limit = self.limit[row] = admission.limit or self._max_context
        self._deltas.admit(row, limit, sorted(admission.stop_ids)[:DEVICE_STOPS], numbers)
        given, expected = admission.local, admission.local_stamps
        if self._keeps_all:
            given, expected = (admission.blocks, *given), (admission.stamps, *expected)
        for table in range(len(self._tables.groups)):
            blocks = given[table] if table < len(given) else ()
            stamps = (expected[table] if table < len(expected) else ()) or (NO_STAMP,) * len(blocks)
            for index, (block, stamp) in enumerate(zip(blocks, stamps, strict=True)):
                self._deltas.put(row, self._tables.place(table, index), block, stamp)
            self._put_spare(row, table, len(blocks))

    def grow(self, row: int, table: int, index: int, block: int, stamp: int) -> None:
        """A row's table gets one more block. What the device has written into the spare one meanwhile is to be
        moved."""
        self._deltas.put(row, self._tables.place(table, index), block, stamp)
        self._put_spare(row, table, index + 1)
        spare = self._storage.spare(row, table)
        for place in range(int(self.ahead[row]) - index * self._tables.groups[table].block_size):
            self._moves[table].append((spare, place, block, place))

    def take_moves(self) -> list[tuple[int, Ints]]:
        """Tokens to be moved: the table, and ``(4, tokens)`` as ``DeviceStorage.move`` wants them."""
        moves = [(table, np.array(some, dtype=np.int64).T) for table, some in enumerate(self._moves) if some]
        for some in self._moves:
            some.clear()
        return moves

    def resume(self, rows: Ints) -> None:
        """Tell the device where these decoding rows are, if it does not know."""
        for row in rows[self.ahead[rows] != self.position[rows]].tolist():
            self._deltas.resume(row, int(self.last[row]), int(self.position[row]))
        self.ahead[rows] = self.position[rows]

    def _put_spare(self, row: int, table: int, index: int) -> None:
        spare = self._storage.spare(row, table)
        self._deltas.put(row, self._tables.place(table, index), spare, spare_stamp(self._storage.number(spare)))
