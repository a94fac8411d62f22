"""A device whose copies of blocks begin as early as their order allows, whatever its steps are at."""

from __future__ import annotations

import random
from collections import deque

import numpy as np
from torch import Tensor

from tests.engine.backends.cuda.runtime.late_side import LateSide
from tests.engine.backends.cuda.runtime.shadow import LateQueue

View = tuple[Tensor, ...]
"""Copies of all tensors of a storage."""


class ViewedQueue(LateQueue):
    """A late queue that keeps what a storage held behind each copy, until the device has passed the next one. Steps
    compute at once here; so a view is what the storage of a late device holds when it has passed that copy."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__(draw)
        self.memory: View = ()
        """The storage's tensors; none is kept as long as it is empty."""
        self._views: deque[tuple[int, View]] = deque()

    def carry(self, target: Tensor, source: Tensor) -> None:
        """Start a copy, and keep what the storage holds behind what was computed so far."""
        super().carry(target, source)
        if self.memory:
            self._views.append((self.now(), self.view()))

    def view(self) -> View:
        """What the storage holds when the device has done all that it was given."""
        return tuple(tensor.clone() for tensor in self.memory)

    def passed_view(self) -> tuple[int, View]:
        """The newest view that the device has passed, and its number; 0 and no tensors before there is one."""
        while len(self._views) > 1 and self._views[1][0] <= self._done:
            self._views.popleft()
        return self._views[0] if self._views and self._views[0][0] <= self._done else (0, ())


class EarlySide(LateSide):
    """Copies of blocks to the host read what the device has computed by the later of two moments: the last mark, and
    where the main queue is. Copies to the device are those of ``LateSide``."""

    def __init__(self, draw: random.Random, queue: ViewedQueue) -> None:
        super().__init__(draw)
        self._queue = queue
        self._marked: tuple[int, View] = (0, ())
        self.overtook = 0
        """Copies that read a block before what was computed of it."""

    def mark(self) -> None:
        """Keep what copies find that follow this mark."""
        super().mark()
        self._marked = self._queue.now(), self._queue.view()

    def carry(self, target: Tensor, source: Tensor) -> None:
        """Start a copy."""
        marked, passed = self._marked, self._queue.passed_view()
        view = passed[1] if passed[0] > marked[0] else marked[1]
        if self._after_all or not view:
            super().carry(target, source)
            return
        found = self._seen(view, source)
        self.overtook += not np.array_equal(found.numpy(), source.numpy())
        super().carry(target, found)

    def _seen(self, view: View, source: Tensor) -> Tensor:
        """Part of a view that stands where ``source`` does in the storage."""
        for tensor, seen in zip(self._queue.memory, view, strict=True):
            if tensor.untyped_storage().data_ptr() == source.untyped_storage().data_ptr():
                return seen.as_strided(source.shape, source.stride(), source.storage_offset())
        raise AssertionError("a copy is of a tensor of the storage")
