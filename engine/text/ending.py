"""How the processes of a text sandbox tell that one of theirs broke its lock-down: nobody outside sees it end.

gVisor tells the host of the first process alone. A grammar that ends its process with SIGSYS looks to its caller like
one that took too much, and somebody may have tried something; so whoever forked it says a line on stderr, which comes
to the operator's log.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress

BREACH = "made a system call beyond its lock-down"
LOOKS = 20
LOOK_S = 0.01
"""A process closes its pipes a moment before its end can be asked for."""


def how_ended(pid: int) -> str:
    """What to add to "it has ended": the breach, where it was one."""
    with suppress(ChildProcessError):
        for _ in range(LOOKS):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                return f": it {BREACH}" if _is_breach(status) else ""
            time.sleep(LOOK_S)
    return ""


def reap(_number: int, _frame: object) -> None:
    """A handler of SIGCHLD: take the children that have ended, and tell of those that broke their lock-down."""
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            if _is_breach(found[1]):
                sys.stderr.write(f"engine.text: a grammar's process {BREACH} and was ended\n")


def _is_breach(status: int) -> bool:
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSYS
