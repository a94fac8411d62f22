"""``parallel.Group`` over memory that the ranks of one sandbox share: the collectives of an engine on processors.

Every rank writes its numbers, all meet once, and every rank sums what all have written, in the order of their numbers:
so all get the same bits, whatever their speeds, and a rank layout gives the same bits each time. With two ranks a sum
is rounded once; with more it is taken in float32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.errors import RankError
from engine.sandbox.rank_meeting import Meeting
from engine.sandbox.rank_memory import PART_BYTES


class SharedGroup:
    """The ranks of a meeting."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._bytes = torch.frombuffer(meeting.memory, dtype=torch.uint8)
        self._parts: dict[tuple[torch.dtype, int], list[Tensor]] = {}
        """By dtype and parity of a turn: the part of each rank."""

    def all_reduce(self, x: Tensor) -> None:
        """Put the sum over all ranks in the place of ``x``."""
        flat = x.view(-1) if x.is_contiguous() else x.reshape(-1)
        for part in _pieces(flat):
            self._sum([one[: len(part)] for one in self._exchange(part)], part)
        if not x.is_contiguous():
            x.copy_(flat.view(x.shape))

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """The ``x`` of every rank, in their order; valid until two further calls."""
        flat = x.reshape(-1)
        if len(flat) * x.itemsize <= PART_BYTES:
            return [one[: len(flat)].view(x.shape) for one in self._exchange(flat)]
        gathered = [torch.empty_like(flat) for _ in range(self._meeting.size)]
        begin = 0
        for part in _pieces(flat):
            for whole, one in zip(gathered, self._exchange(part), strict=True):
                whole[begin : begin + len(part)] = one[: len(part)]
            begin += len(part)
        return [whole.view(x.shape) for whole in gathered]

    def _sum(self, parts: list[Tensor], out: Tensor) -> None:
        if len(parts) == 2:
            torch.add(*parts, out=out)
            return
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part
        out.copy_(total)

    def _exchange(self, part: Tensor) -> list[Tensor]:
        """Write a part and meet; gives what every rank has for it."""
        meeting = self._meeting
        rooms = self._rooms(part.dtype, meeting.turn)
        rooms[meeting.rank][: len(part)].copy_(part)
        length = len(part) * part.itemsize
        meeting.meet(length)
        if any(meeting.length_of(rank) != length for rank in range(meeting.size)):
            raise RankError(f"a rank brought {length} bytes to a turn and another did not; ranks are out of step")
        return rooms

    def _rooms(self, dtype: torch.dtype, turn: int) -> list[Tensor]:
        key = dtype, turn % 2
        found = self._parts.get(key)
        if found is None:
            begins = [self._meeting.place(rank, turn) for rank in range(self._meeting.size)]
            found = self._parts[key] = [self._bytes[begin : begin + PART_BYTES].view(dtype) for begin in begins]
        return found


def _pieces(flat: Tensor) -> Iterator[Tensor]:
    """What is exchanged in one turn each."""
    most = PART_BYTES // flat.itemsize
    for begin in range(0, len(flat), most):
        yield flat[begin : begin + most]
