"""A queue of blocks' copies that end late."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import numpy as np
from torch import Tensor

from tests.engine.backends.cuda.runtime.shadow import POISON


class LateSide:
    """Copies in the order in which they were started, each made as late as fences and joins allow, from what its source
    holds then. Steps compute at once here, so whether a copy waits for them is counted and not seen."""

    def __init__(self, draw: random.Random, *, joins: bool = True) -> None:
        """``joins``: whether steps wait for copies."""
        self._draw, self._joins = draw, joins
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._next = self._done = 0
        self._marks = self._followed = 0
        self._after_all = False
        self.outs = self.ins = 0
        """Copies of each way."""
        self.joined = 0
        """Copies that a join had to end."""
        self.overwritten = 0
        """Copies to the device whose source was changed while they were under way."""

    def carry(self, target: Tensor, source: Tensor) -> None:
        """Start a copy; it is one to the device where it follows all steps."""
        place, given = target.numpy(), source.numpy()
        if self._after_all:
            self.ins += 1
            before = given.copy()
        else:
            assert self._followed == self._marks, "a copy would overtake blocks that are moved"
            self.outs += 1
            before = None
            place.view(np.uint8).fill(POISON)

        def end() -> None:
            self.overwritten += before is not None and not np.array_equal(given, before)
            place[...] = given

        self._waiting.append((self._next, end))
        self._next += 1

    def fence(self) -> LateSideFence:
        """A fence of this queue."""
        return LateSideFence(self)

    def mark(self) -> None:
        """Blocks were cleaned, moved, or computed by a pass for which nobody waits yet."""
        self._marks += 1

    def follow_mark(self) -> None:
        """What comes is read behind the last mark."""
        self._followed, self._after_all = self._marks, False

    def follow_all(self) -> None:
        """What comes is written behind all steps."""
        self._followed, self._after_all = self._marks, True

    def join(self) -> None:
        """End all copies before what comes."""
        if self._joins:
            self.joined += len(self._waiting)
            self.advance(self._next)

    def advance(self, number: int) -> None:
        """End all copies that were started before this one."""
        while self._waiting and self._waiting[0][0] < number:
            self._waiting.popleft()[1]()
        self._done = max(self._done, number)

    def now(self) -> int:
        """What a fence that is recorded now waits for."""
        return self._next

    def passed(self, number: int) -> bool:
        """Whether the copies before this are over; some end only when they are waited for."""
        if self._draw.random() < 0.4:
            self.advance(self._draw.randint(self._done, self._next))
        return self._done >= number


class LateSideFence:
    """See ``Fence``."""

    def __init__(self, side: LateSide) -> None:
        self._side, self._number = side, 0

    def record(self) -> None:
        """Mark the end of all that was started so far."""
        self._number = self._side.now()

    def over(self) -> bool:
        """Whether the queue has passed the mark."""
        return self._side.passed(self._number)

    def wait(self) -> None:
        """Pass it."""
        self._side.advance(self._number)
