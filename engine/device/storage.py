"""KV memory on a device: all layers of a block together, so that blocks are cleaned or moved in one launch.

Behind the blocks that the scheduler gives out lies one *spare* block a row, which no plan ever names: the device may
run ahead of the scheduler, and a row that comes to the end of its last block goes on in its spare one. As soon as the
scheduler has given it the next block, what was written there is moved. The last block is nobody's: what is not to be
written at all goes there where an operation cannot leave it out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.device.operations import KvLayer, Operations
from engine.errors import ConfigurationError
from engine.kv.layout import ITEM_BYTES, KvLayout


class DeviceStorage:
    """Keys and values of all blocks."""

    def __init__(
        self, layout: KvLayout, rows: int, operations: Operations, dtype: torch.dtype, device: torch.device
    ) -> None:
        if len(layout.tables) > 1 or any(layer != layout.layers[0] or layer.latent for layer in layout.layers):
            raise ConfigurationError("on a device all layers must keep keys and values alike; run this model on a CPU")
        self.layout = layout
        self.device = device
        self._operations = operations
        size, like = layout.block_size, layout.layers[0]
        self.num_blocks = layout.num_blocks + 1 + rows + 1
        self.nowhere = self.num_blocks - 1
        self._first_spare = layout.num_blocks + 1
        self.stride = len(layout.layers) * size
        """Slots from a token of one block to that of the next."""
        shape = (self.num_blocks, self.stride, like.heads)
        self.memory = (
            torch.zeros(*shape, like.key_dim, dtype=dtype, device=device),
            torch.zeros(*shape, like.value_dim, dtype=dtype, device=device),
        )
        keys, values = self.memory
        cuts = [slice(place * size, (place + 1) * size) for place in range(len(layout.layers))]
        self.layers = [KvLayer(keys[:, cut], values[:, cut]) for cut in cuts]

    def spare(self, row: int) -> int:
        """The row's spare block."""
        return self._first_spare + row

    def zero(self, blocks: Tensor) -> None:
        """Make these blocks (int64) zero."""
        for memory in self.memory:
            self._operations.zero(memory, blocks)

    def move(self, pairs: Tensor) -> None:
        """Copy tokens, in all layers: int64 ``(4, pairs)``: block and place in it of the source, then of the target."""
        size, layers = self.layout.block_size, len(self.layout.layers)
        source, source_place, target, target_place = pairs
        for memory in self.memory:
            tokens = memory.view(self.num_blocks, layers, size, -1).transpose(1, 2)
            tokens[target, target_place] = tokens[source, source_place]

    def touch(self) -> None:
        """Write every page once more: everything is zero then."""
        for memory in self.memory:
            memory.zero_()


def spare_bytes(layout: KvLayout, rows: int) -> int:
    """Bytes that the spare blocks of so many rows take, and nobody's."""
    assert layout.dtype in ITEM_BYTES, "a layout has a known dtype"
    return (rows + 1) * layout.block_bytes
