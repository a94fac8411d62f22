"""Block tables of all rows in one array, and what is computed from them.

``tables[row, i]`` is the block that holds the row's tokens ``i * block_size .. (i + 1) * block_size``. A *slot* is the
place of one token in the cache: ``block * stride + position % block_size``, where ``stride`` is the block size unless
a block holds rows of several layers. Entries past a row's blocks are the null block, so a table can be read too far
without harm. Blocks behind a window may be somebody else's by now: ``engine.grouping`` reads none of them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.kv.layout import NULL_BLOCK

Ints = NDArray[np.int64]


class BlockTables:
    """Tables of ``max_num_seqs`` rows, int64, on the host."""

    def __init__(self, max_num_seqs: int, max_context: int, block_size: int, stride: int | None = None) -> None:
        self.block_size = block_size
        self._stride = block_size if stride is None else stride
        width = -(-max_context // block_size)
        self.tables: Ints = np.full((max_num_seqs, width), NULL_BLOCK, dtype=np.int64)

    def assign(self, row: int, blocks: tuple[int, ...]) -> None:
        """Replace a row's table."""
        self.tables[row] = NULL_BLOCK
        self.tables[row, : len(blocks)] = blocks

    def grow(self, rows: list[int], indices: list[int], blocks: list[int]) -> None:
        """Set ``tables[rows[i], indices[i]] = blocks[i]``."""
        if rows:
            self.tables[rows, indices] = blocks

    def slots(self, rows: Ints, positions: Ints) -> Ints:
        """Slots of one token a row."""
        size = self.block_size
        slots: Ints = self.tables[rows, positions // size] * self._stride + positions % size
        return slots

    def chunk_slots(self, row: int, start: int, length: int) -> Ints:
        """Slots of the positions ``start .. start + length`` of one row."""
        positions = np.arange(start, start + length)
        size = self.block_size
        slots: Ints = self.tables[row, positions // size] * self._stride + positions % size
        return slots

    def rectangle(self, rows: Ints, begins: Ints, num_blocks: int) -> Ints:
        """``num_blocks`` blocks of each row from its place ``begins`` on, flat, row after row."""
        places = begins[:, None] + np.arange(num_blocks)
        inside = places < self.tables.shape[1]
        blocks = self.tables[rows[:, None], np.where(inside, places, 0)]
        return np.where(inside, blocks, NULL_BLOCK).reshape(-1)
