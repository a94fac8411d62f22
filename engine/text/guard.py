"""Runs one piece of untrusted work within a time and an amount of memory.

A chat template is a program of the model's maker, fed with a tenant's messages. Time is kept by
the interval timer (setitimer(2)), whose signal handler raises between two bytecodes; most
operations of C that would run longer are bounded by memory. Memory is kept by the soft limit on
the address space (RLIMIT_AS, setrlimit(2)), under which an allocation fails as ``MemoryError``. An
operation of C that heeds neither (comparing lists that hold themselves many times over) ends the
process: a second timer counts its processor time and is left to its signal's default action. The
host then boots a fresh worker.

The process has one thread and works on one request at a time: timer, handler and limit are the
process's own. They are put back as they were.
"""

from __future__ import annotations

import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import TypeVar

from engine.text.own_size import OwnSize

Result = TypeVar("Result")

RING_AGAIN_S = 0.05
"""Seconds after which the alarm rings again, in case code swallowed the first exception."""

GRACE_S = 2.0
"""Seconds of processor time beyond the limit after which the process itself ends."""


class OutOfTimeError(Exception):
    """The work took longer than it may."""


class _Alarm(BaseException):
    """Raised by the signal handler; outside ``Exception``, so that the work cannot catch it."""


def run_guarded(work: Callable[[], Result], *, seconds: float, memory_bytes: int) -> Result:
    """What ``work`` returns, if it ends within ``seconds`` and ``memory_bytes`` of new memory.

    Main thread only. Without /proc the memory is not bounded here, and the sandbox's own limit
    holds.

    Raises:
        OutOfTimeError: the time is over.
        MemoryError: the memory is used up.
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
    used = _address_space_used()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    bounds = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    if used is not None:
        wanted = min([used + more_bytes, *bounds])
        resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _address_space_used() -> int | None:
    size = own_size()
    return None if size is None else size.bytes()


@cache
def own_size() -> OwnSize | None:
    """This process's size, or None where /proc is not there. The first call opens its file, so it comes before
    lock-down."""
    try:
        return OwnSize()
    except OSError:
        return None
