"""What a step of the loop reads and writes besides weights and cache: all rows' words, stamps, rings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from engine.backends.cuda.runtime.rows import Field, RowLayout
from engine.backends.cuda.runtime.tables import Tables

Faults = Callable[[Tensor, Tensor, tuple[Tensor, Tensor], Tensor], Tensor]
"""``Operations.faults``."""


@dataclass(frozen=True, slots=True)
class LoopState:
    """Memory of a loop, int64 unless said otherwise; it stays where it is."""

    layout: RowLayout
    tables: Tables
    fields: Tensor
    """``(fields, lines)``."""
    stops: Tensor
    """``(lines, stops)``."""
    entries: Tensor
    """``(lines, width)``: block tables."""
    expected: Tensor
    """``(lines, width)``: stamps."""
    lanes: Tensor
    firsts: Tensor
    """First entry in a row of each table."""
    stamps: Tensor
    """Stamps of all blocks."""
    ring: Tensor
    """``(steps, lanes)``: tokens."""
    reports: Tensor
    """int32 ``(steps, lanes, words)``."""
    turn: Tensor
    """``(1,)``: steps that were begun or ended, whichever a step counts."""

    def put(self, field: Field, rows: Tensor, values: Tensor) -> None:
        """Write a field of some rows. Several lanes may name the padding row: they write what it was, or what is never
        read."""
        self.fields[field].index_copy_(0, rows, values)

    def ends(self, rows: Tensor, tokens: Tensor, known: Tensor) -> Tensor:
        """Whether a row's output ends with a token that makes so many known."""
        stopped = (self.stops.index_select(0, rows) == tokens.unsqueeze(1)).any(1)
        return stopped | (tokens < 0) | (known >= self.fields[Field.LIMIT].index_select(0, rows))

    def checked(self, faults: Faults, rows: Tensor, positions: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Block tables of these rows (all of a row's together), and whether all blocks are its own that tokens from
        ``positions`` on, ``lengths`` with what is before them, read or are written to."""
        entries = self.entries.index_select(0, rows)
        expected = self.expected.index_select(0, rows)
        found = [faults(entries, expected, seen, self.stamps) for seen in self.tables.read(positions, lengths)]
        return entries, sum(found[1:], found[0]) == 0


@dataclass(frozen=True, slots=True)
class StepRows:
    """What a step computes, by lane, int64 unless said otherwise."""

    rows: Tensor
    tokens: Tensor
    positions: Tensor
    slots: tuple[Tensor, ...]
    """By table where keys and values go; negative: nowhere."""
    tables: tuple[Tensor, ...]
    """Block tables, ``(lanes, width)``."""
    lengths: Tensor
    """int64 or int32: positions that a lane attends to, its own included; 0: none."""
    choosers: Tensor
    """Rows whose tokens are chosen: the padding row for lanes that compute nothing."""
    places: Tensor
    """Positions of the tokens that are chosen."""
