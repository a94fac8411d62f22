"""Reports of lock-down violations by processes inside a text sandbox, whose end is not visible outside.

gVisor reports only the first process to the host. A grammar process ended by SIGSYS looks to its caller like one that
exceeded a limit, but may indicate an attack; so the process that forked it prints a line on stderr, which reaches the
operator's log.
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
"""Delay in seconds: a process closes its pipes a moment before its exit status is available."""


def how_ended(pid: int) -> str:
    """Return a suffix for "it has ended" that names a lock-down violation, if it was one."""
    with suppress(ChildProcessError):
        for _ in range(LOOKS):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                return f": it {BREACH}" if _is_breach(status) else ""
            time.sleep(LOOK_S)
    return ""


def reap(_number: int, _frame: object) -> None:
    """Handle SIGCHLD: reap ended children, and report those that violated their lock-down."""
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            if _is_breach(found[1]):
                sys.stderr.write(f"engine.text: a grammar's process {BREACH} and was ended\n")


def _is_breach(status: int) -> bool:
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSYS
