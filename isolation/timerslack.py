"""Keeps gVisor's own timers from waking the machine 2,500 times a second.

The sentry of 2024 measures its context switches in periods of 400 microseconds, asleep or at work (gVisor issue 13361,
mended in 2026). On one core each of these wake-ups interrupts the engine: a third to a half more processor time for a
step (measured), and 2 to 4 % of a core at rest. The kernel may let timers of a thread ring later, to ring several at
once (PR_SET_TIMERSLACK of prctl(2)), and children inherit how much later. Wake-ups by a descriptor or a futex are not
timers and stay as quick as they are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

SENTRY_SLACK_NS = 4_000_000
"""4 ms: idle wake-ups fall to a third or less, and the overhead of a busy engine from 50 to 5 % of its processor time.
Not more: at 50 ms throughput fell, perhaps since Go's scheduler watches itself by such a timer. A guest's sleep may end
that much later; ours are waits for a bell, with a second look after 100 ms."""

_PR_SET_TIMERSLACK = 29
_PR_GET_TIMERSLACK = 30


@contextmanager
def timer_slack(slack_ns: int) -> Iterator[None]:
    """Let the timers of programs started by this thread ring late, for the time of a ``with`` block.

    A kernel that has no such call leaves them as they are; nothing depends on it but processor time.
    """
    libc = ctypes.CDLL(None)
    before = libc.prctl(_PR_GET_TIMERSLACK, 0, 0, 0, 0)
    libc.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(slack_ns), 0, 0, 0)
    try:
        yield
    finally:
        if before > 0:
            libc.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(before), 0, 0, 0)
