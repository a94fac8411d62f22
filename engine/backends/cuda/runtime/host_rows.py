"""The host's copy of the rows on a device, and the changes that the device has to be told.

The device may be ahead: for a decoding row it may have computed tokens that no plan has asked for yet. The host keeps
both counts apart: ``position``, tokens computed as far as plans go, and ``ahead``, tokens that the device will have
computed when all started work is over. Where they are equal the device needs no message about the row.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from engine.backends.common.intake import RowIntake, TableRows
from engine.backends.common.sampler import bounded
from engine.backends.cuda.runtime.rows import Deltas
from engine.backends.cuda.runtime.storage import DeviceStorage
from engine.backends.cuda.runtime.tables import Tables
from engine.core.kv.tags import NO_STAMP
from engine.core.scheduler.limits import SchedulerLimits
from engine.core.scheduler.plan import Admission

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

    def __init__(
        self, limits: SchedulerLimits, storage: DeviceStorage, deltas: Deltas, tables: Tables, *, adapters: bool = False
    ) -> None:
        rows = limits.max_num_seqs
        self._storage = storage
        self._deltas = deltas
        self._vocab_size = limits.vocab_size
        self._max_context = limits.max_context
        self._tables = tables
        sizes = [group.block_size for group in tables.groups]
        self._shapes = list(zip(tables.firsts, tables.widths, sizes, strict=True))
        """First entry in a row, number of entries, and tokens of a block, for each table."""
        self._moves: list[tuple[list[int], list[int]]] = [([], []) for _ in tables.groups]
        self.intake = RowIntake(rows, storage.layout, self, adapters=adapters)
        self.known, self.position, self.last = self.intake.known, self.intake.computed, self.intake.last
        self.renewed: tuple[list[int], list[int]] = ([], [])
        """Blocks that the last plan zeroes, and their stamps: written together with other blocks."""
        self.ahead: Ints = np.full(rows, UNKNOWN, dtype=np.int64)
        self.limit: Ints = np.zeros(rows, dtype=np.int64)
        self.asked: Ints = np.full(rows, -1, dtype=np.int64)
        """Number of alternatives reported beside a row's tokens; -1: no log-probabilities at all."""
        self.guided = np.zeros(rows, dtype=np.bool_)
        """Rows that choose under masks: each token of theirs waits for one, so nobody runs ahead of them."""
        self.any_asked = self.any_guided = False
        """Whether some row does, so that a step where none does looks at no row for it."""

    def forget(self, rows: list[int]) -> None:
        """Overwrite the tokens of these rows."""
        self.intake.forget(rows)
        self.asked[rows], self.guided[rows] = -1, False
        self.any_asked, self.any_guided = bool((self.asked >= 0).any()), bool(self.guided.any())

    def assign(self, admission: Admission, blocks: TableRows, stamps: TableRows) -> None:
        """Tell the device about an admitted row and its block tables; see ``RowStore``."""
        row = admission.row
        self.ahead[row] = UNKNOWN
        self.asked[row], self.guided[row] = admission.logprobs, False
        self.any_asked |= admission.logprobs >= 0
        limit = self.limit[row] = admission.limit or self._max_context
        numbers = bounded(admission.sampling, self._vocab_size)
        biases = len(admission.logit_bias) if admission.logit_bias is not None else 0
        self._deltas.admit(row, limit, sorted(admission.stop_ids)[:DEVICE_STOPS], numbers, admission.logprobs, biases)
        for table, (given, expected) in enumerate(zip(blocks, stamps, strict=True)):
            self._tables.place(table, len(given))
            spare = self._storage.spare(row, table)
            self._deltas.put(
                row,
                self._tables.place(table, 0),
                (*given, spare),
                (*(expected or (NO_STAMP,) * len(given)), spare_stamp(self._storage.number(spare))),
            )

    def guide(self, rows: Iterable[int]) -> None:
        """These rows choose under masks from now on."""
        for row in rows:
            if not self.guided[row]:
                self.guided[row] = self.any_guided = True
                self._deltas.guide(row)

    def clear(self) -> None:
        """Forget what the rows of a warm-up asked for; no row has a request."""
        self.asked.fill(-1)
        self.guided.fill(False)
        self.any_asked = self.any_guided = False

    def extend(
        self, rows: list[int], tables: list[int], indices: list[int], blocks: list[int], stamps: list[int]
    ) -> None:
        """Append blocks to rows' tables; see ``RowStore``. Tokens that the device has written into spare blocks
        meanwhile are to be moved (``take_moves``)."""
        # In plain Python: a step has a dozen, and numpy takes longer for the call than this for all of them.
        storage, deltas = self._storage, self._deltas
        grown = zip(rows, tables or (0,) * len(rows), indices, blocks, stamps, strict=True)
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

    def renew(self, blocks: list[int], stamps: list[int]) -> None:
        """Note the blocks that a plan zeroes; see ``RowStore``."""
        self.renewed = blocks, stamps

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
