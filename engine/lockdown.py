"""Lock-down: from here on the process can make the listed system calls and no other.

A filter of seccomp(2) over all threads, which nothing can take off again. A call beyond the list ends the process at
once with SIGSYS, which the host sees as status 159 out of a sandbox and as signal 31 otherwise. gVisor's kernel takes
and enforces the filter too.

Everything that loads lazily must be there before: modules, compute threads, what warm-up runs. What Python itself
would do lazily is turned off here: a warning reads source files to show the line that it is about.
"""

from __future__ import annotations

import ctypes
import os
import signal
import warnings
from collections.abc import Iterable, Sequence

from engine.allowed_calls import Call
from engine.errors import LockdownError
from engine.filter import MACHINES, compile_filter

_PR_SET_NO_NEW_PRIVS = 38
_SET_MODE_FILTER = 1
_FLAG_TSYNC = 1
"""The filter binds threads that exist already."""

_MAPS = "/proc/self/maps"


class _Program(ctypes.Structure):
    """``struct sock_fprog``."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def lock_down(calls: Sequence[Call]) -> None:
    """Allow these calls only, in all threads, for good.

    Raises:
        LockdownError: the kernel takes no filter; nothing has changed but "no new privileges".
    """
    machine = os.uname().machine
    if machine not in MACHINES:
        raise LockdownError(f"there is no list of system calls for {machine}")
    warnings.simplefilter("ignore")
    # No handler, so no return from one: whoever forges such a return could hide SIGSYS and outlive it.
    for number in (signal.SIGINT, signal.SIGSYS):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGSYS})
    code = b"".join(instruction.encode() for instruction in compile_filter(calls, machine))
    program = _Program(len(code) // 8, code)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise LockdownError(f"the kernel refuses to forgo new privileges: {os.strerror(ctypes.get_errno())}")
    given = libc.syscall(MACHINES[machine].seccomp, _SET_MODE_FILTER, _FLAG_TSYNC, ctypes.byref(program))
    if given > 0:
        raise LockdownError(f"thread {given} has a filter of its own, which keeps the engine's off it")
    if given < 0:
        raise LockdownError(f"the kernel takes no system call filter: {os.strerror(ctypes.get_errno())}")


def generates_code(maps: Iterable[str]) -> bool:
    """Whether a library has written code into memory: executable pages that no file stands behind.

    Args:
        maps: the lines of /proc/PID/maps.
    """
    for line in maps:
        _address, rights, _offset, _device, _inode, *path = line.split(None, 5)
        if "x" in rights and not path:
            return True
    return False


def read_maps() -> list[str]:
    """The memory map of this process; only before lock-down."""
    with open(_MAPS, encoding="utf-8", errors="replace") as file:
        return file.readlines()
