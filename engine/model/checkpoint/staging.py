"""Memory that weights go through on their way from files to where they cannot be read in place.

``Staging`` is one buffer: a stretch is read, then copied, then the next one is read. ``RingStaging`` has several places
and does both at once: threads read the next stretches while those before are copied. Where its memory is page-locked, a
GPU takes a stretch itself, at the speed of its bus, and only the place's next stretch waits for it.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.errors import ModelLoadError
from engine.model.checkpoint.safetensors import SafetensorsFile
from engine.model.layers.parallel import Span

STAGING_BYTES = 1 << 26
"""Size of the buffer for data that cannot be read in place: columns, other dtypes, other devices."""

READERS = 4
"""Threads that read a stretch together: one copies out of the kernel's memory at a few GB/s, and a GPU takes more."""

LEAST_SHARED = 1 << 23
"""Bytes of a stretch from which on they do."""

RING_READERS = 8
"""Threads that read for a ring, a stretch each: at some 6 GB/s for one, as much as a bus of 50 GB/s takes."""

PLACE_BYTES = 1 << 23
"""Bytes of a place in a ring. A reader takes the interpreter's lock twice a stretch, which has to be rare."""

PLACES = 16
"""Places of a ring: one for each reader, and as many whose copies are under way. All together are a power of two, as
torch takes page-locked memory in powers of two."""


def check_finite(name: str, target: Tensor) -> None:
    """Refuse NaN and infinity, whether published or caused by a dtype that is too narrow; they would spread to every
    output.

    Raises:
        ModelLoadError: the tensor has one; the message names the tensor.
    """
    if target.numel() and target.is_floating_point() and not bool(_finite(target)):
        raise _not_finite(name, target.dtype)


def _finite(target: Tensor) -> Tensor:
    # Minimum and maximum are NaN when any element is NaN.
    least, largest = torch.aminmax(target)
    return least.isfinite() & largest.isfinite()


def _not_finite(name: str, dtype: torch.dtype) -> ModelLoadError:
    kind = str(dtype).removeprefix("torch.")
    return ModelLoadError(f"tensor {name} holds a number that is not finite or too large for {kind}")


@dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of a tensor in a file."""

    begin: int
    """Where it begins, in bytes from the tensor's own begin."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    inner: tuple[Span, ...]
    """What is kept of each axis but the first."""

    @property
    def nbytes(self) -> int:
        """Size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize

    def kept(self, piece: Tensor) -> Tensor:
        """What is kept, of the stretch as a tensor."""
        return piece[(slice(None), *(slice(*span) for span in self.inner))]


class Staging:
    """The buffer that data goes through, and threads that read into it.

    One buffer serves a whole model: memory that is taken anew for each piece costs a fault for each of its pages, which
    is as much as reading it.
    """

    def __init__(self, pool: ThreadPoolExecutor | None = None) -> None:
        """``pool``: of ``READERS`` threads; None: the caller's own reads."""
        self._memory: Tensor | None = None
        self._pool = pool
        self.stretch = STAGING_BYTES
        """Bytes of a stretch, at most, where a row has no more."""

    def carry(self, file: SafetensorsFile, name: str, stretch: Stretch, target: Tensor) -> None:
        """Read a stretch and copy what is kept of it; the buffer is free then.

        Raises:
            ModelLoadError: the file ends early.
        """
        piece = self._room(stretch)
        self._read(file, name, stretch.begin, bytes_of(piece))
        # Waits for the copy's end: the buffer is used again.
        target.copy_(stretch.kept(piece))

    def check(self, name: str, target: Tensor) -> None:
        """Check a tensor whose stretches were all carried (``check_finite``).

        Raises:
            ModelLoadError: it holds a number that is not finite.
        """
        check_finite(name, target)

    def then(self, work: Callable[[], None]) -> None:
        """Do something that needs the stretches that were carried so far."""
        work()

    def finish(self) -> None:
        """Wait for all that is under way.

        Raises:
            ModelLoadError: a file ended early, or a tensor that was to be checked holds a number that is not finite.
        """

    def close(self) -> None:
        """Give the memory back; what is under way is over then, and what failed of it is not told."""
        self._memory = None

    def _room(self, stretch: Stretch) -> Tensor:
        """A tensor in the buffer, valid until the next one."""
        size = stretch.nbytes
        if self._memory is None or len(self._memory) < size:
            self._memory = torch.empty(max(size, STAGING_BYTES if self._pool is not None else size), dtype=torch.uint8)
        return self._memory[:size].view(stretch.dtype).view(stretch.shape)

    def _read(self, file: SafetensorsFile, name: str, offset: int, target: memoryview) -> None:
        """Fill ``target`` with the tensor's bytes from ``offset`` on.

        Raises:
            ModelLoadError: the file ends early.
        """
        pool = self._pool
        if pool is None or target.nbytes < LEAST_SHARED or file.tensors[name].coded is not None:
            file.read_stretch(name, offset, target)
            return
        share = -(-target.nbytes // READERS)
        begins = range(0, target.nbytes, share)
        parts = [pool.submit(file.read_stretch, name, offset + at, target[at : at + share]) for at in begins]
        for part in parts:
            part.result()


Copy = Callable[[Tensor, Tensor], object]
"""Starts a copy of the second tensor into the first one; it ends some time before a mark that is recorded behind it."""


class Mark(Protocol):
    """A mark in the device's queue, which can be set again."""

    def record(self) -> None:
        """Mark the end of all that was started so far."""
        ...

    def wait(self) -> None:
        """Sleep until the device has passed it."""
        ...


@dataclass(slots=True)
class RingTimes:
    """What the thread that starts copies waited for: what a reading took so long for."""

    carried_bytes: int = 0
    read_s: float = 0.0
    """Seconds in which the next stretch to be copied was not read yet."""
    copy_s: float = 0.0
    """Seconds in which no place was free, since copies were under way."""


@dataclass(slots=True)
class _Reading:
    """A stretch that is being read into a place."""

    place: int
    piece: Tensor
    stretch: Stretch
    target: Tensor
    done: Future[None]


@dataclass(frozen=True, slots=True)
class _Check:
    """A tensor to be checked as soon as the stretches before have been copied."""

    name: str
    target: Tensor


@dataclass(frozen=True, slots=True)
class _Then:
    """Work that is to be started as soon as the copies of the stretches before have been."""

    work: Callable[[], None]


class RingStaging(Staging):
    """Places that stretches go through, several at once, in the order in which they were asked for. One thread calls
    it; copies are made on its current stream."""

    def __init__(
        self, pool: ThreadPoolExecutor, memory: Tensor, marks: Sequence[Mark], copy: Copy | None = None
    ) -> None:
        """Divide the memory.

        Args:
            pool: threads that read.
            memory: uint8 of the host; page-locked, or copies wait for themselves.
            marks: one for each place, of the stream on which copies are made.
            copy: starts a copy; None: torch's own, without a wait.
        """
        super().__init__(pool)
        self.stretch = len(memory) // len(marks)
        self.times = RingTimes()
        self._readers = pool
        self._copy = copy or _copy
        self._places = [memory[at * self.stretch : (at + 1) * self.stretch] for at in range(len(marks))]
        self._marks = tuple(marks)
        self._free = deque(range(len(marks)))
        self._waiting: deque[_Reading | _Check | _Then] = deque()
        """In the order in which they are to be copied and checked."""
        self._copying: deque[int] = deque()
        """Places, oldest first."""
        self._checked: list[tuple[str, torch.dtype, Tensor]] = []
        """Whether each checked tensor is finite, as a number where its copies went."""

    def carry(self, file: SafetensorsFile, name: str, stretch: Stretch, target: Tensor) -> None:
        """Begin to read a stretch; it is copied later, at the latest in ``finish``.

        Raises:
            ModelLoadError: a file ended early, this one or one that was asked for before.
        """
        if stretch.nbytes > self.stretch or file.tensors[name].coded is not None:
            super().carry(file, name, stretch, target)
            return
        place = self._take()
        piece = self._places[place][: stretch.nbytes].view(stretch.dtype).view(stretch.shape)
        done = self._readers.submit(file.read_stretch, name, stretch.begin, bytes_of(piece))
        self._waiting.append(_Reading(place, piece, stretch, target, done))
        self.times.carried_bytes += stretch.nbytes

    def check(self, name: str, target: Tensor) -> None:
        """Check the tensor when its stretches have been copied; ``finish`` tells."""
        if target.numel() and target.is_floating_point():
            self._waiting.append(_Check(name, target))

    def then(self, work: Callable[[], None]) -> None:
        """Do something behind the copies of the stretches that were carried so far, on the stream of copies."""
        self._waiting.append(_Then(work))
        # What was read at once, without a place, waits for nobody: it must not pile up.
        while self._waiting and self._is_due(self._waiting[0]):
            self._start()

    def finish(self) -> None:
        """Copy and check all that is waiting, and wait for its end.

        Raises:
            ModelLoadError: as promised.
        """
        while self._waiting:
            self._start()
        while self._copying:
            self._release()
        if self._checked:
            # One answer for all tensors: each of them asked alone would wait for the copies in front of it.
            finite = torch.stack([flag for _, _, flag in self._checked]).cpu().tolist()
            for (name, dtype, _), good in zip(self._checked, finite, strict=True):
                if not good:
                    raise _not_finite(name, dtype)
            self._checked.clear()

    def close(self) -> None:
        """Wait for reads and copies, and give the memory back."""
        for one in self._waiting:
            if isinstance(one, _Reading) and not one.done.cancel():
                one.done.exception()
        self._waiting.clear()
        while self._copying:
            self._release()
        self._checked.clear()
        self._places.clear()
        super().close()

    def _take(self) -> int:
        """A free place, as soon as there is one."""
        while self._waiting and self._is_due(self._waiting[0]):
            self._start()
        while not self._free:
            if self._copying:
                self._release()
            else:
                self._start()
        return self._free.popleft()

    def _is_due(self, one: _Reading | _Check | _Then) -> bool:
        return not isinstance(one, _Reading) or one.done.done()

    def _start(self) -> None:
        """Copy or check what has waited longest."""
        one = self._waiting.popleft()
        if isinstance(one, _Check):
            self._checked.append((one.name, one.target.dtype, _finite(one.target)))
            return
        if isinstance(one, _Then):
            one.work()
            return
        began = time.perf_counter()
        one.done.result()
        self.times.read_s += time.perf_counter() - began
        self._copy(one.target, one.stretch.kept(one.piece))
        self._marks[one.place].record()
        self._copying.append(one.place)

    def _release(self) -> None:
        """Wait for the oldest copy; its place is free then."""
        place = self._copying.popleft()
        began = time.perf_counter()
        self._marks[place].wait()
        self.times.copy_s += time.perf_counter() - began
        self._free.append(place)


@dataclass(frozen=True, slots=True)
class Route:
    """How weights go to a GPU; what a start has by default is what was the fastest."""

    locked: bool = True
    """Through a ring of page-locked memory; else through one buffer of ordinary memory, from which the driver copies
    by way of its own."""
    readers: int = RING_READERS
    place_bytes: int = PLACE_BYTES
    places: int = PLACES


USUAL_ROUTE = Route()


@contextmanager
def staging_for(device: torch.device) -> Iterator[Staging]:
    """The buffer of a model's tensors; with threads where they go to another device, whose ends this waits for."""
    if device.type in ("cpu", "meta"):
        yield Staging()
        return
    with ThreadPoolExecutor(READERS, thread_name_prefix="weights-read") as pool:
        yield Staging(pool)


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous host tensor as bytes."""
    return tensor.view(torch.uint8).numpy().reshape(-1).data
