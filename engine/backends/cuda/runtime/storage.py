"""KV memory on a device: all layers of a block together, so that blocks are cleaned or moved in one launch.

A block holds tokens of all layers that share a block table, those of the first layer, then those of the next; blocks of
all tables are equally large and lie in one pool (``engine.core.kv.layout``).

Behind the blocks that the scheduler gives out lie the *spare* blocks, one for each table of each row, which no plan
ever names: the device may run ahead of the scheduler, and a row that comes to the end of its last block goes on in its
spare one. As soon as the scheduler has given it the next block, what was written there is moved. The last block is
padding: what is not to be written at all goes there where an operation cannot leave it out.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.backends.cuda.runtime.operations import KvLayer, Operations
from engine.backends.cuda.runtime.side_queue import DirectQueue, SideQueue
from engine.core.kv.layout import ITEM_BYTES, KvLayout, LayerLayout
from engine.errors import ConfigurationError

Ints = NDArray[np.int64]


MOVED_AT_ONCE = 1 << 14
"""Slots whose content is copied at once: of the 8B's shape 32 MiB of keys, which are held beside the cache."""


class DeviceStorage:
    """Keys and values of all blocks."""

    def __init__(
        self,
        layout: KvLayout,
        rows: int,
        operations: Operations,
        dtype: torch.dtype,
        device: torch.device,
        staged: int = 0,
    ) -> None:
        """Take the memory; ``staged``: blocks that may be on their way to the host, and as many on their way back.

        Raises:
            ConfigurationError: the layers keep keys and values of different shapes.
        """
        like = layout.layers[0]
        if any(_shape(layer) != _shape(like) for layer in layout.layers):
            raise ConfigurationError(
                "the device backend keeps all layers of a block together, and this model's layers have keys and values "
                "of different shapes; set backend to plain, which computes every supported model on the CPU"
            )
        self.layout = layout
        self.device = device
        self.num_staged = staged
        self._side: SideQueue = DirectQueue()
        """Copies of whole blocks, which nothing here overtakes."""
        self._run_copies: Callable[[], None] = lambda: None
        self._operations = operations
        self._first_spare = layout.num_blocks + 1
        self.num_blocks = self._first_spare + rows * len(layout.tables) + 1
        self.stride = layout.block_rows
        """Slots from a token of one block to that of the next."""
        shape = (self.num_blocks, self.stride, like.heads)
        keys = torch.zeros(*shape, like.key_dim, dtype=dtype, device=device)
        values = keys[..., : like.value_dim]
        if not like.latent:
            values = torch.zeros(*shape, like.value_dim, dtype=dtype, device=device)
        self.memory = (keys,) if like.latent else (keys, values)
        """What holds tokens; the first axis counts blocks, the second their slots."""
        self.layers: list[KvLayer] = []
        self._counts = [0] * len(layout.tables)
        for layer in layout.layers:
            table = layout.table_of(layer.reach)
            size = layout.tables[table].block_size
            cut = slice(self._counts[table] * size, (self._counts[table] + 1) * size)
            self._counts[table] += 1
            self.layers.append(KvLayer(keys[:, cut], values[:, cut], table, layer.reach, like.latent))
        sizes = [group.block_size for group in layout.tables]
        self._layer_slots = [
            np.arange(count, dtype=np.int64) * size for count, size in zip(self._counts, sizes, strict=True)
        ]
        """Distance of each layer's slots from those of the first, for each table."""
        self._lines = tuple(memory.view(self.num_blocks * self.stride, -1) for memory in self.memory)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return sum(memory[0].nbytes for memory in self.memory)

    @property
    def staged_sizes(self) -> tuple[int, ...]:
        """Bytes of each buffer that blocks pass on their way to the host or back."""
        return (self.block_bytes,) * (2 * self.num_staged)

    def watch(self, side: SideQueue, run_copies: Callable[[], None]) -> None:
        """Keep the order with copies in another queue; ``run_copies`` makes all kinds of them once."""
        self._side, self._run_copies = side, run_copies

    def spare(self, row: int, table: int = 0) -> int:
        """The spare block of a row's table."""
        return self._first_spare + row * len(self.layout.tables) + table

    def spares(self, row: int) -> list[int]:
        """All spare blocks of a row."""
        return [self.spare(row, table) for table in range(len(self.layout.tables))]

    def number(self, spare: int) -> int:
        """Which of all spare blocks this one is."""
        return spare - self._first_spare

    def zero(self, blocks: Tensor) -> None:
        """Make these blocks (int64) zero. What is started afterwards finds all copies of blocks complete: every plan
        that admits a row, or gives a block, cleans blocks first."""
        self._side.join()
        for memory in self.memory:
            self._operations.zero(memory, blocks)
        self._side.mark()

    def in_all_layers(self, table: int, slots: Ints) -> Ints:
        """Slots of a table's first layer as those of all its layers."""
        return np.add.outer(slots, self._layer_slots[table]).ravel()

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy what stands in these slots (int64) to those."""
        for begin in range(0, len(sources), MOVED_AT_ONCE):
            some = slice(begin, begin + MOVED_AT_ONCE)
            for lines in self._lines:
                lines.index_copy_(0, targets[some], lines.index_select(0, sources[some]))
        self._side.mark()

    def mark_pass(self) -> None:
        """Have copies of blocks to the host, from here on, begin behind the passes that were started so far. To be
        called behind a pass for which the host does not wait before the next plan."""
        self._side.mark()

    def move_most(self) -> None:
        """Move as much as is moved at once, from the padding block into itself, and copy it to the host and back."""
        slots = torch.full((MOVED_AT_ONCE,), (self.num_blocks - 1) * self.stride, device=self.device)
        self.move(slots, slots)
        self._run_copies()

    def clean(self) -> None:
        """Make the padding block zero: steps without rows write to it."""
        self.zero(torch.tensor([self.num_blocks - 1], device=self.device))

    def touch(self) -> None:
        """Write every page once more: everything is zero then."""
        self._side.join()
        for memory in self.memory:
            memory.zero_()


def spare_bytes(layout: KvLayout, rows: int) -> int:
    """Bytes of the spare blocks of so many rows and of the padding block."""
    assert layout.dtype in ITEM_BYTES, "a layout has a known dtype"
    return (rows * len(layout.tables) + 1) * layout.block_bytes


def _shape(layer: LayerLayout) -> tuple[int, int, int, bool]:
    return layer.heads, layer.key_dim, layer.value_dim, layer.latent
