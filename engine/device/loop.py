"""The decoding loop on the device: steps that need nothing from the host, and tokens that it fetches when it likes.

A step's tensor operations have fixed shapes and addresses and bring no number to the host, so they can be recorded once
for a bucket of lanes and replayed, several steps at a time. A row that ends inside a replay is passed over in the rest
of it: nothing of it is written, and its lane of the ring says so.

The host owns blocks. It gives a row those for all tokens that the replays under way may reach. It may give a row's
blocks to somebody else as soon as it has announced the row's end: announcements, replays and whatever writes to the
cache for the next owner run in one order, that of the device's queue.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from engine.device.rows import DONE, LAST, LIMIT, POSITION, STOPS, Deltas, RowLayout

NOTHING = -2
"""In the ring: the lane computed no row in this step."""

COPY_ROOM = 256
"""Changes in one copy: a busy step has a few for each row that begins, ends or needs a block."""

RING_STEPS = 64
"""Steps whose tokens the ring holds; a replay has fewer, and the host fetches each replay's before the next but one."""


class Model(Protocol):
    """What a step computes between its rows and their next tokens."""

    def __call__(self, tokens: Tensor, positions: Tensor, slots: Tensor, tables: Tensor, lengths: Tensor) -> Tensor:
        """The next token of every lane, int64 ``(bucket,)``, negative where its logits are not finite.

        Args:
            tokens: int64 ``(bucket,)``.
            positions: of the tokens.
            slots: where their keys and values go; -1: nowhere.
            tables: block tables, ``(bucket, width)``.
            lengths: positions that each lane attends to, its own included; 0: none.
        """
        ...


class DeviceLoop:
    """Rows that advance alone. Nothing here reads a tensor's content on the host but ``fetch``."""

    def __init__(self, layout: RowLayout, model: Model, block_size: int, device: torch.device) -> None:
        self.layout = layout
        self._model = model
        self._block_size = block_size
        self._words = torch.from_numpy(layout.fresh()).to(device)
        self._lines = self._words[: layout.first_lane].view(layout.rows + 1, layout.line)
        self._lanes = self._words[layout.first_lane : layout.spare]
        self._addresses = torch.full((COPY_ROOM,), layout.spare, dtype=torch.int64, device=device)
        self._values = torch.full((COPY_ROOM,), layout.rows, dtype=torch.int64, device=device)
        self._ring = torch.full((RING_STEPS, layout.lanes), NOTHING, dtype=torch.int64, device=device)
        self._turn = torch.zeros(1, dtype=torch.int64, device=device)

    def announce(self, deltas: Deltas) -> int:
        """Take over what changed; gives the number of copies."""
        count = 0
        for addresses, values in deltas.copies(COPY_ROOM):
            self._addresses.copy_(torch.from_numpy(addresses))
            self._values.copy_(torch.from_numpy(values))
            self._words.index_copy_(0, self._addresses, self._values)
            count += 1
        return count

    def step(self, bucket: int) -> None:
        """One step of the first ``bucket`` lanes: what a graph of launches holds."""
        layout = self.layout
        rows = self._lanes[:bucket]
        lines = self._lines.index_select(0, rows)
        tokens, positions = lines[:, LAST].clone(), lines[:, POSITION].clone()
        tables = lines[:, layout.tables :]
        live = lines[:, DONE] == 0
        size = self._block_size
        blocks = tables.gather(1, (positions // size).clamp(max=layout.width - 1).unsqueeze(1)).squeeze(1)
        slots = torch.where(live, blocks * size + positions % size, -1)
        lengths = torch.where(live, positions + 1, 0)
        chosen = self._model(tokens, positions, slots, tables, lengths)
        stopped = (lines[:, STOPS : layout.tables] == chosen.unsqueeze(1)).any(1) | (chosen < 0)
        # The new token's position is one further, and with it there is one token more than that.
        ends = live & (stopped | (positions + 2 >= lines[:, LIMIT]))
        lines[:, LAST] = torch.where(live, chosen, tokens)
        lines[:, POSITION] = positions + live.long()
        lines[:, DONE] |= ends.long()
        # Several lanes may name the line of nobody: they all write what it was.
        self._lines.index_copy_(0, rows, lines)
        out = torch.full_like(self._ring[:1], NOTHING)
        out[0, :bucket] = torch.where(live, chosen, NOTHING)
        self._ring.index_copy_(0, self._turn % RING_STEPS, out)
        self._turn += 1

    def replay(self, bucket: int, steps: int) -> None:
        """So many steps without a word from the host; fewer than the ring holds."""
        for _ in range(steps):
            self.step(bucket)

    def fetch(self, first: int, steps: int) -> list[list[int]]:
        """Tokens by lane of steps ``first .. first + steps``, counted from the loop's beginning."""
        turns = [turn % RING_STEPS for turn in range(first, first + steps)]
        tokens: list[list[int]] = self._ring[turns].tolist()
        return tokens
