"""Copies between host and device that nobody waits for."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(values: NDArray[Any], device: torch.device) -> Tensor:
    """An array on the device. A GPU gets it from page-locked memory without a wait: torch's host allocator gives such
    memory to nobody else before the copy is over."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """A tensor's content, on its way to the host."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._tensor = tensor
        if tensor.device.type == "cuda":
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._event = sleeping_event()
            self._event.record()

    def numpy(self) -> NDArray[Any]:
        """The content, as soon as it is there."""
        if self._event is not None:
            self._event.synchronize()
        content: NDArray[Any] = self._tensor.numpy()
        return content


def sleeping_event() -> torch.cuda.Event:
    """One whose waiters sleep."""
    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
