"""``parallel.Pipe`` over memory that the ranks of one sandbox share: what stages of a pipeline pass on."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.sandbox.rank_queue import RankQueue


class StagePipe:
    """The queue of a rank, for tensors in host memory."""

    def __init__(self, queue: RankQueue) -> None:
        self._queue = queue

    def send(self, x: Tensor) -> None:
        """Pass ``x`` on; returns when it is copied."""
        self._queue.send(bytes_of(x.contiguous()))

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Take a tensor of this shape, waiting for it."""
        out = torch.empty(shape, dtype=dtype)
        self._queue.receive(bytes_of(out))
        return out


def bytes_of(x: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, as they are."""
    return x.view(-1).view(torch.uint8).numpy().data
