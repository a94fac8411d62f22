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
import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import NamedTuple, NoReturn

from engine.errors import LockdownError
from engine.sandbox.allowed_calls import Call
from engine.sandbox.filter import MACHINES, compile_filter

_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_SET_MODE_FILTER = 1
_FLAG_TSYNC = 1
"""The filter binds threads that exist already."""

_MAPS = "/proc/self/maps"

_LIBC = ctypes.CDLL(None, use_errno=True)


class CompiledFilter(NamedTuple):
    """A list for one machine, ready to be put on."""

    seccomp: int
    """Number of seccomp(2) there."""
    code: bytes


class _Program(ctypes.Structure):
    """``struct sock_fprog``."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def lock_down(calls: Sequence[Call]) -> None:
    """Allow these calls only, in all threads, for good.

    Raises:
        LockdownError: the kernel takes no filter, or the machine has no list; nothing has changed but "no new
            privileges".
    """
    program = compiled(calls)
    prepare()
    narrow(program)


def prepare() -> None:
    """Bring the process into the state in which it takes a filter: no warnings, no handlers that a filter could meet,
    no new privileges.

    Raises:
        LockdownError: the kernel keeps new privileges possible.
    """
    warnings.simplefilter("ignore")
    # No handler, so no return from one: a program that forges such a return could hide SIGSYS and outlive it.
    for number in (signal.SIGINT, signal.SIGSYS):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGSYS})
    if _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise LockdownError(f"the kernel refuses to forgo new privileges: {os.strerror(ctypes.get_errno())}")


def leave(status: int) -> NoReturn:
    """End the process at once. What libraries have registered for an orderly end is on no list: torch's compiler would
    import a module then, which ends a drained engine as if it had broken out."""
    sys.stderr.flush()
    os._exit(status)


def end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends; a parent that has ended already is none any more."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def compiled(calls: Sequence[Call]) -> CompiledFilter:
    """The list as ``narrow`` takes it, for this machine.

    Raises:
        LockdownError: nobody wrote down the numbers of its system calls.
    """
    machine = os.uname().machine
    if machine not in MACHINES:
        raise LockdownError(f"there is no list of system calls for {machine}")
    code = b"".join(instruction.encode() for instruction in compile_filter(calls, machine))
    return CompiledFilter(MACHINES[machine].seccomp, code)


def narrow(program: CompiledFilter) -> None:
    """Put a compiled list on top of what holds already, in all threads: what is allowed afterwards is on both. A
    process whose parent is locked down has nothing else to do; its parent's list must allow seccomp(2).

    Raises:
        LockdownError: the kernel takes no filter.
    """
    words = _Program(len(program.code) // 8, program.code)
    given = _LIBC.syscall(program.seccomp, _SET_MODE_FILTER, _FLAG_TSYNC, ctypes.byref(words))
    if given > 0:
        raise LockdownError(f"thread {given} has a filter of its own, which keeps this one off it")
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
