"""Where the block tables of a row lie: a row has one for each reach of its model, one behind the other in its words.

What a step reads of a table follows from positions on the device: of a window or a chunk nothing behind what its first
token sees. Entries behind it stay what they were, and the blocks in them may be somebody else's by now.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from engine.core.kv.layout import KvGroup, KvLayout, Reach
from engine.errors import ConfigurationError

ENTRY_STEP = 16
"""Tables begin at multiples of so many entries: Triton compiles a kernel by whether its addresses and strides are
multiples of 16, and the longest context shall not decide which kernels there are."""


@dataclass(frozen=True, slots=True)
class Tables:
    """The block tables of every row."""

    groups: tuple[KvGroup, ...]
    widths: tuple[int, ...]
    """Entries of each: for the longest context, one more for the spare block behind it, and up to the next step."""
    stride: int
    """Slots from a token of one block to that of the next."""

    @classmethod
    def of(cls, layout: KvLayout, max_context: int) -> Tables:
        """Those of a layout, for contexts of at most so many tokens."""
        needed = (-(-max_context // group.block_size) + 1 for group in layout.tables)
        widths = tuple(-(-width // ENTRY_STEP) * ENTRY_STEP for width in needed)
        return cls(layout.tables, widths, layout.block_rows)

    @property
    def width(self) -> int:
        """Entries of a row, of all its tables."""
        return sum(self.widths)

    @property
    def firsts(self) -> tuple[int, ...]:
        """Return the first entry in a row of each table."""
        return (0, *accumulate(self.widths[:-1]))

    def place(self, table: int, index: int) -> int:
        """Where entry ``index`` of a table lies in a row.

        Raises:
            ConfigurationError: a table has no such entry.
        """
        if not 0 <= index < self.widths[table]:
            raise ConfigurationError(f"a row has room for {self.widths[table]} blocks, and is given one at {index}")
        return self.firsts[table] + index

    def split(self, entries: Tensor) -> tuple[Tensor, ...]:
        """Entries of some rows ``(N, width)`` as one tensor a table, views of it."""
        return torch.split(entries, list(self.widths), 1)

    def read(self, positions: Tensor, lengths: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return for each table the first entry of a row that is read and the one after the last, int64, for tokens
        from ``positions`` up to ``lengths`` tokens in all (0: nothing is read)."""
        found = []
        for group, first in zip(self.groups, self.firsts, strict=True):
            size = group.block_size
            begins = first_seen(group.reach, positions) // size
            found.append((begins + first, (lengths + size - 1) // size + first))
        return found

    def slots(self, entries: Tensor, lines: Tensor, positions: Tensor, idle: Tensor) -> tuple[Tensor, ...]:
        """Return the slots of tokens in each table, int64: ``lines`` says which of the rows in ``entries`` a token is
        of;
        negative for tokens that are ``idle``."""
        found = []
        for group, part in zip(self.groups, self.split(entries), strict=True):
            size = group.block_size
            blocks = part[lines, (positions // size).clamp(max=part.shape[1] - 1)]
            found.append((blocks * self.stride + positions % size).masked_fill(idle, -1))
        return tuple(found)


def first_seen(reach: Reach, positions: Tensor) -> Tensor:
    """For each position the first one that it attends to."""
    if reach.kind == "window":
        return (positions - reach.size + 1).clamp(min=0)
    if reach.kind == "chunk":
        return positions // reach.size * reach.size
    return torch.zeros_like(positions)
