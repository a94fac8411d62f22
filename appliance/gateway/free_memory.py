"""Free memory of the gateway goes back to the system: what a flood made it take is not kept for good.

The C library gives back by itself what lies at the end of its heap, and pieces that are large
(``appliance.operator.child.RETURNED_BYTES``). What is freed between smaller pieces that stay is given back when it is
asked to (malloc_trim(3)): 20 ms for 100 MB, so only when the process has grown, and for a minute after: what a flood
took is free only when the flood ends, and the process does not grow any more then.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from appliance.common.aligned_sleep import aligned_sleep

PERIOD_S = 10.0
"""Between two looks; a flood's memory is to be back within a minute."""

GROWN_BYTES = 8 << 20
"""Growth since the last time at which free memory is given back: a quarter of what a flood may leave."""

STATM_BYTES = 256
"""More than seven numbers have."""

LOOKS_AFTER = 6
"""Looks after one that found growth at which free memory is given back too: a minute."""


class FreeMemory:
    """Gives free memory back when the process has grown, and for ``LOOKS_AFTER`` more looks."""

    def __init__(self, resident: Callable[[], int], trim: Callable[[], None]) -> None:
        """``resident``: the process's memory in bytes; ``trim``: gives back what is free."""
        self._resident = resident
        self._trim = trim
        self._before = resident()
        self._left = 0
        """Looks at which memory is still given back, whether the process has grown or not."""

    def look(self) -> bool:
        """Give free memory back if it is time to; True when it was."""
        now = self._resident()
        if now >= self._before + GROWN_BYTES:
            self._left = LOOKS_AFTER + 1
        if not self._left:
            self._before = min(self._before, now)
            return False
        self._left -= 1
        self._trim()
        self._before = self._resident()
        return True


@contextmanager
def opened_statm() -> Iterator[int]:
    """Open this process's ``/proc/self/statm``, once for all looks: a flood may take the last descriptor, and what it
    took is to be given back after it."""
    with Path("/proc/self/statm").open("rb", buffering=0) as statm:
        yield statm.fileno()


def resident_bytes(statm: int) -> int:
    """Return the resident memory of this process, from ``opened_statm`` (proc_pid_statm(5))."""
    return int(os.pread(statm, STATM_BYTES, 0).split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def keep_giving_back() -> None:
    """Look every ``PERIOD_S``; ends by cancellation, or at once where the C library has no such call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return
    with opened_statm() as statm:
        memory = FreeMemory(partial(resident_bytes, statm), lambda: trim(0))
        while True:
            await aligned_sleep(PERIOD_S)
            memory.look()
