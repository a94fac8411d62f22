"""Counts the system calls of one thread, by number, with ptrace(2): needs no root, no kernel feature and no tool.

The thread stops twice for every call, so times mean nothing while it is counted; the calls themselves are its own.
x86-64 only: the number is read where that machine keeps it.
"""

from __future__ import annotations

import collections
import ctypes
import os
import threading
from contextlib import suppress

PTRACE_CONT, PTRACE_SYSCALL, PTRACE_DETACH = 7, 24, 17
PTRACE_PEEKUSER, PTRACE_SEIZE, PTRACE_INTERRUPT = 3, 0x4206, 0x4207
PTRACE_O_TRACESYSGOOD = 1
ORIG_RAX_AT = 15 * 8
"""Offset of ``orig_rax`` in ``struct user``."""
WALL = 0x4000_0000
SYSCALL_STOP = 0x85
"""SIGTRAP with the bit of PTRACE_O_TRACESYSGOOD."""


class PtraceCounter:
    """A context manager around one thread; ``counts`` grows while it is entered."""

    def __init__(self, thread: int) -> None:
        self.counts: collections.Counter[int] = collections.Counter()
        self._thread = thread
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.ptrace.restype = ctypes.c_long
        self._libc.ptrace.argtypes = [ctypes.c_long] * 4
        self._ready = threading.Event()
        self._error = 0
        self._stop = False
        # The kernel knows one tracing thread, so one thread does all of it.
        self._tracer = threading.Thread(target=self._trace, daemon=True)

    def __enter__(self) -> PtraceCounter:
        self._tracer.start()
        self._ready.wait()
        if self._error:
            raise OSError(self._error, f"the thread cannot be counted: {os.strerror(self._error)}")
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._tracer.join(30)

    def _trace(self) -> None:
        ptrace, thread = self._libc.ptrace, self._thread
        if ptrace(PTRACE_SEIZE, thread, 0, PTRACE_O_TRACESYSGOOD) != 0:
            self._error = ctypes.get_errno()
            self._ready.set()
            return
        ptrace(PTRACE_INTERRUPT, thread, 0, 0)
        entering = True
        while True:
            try:
                _, status = os.waitpid(thread, WALL)
            except ChildProcessError:
                return
            if not os.WIFSTOPPED(status):
                return
            stopped_by = os.WSTOPSIG(status)
            if stopped_by == SYSCALL_STOP:
                if entering:
                    self.counts[ptrace(PTRACE_PEEKUSER, thread, ORIG_RAX_AT, 0)] += 1
                entering = not entering
            self._ready.set()
            if self._stop and entering:
                ptrace(PTRACE_DETACH, thread, 0, 0)
                return
            event = status >> 16
            signal = 0 if stopped_by == SYSCALL_STOP or event else stopped_by
            with suppress(OSError):
                ptrace(PTRACE_SYSCALL, thread, 0, signal)
