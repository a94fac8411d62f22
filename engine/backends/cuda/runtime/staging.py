"""Whole blocks of the device's KV that go to the host and come back, through buffers of the page-locked arena.

Each buffer holds one block at a time, so never bytes of two tenants, and is zero while it holds none. Buffers, fences
and the queue of these copies are taken before anybody is served. Where no buffer is free a block does not leave, and
none is taken in.

**Out.** The copy runs beside steps. A block that may leave was computed by passes for which the host has waited, or by
passes of cut prompts, for which it waits later: where such a request is aborted or preempted, its blocks may leave
first. So a mark follows each such pass (``DeviceStorage.mark_pass``) and each move of tokens into blocks, and the copy
begins behind the last mark. The block is overwritten by nothing but ``DeviceStorage.zero`` and by a copy in, which
both wait for it.

**In.** The copy begins behind all steps that were started: one that ran ahead for a row that has ended may still write
to the block's last holder. A plan that admits a row, or gives a block, cleans blocks first, and
``DeviceStorage.zero`` has everything behind it wait for all copies: so no step reads a block before it is complete.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.backends.cuda.runtime.arena import Fence
from engine.backends.cuda.runtime.device_memory import Resources
from engine.backends.cuda.runtime.side_queue import SideQueue, make_side_queue
from engine.backends.cuda.runtime.storage import DeviceStorage
from engine.config import EngineConfig
from engine.core.kv.layout import KvLayout
from engine.core.kv.spill import MAX_BLOCK_BYTES, STEP_BYTES

LEAST_STAGED, MOST_STAGED = 2, 64
"""Buffers for each way, at the least and at the most; between them, what goes in two steps."""


def staged_blocks(config: EngineConfig, layout: KvLayout) -> int:
    """Buffers for each way; 0 where blocks do not leave the engine (``engine.startup.load.spill_obstacle``)."""
    spills = config.spill and config.prefix_caching and len(layout.tables) == 1 and not layout.groups
    if not spills or layout.block_bytes > MAX_BLOCK_BYTES:
        return 0
    return max(LEAST_STAGED, min(MOST_STAGED, 2 * STEP_BYTES // layout.block_bytes))


@dataclass(frozen=True, slots=True)
class _Buffer:
    """Page-locked memory for one block."""

    memory: Tensor
    parts: tuple[Tensor, ...]
    """The memory as blocks of each of the storage's tensors."""
    fence: Fence

    def clear(self) -> None:
        """Overwrite it."""
        self.memory.zero_()


class StagedCopy:
    """A block on its way out (``engine.core.kv.spill.Leaving``)."""

    def __init__(self, buffer: _Buffer, free: deque[_Buffer]) -> None:
        self._buffer, self._free = buffer, free

    @property
    def over(self) -> bool:
        """Whether the copy is complete."""
        return self._buffer.fence.over()

    def content(self) -> bytes:
        """The block's bytes, as soon as they are there."""
        self._buffer.fence.wait()
        return self._buffer.memory.numpy().tobytes()

    def drop(self) -> None:
        """Overwrite the buffer, once the copy is complete, and give it back."""
        self._buffer.fence.wait()
        self._buffer.clear()
        self._free.append(self._buffer)


class DeviceContent:
    """Copies whole blocks out of and into the device's storage."""

    def __init__(self, storage: DeviceStorage, resources: Resources, side: SideQueue) -> None:
        self.size = storage.block_bytes
        """Bytes of a block."""
        self._storage, self._side = storage, side
        sides = [deque(self._buffer(resources) for _ in range(storage.num_staged)) for _ in range(2)]
        self._out, self._in = sides
        self._writing: deque[_Buffer] = deque()
        """Buffers whose copies to the device may be under way, the oldest first."""

    def start(self, block: int) -> StagedCopy | None:
        """Begin to copy a block out; None where no buffer is free."""
        if not self._out:
            return None
        buffer = self._out.popleft()
        self._side.follow_mark()
        with torch.inference_mode():
            for part, memory in zip(buffer.parts, self._storage.memory, strict=True):
                self._side.carry(part, memory[block])
        buffer.fence.record()
        return StagedCopy(buffer, self._out)

    def read(self, block: int) -> bytes:
        """A copy of the block's bytes, as soon as it is complete; a buffer has to be free."""
        copy = self.start(block)
        assert copy is not None, "all buffers are in use"
        content = copy.content()
        copy.drop()
        return content

    def make_room(self) -> int:
        """Overwrite and give back the buffers of writes that are complete; how many blocks can be written now."""
        while self._writing and self._writing[0].fence.over():
            self._give_back()
        return len(self._in)

    def write(self, block: int, content: bytes) -> None:
        """Overwrite all of the block; ``content`` has ``size`` bytes, as ``read`` gave them. Waits only where
        ``make_room`` gave 0."""
        if not self._in:
            self._writing[0].fence.wait()
            self._give_back()
        buffer = self._in.popleft()
        buffer.memory.numpy()[:] = memoryview(content)
        self._side.follow_all()
        with torch.inference_mode():
            for part, memory in zip(buffer.parts, self._storage.memory, strict=True):
                self._side.carry(memory[block], part)
        buffer.fence.record()
        self._writing.append(buffer)

    def wipe(self) -> None:
        """Make all buffers zero, except those of copies out that are not dropped; waits for copies to the device."""
        while self._writing:
            self._writing[0].fence.wait()
            self._give_back()

    def run_all(self) -> None:
        """Copy the padding block through every buffer, both ways, so that nothing is met for the first time later."""
        block = self._storage.num_blocks - 1
        copies = [copy for copy in [self.start(block) for _ in range(len(self._out))] if copy is not None]
        for copy in copies:
            self.write(block, copy.content())
            copy.drop()
        self.wipe()

    def _give_back(self) -> None:
        buffer = self._writing.popleft()
        buffer.clear()
        self._in.append(buffer)

    def _buffer(self, resources: Resources) -> _Buffer:
        memory = resources.copies.hold(self.size)
        parts, begin = [], 0
        for tensor in self._storage.memory:
            end = begin + tensor[0].nbytes
            parts.append(memory[begin:end].view(tensor.dtype).view(tensor.shape[1:]))
            begin = end
        return _Buffer(memory, tuple(parts), self._side.fence())


def make_content(storage: DeviceStorage, resources: Resources, main: torch.cuda.Stream | None) -> DeviceContent | None:
    """What copies blocks out of and into a storage, and keeps its order; None where no block leaves."""
    if not storage.num_staged:
        return None
    side = resources.side or make_side_queue(storage.device, main)
    content = DeviceContent(storage, resources, side)
    storage.watch(side, content.run_all)
    return content
