"""The bytes of one KV block as they leave the engine: all layers' keys and values, one after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.backends.common.storage import KvStorage
from engine.core.kv.leaving import ENOUGH, ReadContent


class BlockContent:
    """Copies whole blocks out of and into the storage, by way of one buffer on the host."""

    def __init__(self, storage: KvStorage) -> None:
        self._tensors = storage.tensors
        parts = [tensor[0].numel() * tensor.element_size() for tensor in self._tensors]
        self.size = sum(parts)
        """Bytes of a block."""
        self._buffer = torch.zeros(self.size, dtype=torch.uint8)
        self._parts: list[Tensor] = []
        """The part of each tensor in the buffer, in the shape and type of a block of that tensor."""
        for tensor, part in zip(self._tensors, torch.split(self._buffer, parts), strict=True):
            self._parts.append(part.view(tensor.dtype).view(tensor.shape[1:]))

    @torch.inference_mode()
    def read(self, block: int) -> bytes:
        """A copy of the block's bytes."""
        for part, tensor in zip(self._parts, self._tensors, strict=True):
            part.copy_(tensor[block])
        return self._buffer.numpy().tobytes()

    def start(self, block: int) -> ReadContent:
        """Copy a block out."""
        return ReadContent(self.read(block))

    def make_room(self) -> int:
        """Blocks that can be written now: each is at once."""
        return ENOUGH

    @torch.inference_mode()
    def write(self, block: int, content: bytes) -> None:
        """Overwrite all of the block; ``content`` has ``size`` bytes, as ``read`` gave them."""
        # A view of read-only bytes, which is only read here.
        self._buffer.numpy()[:] = memoryview(content)
        for part, tensor in zip(self._parts, self._tensors, strict=True):
            tensor[block].copy_(part)

    def wipe(self) -> None:
        """Make the buffer zero."""
        self._buffer.zero_()
