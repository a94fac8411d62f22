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
from engine.backends.cuda.runtime.loop_state import LoopState
from engine.backends.cuda.runtime.operations import Operations, SamplingColumns
from engine.backends.cuda.runtime.rows import Deltas, Field, RowLayout
from engine.backends.cuda.runtime.sampling_state import REPORT_WORDS, ChoiceMemory
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
            lengths: int64 or int32, positions that each lane attends to, its own included; 0: none.
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
        self.tables = tables
        device = stamps.device
        self.copies = copies or CachedCopies(device)
        self._words = torch.from_numpy(layout.fresh()).to(device)
        self._fields = self._words[: layout.first_stop].view(-1, layout.lines)
        self.columns = SamplingColumns(self._fields, choices.counts, choices.masks, choices.bias_ids, choices.biases)
        self.ring = torch.full((RING_STEPS, layout.lanes), NOTHING, dtype=torch.int64, device=device)
        self.reports = torch.zeros(RING_STEPS, layout.lanes, REPORT_WORDS, dtype=torch.int32, device=device)
        """Beside the ring: log-probabilities for rows that asked (``engine.backends.cuda.runtime.sampling_state``)."""
        self._turn = torch.zeros(1, dtype=torch.int64, device=device)
        self.state = LoopState(
            layout=layout,
            tables=tables,
            fields=self._fields,
            stops=self._words[layout.first_stop : layout.first_block].view(layout.lines, layout.stops),
            entries=self._words[layout.first_block : layout.first_stamp].view(layout.lines, layout.width),
            expected=self._words[layout.first_stamp : layout.first_lane].view(layout.lines, layout.width),
            lanes=self._words[layout.first_lane :],
            firsts=torch.tensor(tables.firsts, device=device),
            stamps=stamps,
            ring=self.ring,
            reports=self.reports,
            turn=self._turn,
        )

    def announce(self, deltas: Deltas) -> None:
        """Take over what changed, in one copy unless there is more than ``MOST_CHANGES``."""
        if len(deltas):
            changes = deltas.take()
            for begin in range(0, changes.shape[1], MOST_CHANGES):
                self.take_over(*self.copies.upload(changes[:, begin : begin + MOST_CHANGES]))

    def take_over(self, addresses: Tensor, values: Tensor) -> None:
        """Write changes that are on the device already."""
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
        return self.state.checked(self._operations.faults, rows, positions, lengths)

    def step(self, bucket: int) -> Tensor:
        """One step of the first ``bucket`` lanes; gives their logits. This is what is recorded."""
        run = self._operations
        begun = run.begin_step(self.state, bucket)
        logits = self._model.decode(begun.tokens, begun.positions, begun.slots, begun.tables, begun.lengths)
        sampled = run.sample(logits, begun.choosers, begun.places, self.columns)
        run.end_step(self.state, begun, sampled)
        return logits

    def enter(self, rows: Tensor, tokens: Tensor, positions: Tensor) -> None:
        """These rows have chosen tokens (negative: none) for these positions, and decode from the next step on unless
        they end with that."""
        self.state.put(Field.LAST, rows, tokens.clamp(min=0))
        self.state.put(Field.POSITION, rows, positions)
        self.state.put(Field.DONE, rows, self.state.ends(rows, tokens, positions + 1).long())
