"""Row intake: how a plan's admissions, grown tables and zeroed blocks enter the rows of any backend.

``RowIntake`` keeps the state that every backend has of a row (tokens, tokens computed, last token, adapter) and reads
the plan's fields once, in one order. A ``RowStore`` keeps block tables, stamps and blocks: on the host
(``engine.backends.common.batch``) or on a device (``engine.backends.cuda.runtime.host_rows``).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.core.kv.layout import FULL, KvLayout
from engine.core.kv.tags import NO_STAMP
from engine.core.scheduler.plan import Admission, StepPlan
from engine.errors import AdapterError

Ints = NDArray[np.int64]

TableRows = tuple[tuple[int, ...], ...]
"""Blocks, or stamps, of one row: one entry for each block table of the layout."""

NO_TOKENS: Ints = np.zeros(0, dtype=np.int64)
"""Tokens of a row without a request."""


class RowStore(Protocol):
    """Block tables, stamps and blocks of a backend's rows."""

    def assign(self, admission: Admission, blocks: TableRows, stamps: TableRows) -> None:
        """Replace all block tables of the admitted row. A table without stamps expects ``NO_STAMP`` of each block."""

    def extend(
        self, rows: list[int], tables: list[int], indices: list[int], blocks: list[int], stamps: list[int]
    ) -> None:
        """Append one block to a table of each row; ``tables`` is empty when the layout has only one."""

    def renew(self, blocks: list[int], stamps: list[int]) -> None:
        """Zero the blocks and give them the stamps of their next holders. Called last, for every plan."""


class RowIntake:
    """State that every backend keeps of rows ``0 .. max_num_seqs - 1``."""

    def __init__(self, max_num_seqs: int, layout: KvLayout, store: RowStore, *, adapters: bool = False) -> None:
        """``adapters``: whether the backend computes rows that have an adapter."""
        self._store = store
        self._num_tables = len(layout.tables)
        self._keeps_all = layout.tables[0].reach == FULL
        self._takes_adapters = adapters
        self.known: list[Ints] = [NO_TOKENS] * max_num_seqs
        """Tokens of each row at its admission."""
        self.computed: Ints = np.zeros(max_num_seqs, dtype=np.int64)
        """Tokens of each row that plans have computed."""
        self.last: Ints = np.zeros(max_num_seqs, dtype=np.int64)
        """Token of each row that was sampled last."""
        self.adapter: Ints = np.zeros(max_num_seqs, dtype=np.int64)
        """Adapter of each row, 0 for none."""
        self.any_adapter = False
        """Whether some row has one."""
        self.exact: set[int] = set()
        """Rows of the deterministic class."""

    def take(self, plan: StepPlan) -> None:
        """Take a plan's admissions, grown tables and zeroed blocks.

        Raises:
            AdapterError: a request has an adapter, and the backend computes none.
        """
        for admission in plan.admissions:
            self.admit(admission)
        if plan.grown_rows:
            stamps = plan.grown_stamps or [NO_STAMP] * len(plan.grown_rows)
            self._store.extend(plan.grown_rows, plan.grown_tables, plan.grown_indices, plan.grown_blocks, stamps)
        self._store.renew(plan.zero_blocks, plan.zero_stamps)

    def admit(self, admission: Admission) -> None:
        """Give a request its row."""
        row = admission.row
        if admission.adapter and not self._takes_adapters:
            raise AdapterError(admission.adapter)
        if self.adapter[row] != admission.adapter:
            self.adapter[row] = admission.adapter
            self.any_adapter = bool(self.adapter.any())
        self.known[row].fill(0)
        self.known[row] = np.array(admission.token_ids, dtype=np.int64)
        self.computed[row] = 0
        if admission.deterministic:
            self.exact.add(row)
        else:
            self.exact.discard(row)
        blocks, stamps = admission.local, admission.local_stamps
        if self._keeps_all:
            blocks, stamps = (admission.blocks, *blocks), (admission.stamps, *stamps)
        self._store.assign(admission, self._padded(blocks), self._padded(stamps))

    def forget(self, rows: list[int]) -> None:
        """Overwrite the tokens of these rows."""
        for row in rows:
            self.known[row].fill(0)
            self.known[row] = NO_TOKENS
        self.last[rows] = 0

    def _padded(self, given: TableRows) -> TableRows:
        """One entry for each table: a warm-up's admissions and old plans name fewer."""
        missing = self._num_tables - len(given)
        return given if missing <= 0 else (*given, *((),) * missing)
