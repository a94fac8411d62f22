"""A GPU's memory and its queue, told by a model of them: what would have been asked of the driver, and when copies end.

``ShadowAllocator`` repeats torch's caching allocator: two pools, the best fit, splitting, and pieces that are put
together again. It sees every tensor that an operation gives, on a CPU, from its making to its end. It does not see what
a kernel or a library takes inside of one operation; on a card that is part of what ``TorchMemory`` measures.

``LateQueue`` ends copies as late as their fences allow, and notices when the host's side of one was written before.
"""

from __future__ import annotations

import random
import weakref
from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from engine.backends.cuda.runtime.device_memory import LEAST_SMALL, SMALL_BYTES

POISON = 0xA5
"""In memory whose copy is over or has not begun."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers of torch's allocator (``c10/core/AllocatorConfig.h``), divided so that a toy's tensors are small and
    large ones as a model's are."""

    divisor: int = 1

    @property
    def least(self) -> int:
        """What sizes are rounded up to."""
        return max(8, 512 // self.divisor)

    @property
    def small(self) -> int:
        """Largest size of the pool of small ones."""
        return SMALL_BYTES // self.divisor

    def segment(self, size: int) -> int:
        """What is asked of the driver for a tensor of this size."""
        if size <= self.small:
            return 2 * self.small
        if size < 10 * self.small:
            return 20 * self.small
        return -(-size // (2 * self.small)) * 2 * self.small


@dataclass(slots=True, eq=False)
class Piece:
    """Part of a segment."""

    segment: int
    begin: int
    size: int
    large: bool
    free: bool = True
    before: Piece | None = field(default=None, repr=False)
    after: Piece | None = field(default=None, repr=False)

    @property
    def key(self) -> tuple[int, int, int]:
        """The best fit comes first."""
        return self.size, self.segment, self.begin


class ShadowAllocator:
    """Memory by torch's rules."""

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes
        self._free: dict[bool, list[tuple[tuple[int, int, int], Piece]]] = {False: [], True: []}
        self.num_taken = 0
        self.held = {False: 0, True: 0}
        self.peak = {False: 0, True: 0}

    def take(self, size: int) -> Piece:
        """Memory of a tensor."""
        sizes = self._sizes
        needed = -(-size // sizes.least) * sizes.least
        large = needed > sizes.small
        place = next((at for at, (key, _) in enumerate(self._free[large]) if key[0] >= needed), None)
        if place is None:
            self.num_taken += 1
            piece = Piece(self.num_taken, 0, sizes.segment(needed), large)
        else:
            piece = self._free[large].pop(place)[1]
        left = piece.size - needed
        if left > sizes.small if large else left >= sizes.least:
            rest = Piece(piece.segment, piece.begin + needed, left, large, before=piece, after=piece.after)
            if rest.after is not None:
                rest.after.before = rest
            piece.size, piece.after = needed, rest
            insort(self._free[large], (rest.key, rest))
        piece.free = False
        self.held[large] += piece.size
        self.peak[large] = max(self.peak[large], self.held[large])
        return piece

    def release(self, piece: Piece) -> None:
        """The tensor is gone."""
        self.held[piece.large] -= piece.size
        for side in (piece.before, piece.after):
            if side is not None and side.free:
                self._free[side.large].remove((side.key, side))
        if (before := piece.before) is not None and before.free:
            before.size, before.after = before.size + piece.size, piece.after
            if piece.after is not None:
                piece.after.before = before
            piece = before
        if (after := piece.after) is not None and after.free:
            piece.size, piece.after = piece.size + after.size, after.after
            if after.after is not None:
                after.after.before = piece
        piece.free = True
        insort(self._free[piece.large], (piece.key, piece))

    def give_back(self) -> None:
        """Give segments back that nobody holds a piece of."""
        for large, pieces in self._free.items():
            self._free[large] = [one for one in pieces if one[1].before is not None or one[1].after is not None]


class ShadowMemory:
    """See ``DeviceMemory``."""

    def __init__(self, divisor: int) -> None:
        self.allocator = ShadowAllocator(Sizes(divisor))
        self._divisor = divisor
        self._held = {False: 0, True: 0}
        self.host_taken = 0
        """Page-locked pieces that were taken."""

    def begin(self) -> None:
        """Measure from here on."""
        self.allocator.peak = dict(self.allocator.held)
        self._held = dict(self.allocator.held)

    def settle(self, margin: float) -> None:
        """Take what was needed in one piece, as ``TorchMemory`` does."""
        large, small = (self.allocator.peak[pool] - self._held[pool] for pool in (True, False))
        unit = SMALL_BYTES // self._divisor
        self.allocator.give_back()
        sizes = [max(int(margin * large), 2 * unit), *[unit] * max(LEAST_SMALL, int(2 * margin * small) // unit)]
        for piece in [self.allocator.take(size) for size in sizes]:
            self.allocator.release(piece)

    def taken(self) -> int:
        """Calls of the driver."""
        return self.allocator.num_taken + self.host_taken


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, what operations give is memory of an allocator; not in a recording (``unwatched``), whose memory is its
    own."""

    def __init__(self, allocator: ShadowAllocator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._allocator = allocator
        self._live: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, _types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {one.untyped_storage()._cdata for one in _tensors((args, kwargs))}
        for one in _tensors(result):
            storage = one.untyped_storage()
            if storage._cdata not in given and storage._cdata not in self._live and storage.nbytes():
                self._live.add(storage._cdata)
                piece = self._allocator.take(storage.nbytes())
                weakref.finalize(storage, self._end, storage._cdata, piece)
        return result

    def unwatched(self, run: Callable[[int], None]) -> Callable[[int], None]:
        """A recorded step, whose memory is its own. Its operations do not come by here at all, which takes half the
        time."""

        def quiet(bucket: int) -> None:
            with _disable_current_modes():
                run(bucket)

        return quiet

    def _end(self, key: int, piece: Piece) -> None:
        self._live.discard(key)
        self._allocator.release(piece)


def _tensors(given: Any) -> list[Tensor]:
    if isinstance(given, Tensor):
        return [given]
    if isinstance(given, dict):
        given = list(given.values())
    return [one for some in given for one in _tensors(some)] if isinstance(given, list | tuple) else []


class LateQueue:
    """Copies in the order in which they were started. What goes to the device is there at once, for what is computed
    on it; its source must stay what it is until the copy is over. What comes to the host is there when it is over."""

    def __init__(self, draw: random.Random, *, honest: bool = True) -> None:
        """``honest``: whether fences tell the truth."""
        self._draw, self._honest = draw, honest
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._next = self._done = 0
        self.overwritten = 0
        """Copies whose bytes were changed while they were under way."""

    def carry(self, target: Tensor, source: Tensor) -> None:
        """Start a copy; ``target`` is the host's where what it holds is not bytes."""
        if target.dtype == torch.uint8:
            given, before = source.numpy(), source.numpy().copy()
            target.copy_(source)

            def end() -> None:
                self.overwritten += not np.array_equal(given, before)
                given.fill(POISON)
        else:
            place, content = target.numpy(), source.numpy().copy()
            place.view(np.uint8).fill(POISON)

            def end() -> None:
                place[...] = content

        self._waiting.append((self._next, end))
        self._next += 1

    def advance(self, number: int) -> None:
        """End all copies that were started before this one."""
        while self._waiting and self._waiting[0][0] < number:
            self._waiting.popleft()[1]()
        self._done = max(self._done, number)

    def fence(self) -> LateFence:
        """A fence of this queue."""
        return LateFence(self)

    def now(self) -> int:
        """What a fence that is recorded now waits for."""
        return self._next

    def passed(self, number: int) -> bool:
        """Whether the copies before this are over; some end only when they are waited for."""
        if not self._honest:
            return True
        if self._draw.random() < 0.3:
            self.advance(self._draw.randint(self._done, self._next))
        return self._done >= number


class LateFence:
    """See ``Fence``."""

    def __init__(self, queue: LateQueue) -> None:
        self._queue, self._number = queue, 0

    def record(self) -> None:
        """Mark the end of all that was started so far."""
        self._number = self._queue.now()

    def over(self) -> bool:
        """Whether the device has passed the mark."""
        return self._queue.passed(self._number)

    def wait(self) -> None:
        """Pass it."""
        self._queue.advance(self._number)
