"""Processor time and memory of a process tree: for a sandbox the sentry and its stubs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from isolation.host.kernel_file import read_kernel_file
from isolation.host.reaper import descendants

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_USER, _SYSTEM = 11, 12
"""Indices of utime and stime after the command's closing bracket (proc_pid_stat(5), fields 14 and 15)."""


def processor_seconds(pid: int) -> float:
    """Return user and system seconds of a process tree, in ticks of 10 ms. Ended processes no longer count."""
    return spent_seconds((pid, *descendants(pid)))


def spent_seconds(pids: Iterable[int]) -> float:
    """Return user and system seconds of these processes, in ticks of 10 ms. Ended processes no longer count."""
    return sum(map(_spent, pids))


def proportional_bytes(pid: int) -> int:
    """Return the memory of a process tree in bytes, each shared page counted once (proc_pid_smaps(5), Pss of
    smaps_rollup)."""
    return sum(_proportion(one) for one in (pid, *descendants(pid)))


def _proportion(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    found = re.search(r"^Pss: +(\d+) kB$", text, re.MULTILINE)
    return int(found[1]) << 10 if found else 0


def _spent(pid: int) -> float:
    try:
        fields = read_kernel_file(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[_USER]) + int(fields[_SYSTEM])) * _TICK_S
