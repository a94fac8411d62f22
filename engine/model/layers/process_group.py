"""``parallel.Group`` over a process group of ``torch.distributed``; an engine of one rank never loads it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class ProcessGroup:
    """The default process group, which the caller has made."""

    def all_reduce(self, x: Tensor) -> None:
        """Put the sum over all ranks in the place of ``x``."""
        dist.all_reduce(x)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """The ``x`` of every rank, in their order."""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return parts
