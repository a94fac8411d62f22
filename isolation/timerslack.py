"""Keeps gVisor's own timers from waking the machine 2,500 times a second.

The sentry of 2024 measures its context switches in periods of 400 microseconds, asleep or at work (gVisor issue 13361,
mended in 2026). On one core each of these wake-ups interrupts the engine: a third to a half more processor time for a
step (measured), and 2 to 4 % of a core at rest. The kernel may let timers of a thread ring later, to ring several at
once (timerslack_ns in proc(5)); threads started later have it from the one that starts them. Wake-ups by a descriptor
or a futex are not timers and stay as quick as they are. A start is full of timers and is left alone: it would take
twice as long (measured).
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

SENTRY_SLACK_NS = 1_000_000
"""1 ms: an engine's processor seconds in a sandbox fall by a quarter to a third, and on a contended core one token of
one idle request comes in 6 instead of 25 ms. 4 ms saves nothing more there and takes 11 ms; 10 ms takes 18 (all
measured)."""

BUSY_SLACK_NS = 20_000_000
"""20 ms, while the guest computes all the time: then nobody waits for one of these timers, and each costs a virtual
machine two exits. On one core the engine reaches 0.97 of the rate outside instead of 0.92 (measured)."""

_ROUNDS = 2
"""A thread that is started while the first round goes on may have been missed by it."""

_GONE = (errno.ENOENT, errno.ESRCH)
_REFUSED = (errno.EACCES, errno.EPERM)


def let_timers_ring_late(pid: int, slack_ns: int = SENTRY_SLACK_NS) -> bool:
    """Set the slack of all threads of a process; False where it has ended or the kernel does not let us.

    Needs CAP_SYS_NICE over the process, which whoever made its user namespace has. Nothing but processor time depends
    on it.
    """
    try:
        for _ in range(_ROUNDS):
            for thread in os.listdir(f"/proc/{pid}/task"):
                _set(int(thread), slack_ns)
    except OSError as error:
        if error.errno in (*_GONE, *_REFUSED):
            return False
        raise
    return True


def _set(thread: int, slack_ns: int) -> None:
    # The file stands in the thread's own directory below /proc, which no listing shows, and in no other.
    try:
        Path(f"/proc/{thread}/timerslack_ns").write_text(str(slack_ns))
    except OSError as error:
        if error.errno not in _GONE:
            raise
