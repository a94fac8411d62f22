"""Fixed memory that copies go through: stretches of it are given out in turn, and again when their copies are over.

Only the order is kept here; what a copy is and when it is over is told by *fences*. So a test can make copies end late,
and see whether somebody else's bytes are written where one is still under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

ALIGNMENT = 256
"""Bytes that stretches begin at multiples of: a copy engine reads lines of no more."""


class Fence(Protocol):
    """A mark in the device's queue, which can be set again."""

    def record(self) -> None:
        """Mark the end of all that was started so far."""
        ...

    def over(self) -> bool:
        """Whether the device has passed the mark."""
        ...

    def wait(self) -> None:
        """Sleep until it has."""
        ...


class StretchRing:
    """Stretches of a fixed piece of memory, in turn. One is taken, used, and marked; it is given out again when its
    fence is over. Where there is no room, or no fence, the host waits for the oldest one."""

    def __init__(self, size: int, fences: Sequence[Fence]) -> None:
        """Begin with all of it free.

        Args:
            size: bytes of the memory.
            fences: at least one; as many stretches can be under way.
        """
        self.size = size
        self._free = deque(fences)
        self._busy: deque[tuple[int, Fence]] = deque()
        """Oldest first: where a stretch ends, counted over all laps, and its fence."""
        self._written = self._released = 0
        """Bytes given out and taken back, counted over all laps; what is passed over at a lap's end counts too."""
        self.num_waits = 0
        """How often the host had to wait for the device."""

    def take(self, size: int) -> int:
        """Where a stretch of so many bytes begins; ``mark`` has to be called before the next one is taken."""
        needed = -(-size // ALIGNMENT) * ALIGNMENT
        assert needed <= self.size, "no stretch is larger than the memory"
        while not self._free:
            self._release()
        while True:
            if not self._busy:
                # Nothing is under way: from the beginning again.
                self._written = self._released = -(-self._written // self.size) * self.size
            begin = self._written % self.size
            passed = self.size - begin if begin + needed > self.size else 0
            if self._written + passed + needed - self._released <= self.size:
                self._written += passed + needed
                return 0 if passed else begin
            self._release()

    def mark(self) -> None:
        """All copies from or to the stretch that was taken last are started."""
        fence = self._free.popleft()
        fence.record()
        self._busy.append((self._written, fence))

    def _release(self) -> None:
        """Take the oldest stretch back, as soon as its copies are over."""
        end, fence = self._busy.popleft()
        if not fence.over():
            self.num_waits += 1
            fence.wait()
        self._released = end
        self._free.append(fence)
