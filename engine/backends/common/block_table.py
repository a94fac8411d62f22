"""Block tables of all rows in one array, and what is computed from them.

``tables[row, i]`` is the block that holds the row's tokens ``i * block_size .. (i + 1) * block_size``. A *slot* is the
place of one token in the cache: ``block * stride + position % block_size``, where ``stride`` is the block size unless
a block holds rows of several layers. Entries past a row's blocks are the null block, so a table can be read too far
without harm. Blocks behind a window may be somebody else's by now: no backend reads them.

Beside every entry lies the stamp that its row expects of the block (``engine.core.kv.tags``).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.core.kv.layout import NULL_BLOCK, Reach
from engine.core.kv.tags import NO_STAMP

Ints = NDArray[np.int64]


def first_seen(reach: Reach, positions: Ints) -> Ints:
    """First position that a token at each of these positions attends to."""
    if reach.kind == "window":
        return np.maximum(positions - reach.size + 1, 0)
    if reach.kind == "chunk":
        return positions // reach.size * reach.size
    return np.zeros_like(positions)


class BlockTables:
    """Tables of ``max_num_seqs`` rows, int64, on the host."""

    def __init__(self, max_num_seqs: int, max_context: int, block_size: int, stride: int | None = None) -> None:
        self.block_size = block_size
        self._stride = block_size if stride is None else stride
        width = -(-max_context // block_size)
        self.tables: Ints = np.full((max_num_seqs, width), NULL_BLOCK, dtype=np.int64)
        self.expected: Ints = np.full((max_num_seqs, width), NO_STAMP, dtype=np.int64)
        """Stamp that the row expects of the block at the same place of ``tables``."""

    def assign(self, row: int, blocks: tuple[int, ...], stamps: tuple[int, ...] = ()) -> None:
        """Replace a row's table. ``stamps``: one a block, or none at all where no block was given a stamp."""
        self.tables[row] = NULL_BLOCK
        self.tables[row, : len(blocks)] = blocks
        self.expected[row] = NO_STAMP
        self.expected[row, : len(stamps)] = stamps

    def grow(self, rows: list[int], indices: list[int], blocks: list[int], stamps: list[int]) -> None:
        """Set ``tables[rows[i], indices[i]] = blocks[i]``, of which the row expects ``stamps[i]``."""
        if rows:
            self.tables[rows, indices] = blocks
            self.expected[rows, indices] = stamps

    def agrees(self, stamps: Ints, rows: Ints, expected: Ints) -> bool:
        """Whether the first blocks of these rows have just these stamps, ``(rows, places)``: four array operations."""
        return bool((stamps.take(self.tables[:, : expected.shape[1]][rows], mode="clip") == expected).all())

    def mismatched(self, stamps: Ints, rows: Ints, begins: Ints | None, ends: Ints) -> NDArray[np.bool_] | None:
        """Which rows name a block that does not exist, or whose stamp is not the one they expect; None: no row does.

        Args:
            stamps: of all blocks, and ``NOWHERE`` behind the last.
            rows: to be compared.
            begins: of each the first place that is looked at, since what lies behind a window is not; None: all.
            ends: of each the end of those places.
        """
        if begins is None:
            width = int(ends.max())
            blocks, expected = self.tables[:, :width][rows], self.expected[:, :width][rows]
        else:
            width = int((ends - begins).max())
            blocks = _rectangle(self.tables, rows, begins, width, NULL_BLOCK)
            expected = _rectangle(self.expected, rows, begins, width, NO_STAMP)
        # Numbers behind the last block find NOWHERE, those below the first the null block's stamp: nobody who has a
        # block expects either.
        wrong = stamps.take(blocks, mode="clip") != expected
        if not wrong.any():
            return None
        found: NDArray[np.bool_] = wrong.any(axis=1)
        return found

    def slots(self, rows: Ints | int, positions: Ints) -> Ints:
        """Slots of one token a row, or of some positions of one row."""
        size = self.block_size
        slots: Ints = self.tables[rows, positions // size] * self._stride + positions % size
        return slots

    def rectangle(self, rows: Ints, begins: Ints, num_blocks: int) -> Ints:
        """``num_blocks`` blocks of each row from its place ``begins`` on, flat, row after row."""
        return _rectangle(self.tables, rows, begins, num_blocks, NULL_BLOCK).reshape(-1)


def _rectangle(source: Ints, rows: Ints, begins: Ints, width: int, behind: int) -> Ints:
    """``width`` entries of each row from its place ``begins`` on; ``behind`` past the end of the rows."""
    places = begins[:, None] + np.arange(width)
    inside = places < source.shape[1]
    entries = source[rows[:, None], np.where(inside, places, 0)]
    return np.where(inside, entries, behind)
