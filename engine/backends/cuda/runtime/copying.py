"""Copies between host and device that nobody waits for.

A GPU copies without a wait only from and to page-locked memory. Locking pages takes calls of the driver that an engine
has no more once it is locked down, so all such memory is taken before anybody is served: one arena
(``ArenaCopies``). Its first part is given out in turn to what goes to the device, the rest has fixed places for what
comes back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.backends.cuda.runtime.arena import ALIGNMENT, Fence, StretchRing

FENCES = 64
"""Copies to the device that can be under way: those of some ten steps."""

FETCHES = 5
"""Results that are on their way at once: tokens and reports, of ordinary prompts and of deterministic rows, and what
the plan before did not wait for."""

STRETCHES = 4
"""Largest copies that the arena has room for at once: of the step that is computed, of the next ones, and what is lost
at the end of a lap."""

LEAST_STRETCH, MOST_STRETCH = 1 << 20, 8 << 20
"""Bytes of the largest copy that goes in one piece: larger ones are cut."""

TORCH_TYPES = {
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}
"""Types of arrays that go to the device."""

Carry = Callable[[Tensor, Tensor], object]
"""Starts a copy of the second tensor's bytes into the first one; it ends some time before a fence that is recorded
behind it."""


class Fetched(Protocol):
    """A tensor's content, on its way to the host."""

    def numpy(self) -> NDArray[Any]:
        """The content, as soon as it is there."""
        ...


class Copies(Protocol):
    """Copies between the host and one device, in the order of the device's queue."""

    def upload(self, values: NDArray[Any]) -> Tensor:
        """An array on the device; the array itself is free at once."""
        ...

    def fetch(self, tensor: Tensor) -> Fetched:
        """Start the copy of a tensor to the host. No more than ``FETCHES`` may be untaken."""
        ...

    def mirror(self, tensor: Tensor) -> Tensor:
        """Host memory for a tensor's content that stays: the tensor itself where the host can read it."""
        ...

    def hold(self, size: int) -> Tensor:
        """Host memory of so many bytes that stays, for copies between it and the device."""
        ...

    def carry(self, target: Tensor, source: Tensor) -> None:
        """Start a copy between a tensor and its mirror."""
        ...

    def fences(self, count: int) -> list[Fence]:
        """Fences to mark the ends of such copies; none where nothing is to be waited for."""
        ...


@dataclass(frozen=True, slots=True)
class ArenaSizes:
    """Bytes of the parts of an arena."""

    stretch: int
    """Size of the largest piece in which something goes to the device."""
    fetched: int
    """Size of the largest result that is fetched."""
    mirrored: int
    """Size of all mirrors and of all that is held, each rounded up to ``ALIGNMENT``."""

    @property
    def total(self) -> int:
        """All of it."""
        return STRETCHES * self.stretch + FETCHES * _aligned(self.fetched) + self.mirrored


def arena_sizes(*, largest_upload: int, fetched: int, mirrors: tuple[int, ...]) -> ArenaSizes:
    """Sizes of an arena for copies of up to so many bytes."""
    stretch = _aligned(min(max(largest_upload, LEAST_STRETCH), MOST_STRETCH))
    return ArenaSizes(stretch, fetched, sum(map(_aligned, mirrors)))


class CachedCopies:
    """Copies through torch's own cache of page-locked memory, which grows when a size comes that it has not seen. What
    a CPU and memory without contents use, and, on a GPU, measurements for comparison."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def upload(self, values: NDArray[Any]) -> Tensor:
        """An array on the device. Torch gives page-locked memory to nobody else before the copy is over."""
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        if self._device.type != "cuda":
            return tensor.to(self._device)
        return tensor.pin_memory().to(self._device, non_blocking=True)

    def fetch(self, tensor: Tensor) -> Fetched:
        """Start the copy."""
        if tensor.device.type != "cuda":
            return tensor
        host = self.mirror(tensor)
        self.carry(host, tensor)
        (fence,) = self.fences(1)
        fence.record()
        return _Cached(host, fence)

    def mirror(self, tensor: Tensor) -> Tensor:
        """Memory of the host. Of a tensor without memory, as in a rehearsal, nothing is fetched."""
        if tensor.device.type == "cpu":
            return tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")

    def hold(self, size: int) -> Tensor:
        """Memory of the host."""
        return torch.zeros(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")

    def carry(self, target: Tensor, source: Tensor) -> None:
        """Start a copy."""
        target.copy_(source, non_blocking=True)

    def fences(self, count: int) -> list[Fence]:
        """On a GPU events."""
        return [CudaFence() for _ in range(count)] if self._device.type == "cuda" else []


@dataclass(frozen=True, slots=True)
class _Cached:
    """Content in memory of its own."""

    host: Tensor
    fence: Fence

    def numpy(self) -> NDArray[Any]:
        """The content, as soon as it is there."""
        self.fence.wait()
        content: NDArray[Any] = self.host.numpy()
        return content


class ArenaCopies:
    """Copies through a fixed piece of page-locked memory. An array that is larger than a stretch goes in pieces; where
    all of the memory is under way, the host waits for the oldest copy."""

    def __init__(
        self,
        device: torch.device,
        sizes: ArenaSizes,
        memory: Tensor,
        make_fence: Callable[[], Fence],
        carry: Carry | None = None,
    ) -> None:
        """Divide the memory.

        Args:
            device: the other side of all copies.
            sizes: of the parts.
            memory: uint8, ``sizes.total`` of them, page-locked.
            make_fence: of the device's queue. All fences are made here and in ``fences``.
            carry: starts a copy; None: torch's own, without a wait.
        """
        self._device = device
        self._memory = memory
        self._bytes = memory.numpy()
        self._make_fence = make_fence
        self._carry = carry or _carry
        self._stretch = sizes.stretch
        self.ring = StretchRing(STRETCHES * sizes.stretch, [make_fence() for _ in range(FENCES)])
        self._used = self.ring.size
        self._rooms = [_Room(self._place(sizes.fetched), make_fence()) for _ in range(FETCHES)]
        self.num_copies = 0
        """Copies to the device that were started."""

    def upload(self, values: NDArray[Any]) -> Tensor:
        """An array on the device."""
        source = np.ascontiguousarray(values)
        if source.nbytes > self._stretch or not source.nbytes:
            return self._upload_pieces(source)
        first = self.ring.take(source.nbytes)
        last = first + source.nbytes
        self._bytes[first:last].view(source.dtype)[:] = source.reshape(-1)
        target = torch.empty(source.nbytes, dtype=torch.uint8, device=self._device)
        self._carry(target, self._memory[first:last])
        self.ring.mark()
        self.num_copies += 1
        return target.view(TORCH_TYPES[source.dtype]).view(source.shape)

    def _upload_pieces(self, source: NDArray[Any]) -> Tensor:
        given = torch.from_numpy(source)
        target = torch.empty_like(given, device=self._device)
        size = given.nbytes
        if not size:
            return target
        raw, placed = given.view(-1).view(torch.uint8).numpy(), target.view(-1).view(torch.uint8)
        for begin in range(0, size, self._stretch):
            end = min(begin + self._stretch, size)
            first = self.ring.take(end - begin)
            last = first + end - begin
            self._bytes[first:last] = raw[begin:end]
            self._carry(placed[begin:end], self._memory[first:last])
            self.ring.mark()
            self.num_copies += 1
        return target

    def fetch(self, tensor: Tensor) -> Fetched:
        """Start the copy."""
        assert self._rooms, "a result was fetched and never taken"
        room = self._rooms.pop()
        return _Fetched(room, self._rooms, tensor, self._carry)

    def mirror(self, tensor: Tensor) -> Tensor:
        """Host memory that stays."""
        return self._place(tensor.nbytes)[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    def hold(self, size: int) -> Tensor:
        """Host memory that stays: part of the arena, and zero."""
        held = self._place(size)[:size]
        held.zero_()
        return held

    def carry(self, target: Tensor, source: Tensor) -> None:
        """Start a copy between a tensor and its mirror."""
        self._carry(target, source)

    def fences(self, count: int) -> list[Fence]:
        """Fences to mark the ends of such copies."""
        return [self._make_fence() for _ in range(count)]

    def _place(self, size: int) -> Tensor:
        begin, self._used = self._used, self._used + _aligned(size)
        assert self._used <= len(self._memory), "an arena has room for all that was planned"
        return self._memory[begin : self._used]


@dataclass(frozen=True, slots=True)
class _Room:
    """A fixed place for a result."""

    memory: Tensor
    fence: Fence


class _Fetched:
    """Content on its way into a room, which is free again when the content was taken."""

    def __init__(self, room: _Room, rooms: list[_Room], tensor: Tensor, carry: Carry) -> None:
        self._room, self._rooms = room, rooms
        self._content: NDArray[Any] | None = None
        assert tensor.nbytes <= len(room.memory), "a result is no larger than was planned"
        self._view = room.memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        carry(self._view, tensor)
        room.fence.record()

    def numpy(self) -> NDArray[Any]:
        """The content, as soon as it is there."""
        if self._content is None:
            self._room.fence.wait()
            self._content = self._view.numpy().copy()
            self._rooms.append(self._room)
        return self._content


class CudaFence:
    """An event of a stream, the current one where none is given; a thread that waits for it sleeps."""

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._stream = stream
        # An event is made when it is first recorded, and none may be made once an engine serves.
        self.record()

    def record(self) -> None:
        """Mark the end of all that was started so far."""
        self._event.record(self._stream)

    def over(self) -> bool:
        """Whether the device has passed the mark."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Sleep until it has."""
        self._event.synchronize()


def make_copies(device: torch.device, sizes: ArenaSizes) -> Copies:
    """Copies of an engine: through an arena where there is a GPU."""
    if device.type != "cuda":
        return CachedCopies(device)
    memory = torch.empty(sizes.total, dtype=torch.uint8, pin_memory=True)
    return ArenaCopies(device, sizes, memory, CudaFence)


def _carry(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
