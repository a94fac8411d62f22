"""Descriptors that the gateway holds for hand-overs, so that a sandbox can be taken when all others are in use."""

from __future__ import annotations

import contextlib
import os

NUM_SPARE = 8
"""Descriptors held: four for each sandbox of a model (segment, its mapping, two ends of doorbells), and both may come
at once. Limits on connections leave more than that free (``servers.RESERVED_DESCRIPTORS``); these are held against what
no limit counts."""


class SpareDescriptors:
    """Descriptors of the null device that only take up numbers."""

    def __init__(self, count: int = NUM_SPARE) -> None:
        self._count = count
        self._held: list[int] = []

    def fill(self) -> None:
        """Hold as many as there shall be, or as can be had."""
        with contextlib.suppress(OSError):
            while len(self._held) < self._count:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def free(self) -> None:
        """Give their numbers to what is about to come; idempotent."""
        held, self._held = self._held, []
        for fd in held:
            os.close(fd)
