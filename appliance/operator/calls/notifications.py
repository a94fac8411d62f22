"""Reports of a seccomp filter with a listener: taken, looked into, answered (seccomp_unotify(2)).

The process that reports waits until its call is answered. An answer lets the call through, or gives it a result without
making it, as entries of a list do. What is let through is decided by the process's own memory after this look at it, so
nothing here is a wall: it observes.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
from typing import NamedTuple

_PR_SET_CHILD_SUBREAPER = 36

PIDFD_GETFD = 438
"""On every architecture."""

TAKEN_MARK = 0x4154_4841
"""Operation of seccomp(2) that no kernel has: a process asks with it whether its listener has been taken."""

LISTENER = "anon_inode:seccomp notify"

_NOTIFICATION = struct.Struct("=QIIiIQ6Q")
"""``struct seccomp_notif``: id, thread, flags, then ``struct seccomp_data``."""
_ANSWER = struct.Struct("=QqiI")
"""``struct seccomp_notif_resp``: id, value, error, flags."""
_CONTINUE = 1

_READ_WRITE = 3 << 30
_RECEIVE = _READ_WRITE | _NOTIFICATION.size << 16 | ord("!") << 8
_SEND = _READ_WRITE | _ANSWER.size << 16 | ord("!") << 8 | 1

_LIBC = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent has ended (PR_SET_CHILD_SUBREAPER)."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Notification(NamedTuple):
    """One call that waits for its answer."""

    id: int
    thread: int
    number: int
    arch: int
    arguments: tuple[int, ...]


def find_listener(pid: int) -> int | None:
    """The descriptor in a process by which its filter reports, if it has one by now.

    Raises:
        OSError: the process is gone, or may not be looked into.
    """
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            if os.readlink(f"/proc/{pid}/fd/{name}") == LISTENER:
                return int(name)
        except FileNotFoundError:
            continue
    return None


def take_descriptor(pidfd: int, fd: int) -> int:
    """A copy of a process's descriptor; needs the right to trace it: a descendant of the same user, or root.

    Raises:
        OSError: that right is missing, or the process is gone.
    """
    given = int(_LIBC.syscall(PIDFD_GETFD, pidfd, fd, 0))
    if given < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return given


def receive(listener: int) -> Notification | None:
    """The next report; None when its process was ended before it could be taken.

    Raises:
        OSError: the listener is of no more use.
    """
    buffer = bytearray(_NOTIFICATION.size)
    try:
        fcntl.ioctl(listener, _RECEIVE, buffer)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EINTR):
            return None
        raise
    number_id, thread, _flags, number, arch, _place, *arguments = _NOTIFICATION.unpack(buffer)
    return Notification(number_id, thread, number, arch, tuple(arguments))


def let_through(listener: int, report: Notification) -> None:
    """Let the call be made."""
    _answer(listener, _ANSWER.pack(report.id, 0, 0, _CONTINUE))


def answer(listener: int, report: Notification, error: int) -> None:
    """Have the call fail with this error, or seem to succeed with 0."""
    _answer(listener, _ANSWER.pack(report.id, 0, -error, 0))


def _answer(listener: int, packed: bytes) -> None:
    try:
        fcntl.ioctl(listener, _SEND, packed)
    except OSError as error:
        if error.errno != errno.ENOENT:  # the thread was ended meanwhile
            raise
