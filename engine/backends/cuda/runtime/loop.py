"""The decoding loop on the device: steps that need nothing from the host, and tokens that it fetches when it likes.

A step's tensor operations have fixed shapes and addresses and bring no number to the host, so they can be recorded once
for a bucket of lanes and replayed, several steps at a time. A row that ends inside a replay is passed over in the rest
of it: nothing of it is written, and its lane of the ring says so. A row whose block table names a block that is not its
own (``engine.core.kv.tags``) is not computed either: nothing is read or written for it.

The host owns blocks. It may give a row's blocks to somebody else as soon as it stops naming the row in a lane:
changes, replays and whatever writes to the cache for the next owner run in one order, that of the device's queue.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from engine.backends.cuda.runtime.copying import CachedCopies, Copies
from engine.backends.cuda.runtime.operations import Operations, SamplingColumns
from engine.backends.cuda.runtime.rows import Deltas, Field, RowLayout
from engine.backends.cuda.runtime.sampling_state import REPORT_WORDS, ChoiceMemory, report_words
from engine.backends.cuda.runtime.tables import Tables

NOTHING = -2
"""In the ring: the lane computed no row in this step."""

FOREIGN = -3
"""In the ring: the row's table names a block that is not its own; nothing of it was computed."""

RING_STEPS = 64
"""Steps whose tokens the ring holds; the host is never so many behind."""

MOST_CHANGES = 1 << 16
"""Words of rows that change in one copy: a few hundred are usual, and a hundred rows with the longest block tables have
a million. So no copy, and no memory on the device for it, is larger than 1 MiB."""


class StepModel(Protocol):
    """What a step computes between its rows and their logits."""

    def decode(
        self, tokens: Tensor, positions: Tensor, slots: tuple[Tensor, ...], tables: tuple[Tensor, ...], lengths: Tensor
    ) -> Tensor:
        """Logits of every lane, ``(bucket, vocab)``.

        Args:
            tokens: int64 ``(bucket,)``.
            positions: of the tokens.
            slots: by each of the layout's tables where their keys and values go; negative: nowhere.
            tables: the same of block tables, ``(bucket, width)``.
            lengths: positions that each lane attends to, its own included; 0: none.
        """
        ...


class DeviceLoop:
    """Rows that advance alone. Nothing here reads a tensor's content on the host."""

    def __init__(
        self,
        layout: RowLayout,
        model: StepModel,
        operations: Operations,
        choices: ChoiceMemory,
        stamps: Tensor,
        tables: Tables,
        copies: Copies | None = None,
    ) -> None:
        """``stamps``: int64, of all blocks; ``tables``: where the rows' entries lie; ``copies``: None for torch's
        own."""
        self.layout = layout
        self._model = model
        self._operations = operations
        self._stamps = stamps
        self.tables = tables
        device = stamps.device
        self.copies = copies or CachedCopies(device)
        self._words = torch.from_numpy(layout.fresh()).to(device)
        self._fields = self._words[: layout.first_stop].view(-1, layout.lines)
        self._stops = self._words[layout.first_stop : layout.first_block].view(layout.lines, layout.stops)
        self._tables = self._words[layout.first_block : layout.first_stamp].view(layout.lines, layout.width)
        self._expected = self._words[layout.first_stamp : layout.first_lane].view(layout.lines, layout.width)
        self._lanes = self._words[layout.first_lane :]
        self.columns = SamplingColumns(self._fields, choices.counts, choices.masks, choices.bias_ids, choices.biases)
        self.ring = torch.full((RING_STEPS, layout.lanes), NOTHING, dtype=torch.int64, device=device)
        self.reports = torch.zeros(RING_STEPS, layout.lanes, REPORT_WORDS, dtype=torch.int32, device=device)
        """Beside the ring: log-probabilities for rows that asked (``engine.backends.cuda.runtime.sampling_state``)."""
        self._turn = torch.zeros(1, dtype=torch.int64, device=device)

    def announce(self, deltas: Deltas) -> None:
        """Take over what changed, in one copy unless there is more than ``MOST_CHANGES``."""
        if len(deltas):
            changes = deltas.take()
            for begin in range(0, changes.shape[1], MOST_CHANGES):
                addresses, values = self.copies.upload(changes[:, begin : begin + MOST_CHANGES])
                self._words.index_copy_(0, addresses, values)

    def reset(self) -> None:
        """Make all state what it was at first, in its place; no step may be under way that somebody waits for."""
        self._words.copy_(torch.from_numpy(self.layout.fresh()))
        self.ring.fill_(NOTHING)
        self.reports.zero_()
        self._turn.zero_()

    def rows(self, rows: Tensor, positions: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Block tables of these rows (int64, all of a row's together), and whether all blocks are its own that tokens
        from ``positions`` on, ``lengths`` with what is before them, read or are written to."""
        entries = self._tables.index_select(0, rows)
        expected = self._expected.index_select(0, rows)
        faults = [
            self._operations.faults(entries, expected, seen, self._stamps)
            for seen in self.tables.read(positions, lengths)
        ]
        return entries, sum(faults[1:], faults[0]) == 0

    def step(self, bucket: int) -> Tensor:
        """One step of the first ``bucket`` lanes; gives their logits. This is what is recorded."""
        rows = self._lanes[:bucket]
        tokens, positions, _, done = self._fields[: Field.DONE + 1].index_select(1, rows).unbind(0)
        live = done == 0
        # Filled, and not chosen between with a number of the host: that would be copied to a GPU, which no graph takes.
        entries, sound = self.rows(rows, positions, (positions + 1).masked_fill(~live, 0))
        computed = live & sound
        idle = ~computed
        slots = self.tables.slots(entries, torch.arange(bucket, device=rows.device), positions, idle)
        lengths = (positions + 1).masked_fill(idle, 0)
        logits = self._model.decode(tokens, positions, slots, self.tables.split(entries), lengths)
        # Lanes that compute nothing choose as the padding row, for which nothing is counted.
        choosers = rows.masked_fill(idle, self.layout.rows)
        sampled = self._operations.sample(logits, choosers, positions + 1, self.columns)
        chosen = sampled.tokens
        # A row that has failed is done, but its lane looks up a vector all the same: that of an id that there is.
        self._put(Field.LAST, rows, torch.where(computed, chosen, tokens).clamp(min=0))
        self._put(Field.POSITION, rows, positions + computed.long())
        self._put(Field.DONE, rows, (idle | self._ends(rows, chosen, positions + 2)).long())
        out = torch.full_like(self.ring[:1], NOTHING)
        untold = torch.full_like(chosen, NOTHING).masked_fill(live, FOREIGN)
        out[0, :bucket] = torch.where(computed, chosen, untold)
        slot = self._turn % RING_STEPS
        self.ring.index_copy_(0, slot, out)
        self.reports[:, :bucket].index_copy_(0, slot, report_words(sampled).unsqueeze(0))
        self._turn += 1
        return logits

    def enter(self, rows: Tensor, tokens: Tensor, positions: Tensor) -> None:
        """These rows have chosen tokens (negative: none) for these positions, and decode from the next step on unless
        they end with that."""
        self._put(Field.LAST, rows, tokens.clamp(min=0))
        self._put(Field.POSITION, rows, positions)
        self._put(Field.DONE, rows, self._ends(rows, tokens, positions + 1).long())

    def _ends(self, rows: Tensor, tokens: Tensor, known: Tensor) -> Tensor:
        """Whether a row's output ends with a token that makes so many known."""
        stopped = (self._stops.index_select(0, rows) == tokens.unsqueeze(1)).any(1)
        return stopped | (tokens < 0) | (known >= self._fields[Field.LIMIT].index_select(0, rows))

    def _put(self, field: Field, rows: Tensor, values: Tensor) -> None:
        """Write a field of some rows. Several lanes may name the padding row: they write what it was, or what is never
        read."""
        self._fields[field].index_copy_(0, rows, values)
