"""Runs untrusted work with limits on time and memory.

A chat template is a program written by the model's author, and its input is a tenant's messages. Time is limited by the
interval timer (setitimer(2)), whose signal handler raises between two bytecodes; most C operations that would run
longer are bounded by memory. Memory is limited by the soft limit on the address space (RLIMIT_AS, setrlimit(2)), under
which an allocation fails as ``MemoryError``. A C operation that respects neither (comparing lists that contain
themselves many times) ends the process: a second timer counts its processor time, and its signal keeps the default
action. The host then boots a fresh worker.

The process has one thread and handles one request at a time: timer, handler and limit are process-wide. They are
restored afterwards.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import TypeVar

Result = TypeVar("Result")

RING_AGAIN_S = 0.05
"""Interval in seconds at which the alarm repeats, in case code swallowed the first exception."""

GRACE_S = 2.0
"""Seconds of processor time beyond the limit after which the process itself ends."""

_STATM = "/proc/self/statm"
_READ_BYTES = 256
"""Read size in bytes for a line of seven numbers; a larger buffer would count itself."""

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class OutOfTimeError(Exception):
    """The work exceeded its time limit."""


class _Alarm(BaseException):
    """Raised by the signal handler; not an ``Exception``, so that the work cannot catch it."""


def run_guarded(work: Callable[[], Result], *, seconds: float, memory_bytes: int) -> Result:
    """Return the result of ``work``, if it ends within ``seconds`` and ``memory_bytes`` of new memory.

    Main thread only. Without /proc, memory is not limited here, and the sandbox's own limit applies.

    Raises:
        OutOfTimeError: the time limit is exceeded.
        MemoryError: the memory limit is exceeded.
    """
    armed = True

    def ring(_signal: int, _frame: FrameType | None) -> None:
        if armed:
            raise _Alarm

    start = time.monotonic()
    old_handler = signal.signal(signal.SIGALRM, ring)
    old_left, old_interval = signal.getitimer(signal.ITIMER_REAL)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, RING_AGAIN_S)
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds + GRACE_S)
        with _address_space(memory_bytes):
            try:
                return work()
            finally:
                armed = False
    except _Alarm:
        raise OutOfTimeError(f"took longer than {seconds:g} s") from None
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        left = max(old_left - (time.monotonic() - start), RING_AGAIN_S) if old_left else 0.0
        signal.setitimer(signal.ITIMER_REAL, left, old_interval)
        signal.signal(signal.SIGALRM, old_handler)


@contextmanager
def _address_space(more_bytes: int) -> Iterator[None]:
    size = own_size()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    bounds = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    if size is not None:
        wanted = min([size.bytes() + more_bytes, *bounds])
        resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


class OwnSize:
    """Address space of the process that creates it; after a fork it still reports the parent.

    Its file of /proc stays open: a locked-down process cannot open files, and gVisor keeps 115 KiB for each process
    that looked at its own /proc.

    Raises:
        OSError: /proc is not available.
    """

    def __init__(self) -> None:
        self.file = os.open(_STATM, os.O_RDONLY | os.O_CLOEXEC)

    def bytes(self) -> int:
        """Return the current address space in bytes (as counted by RLIMIT_AS)."""
        return int(os.pread(self.file, _READ_BYTES, 0).split()[0]) * _PAGE_BYTES


@cache
def own_size() -> OwnSize | None:
    """Return this process's size, or None without /proc. The first call opens its file, so it must precede
    lock-down."""
    try:
        return OwnSize()
    except OSError:
        return None
