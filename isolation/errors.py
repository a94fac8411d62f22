"""What can go wrong while a sandbox is started, watched or ended.

``IsolationError``
  * ``SandboxError``: one sandbox
      * ``SandboxStartError``: it did not come up; nothing of it is left behind.
      * ``SandboxExitedError``: it ended while somebody still needed it.
      * ``SandboxTimeoutError``: it did not do something in time.
  * ``ProcessError``: a host program that we started failed.
  * ``RuntimeNotFoundError``: no usable runsc on this machine.
  * ``UserNamespaceError``: this machine refuses an unprivileged user namespace.
  * ``GpuError``: what a sandbox with a GPU needs of the machine is missing, or does not fit together.
  * ``RootfsError``: the files for a sandbox's root are missing or unreadable for its user.
      * ``ImageError``: an image is not what it shall be.

Each message says what happened and what it means; ``hint`` says what to do, where something can be done.
"""

from __future__ import annotations

import shlex
import signal
from collections.abc import Sequence
from pathlib import Path

_STDERR_TAIL_CHARS = 2_000
"""Characters of a failed program's error output kept in the message: the last lines tell the cause."""


class IsolationError(Exception):
    """Base of all errors of this package.

    Args:
        message: what happened and what it means; lower case, no full stop.
        hint: what the operator can do; empty where nothing can be done.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message}; {self.hint}" if self.hint else message


class SandboxError(IsolationError):
    """Something about one sandbox."""


class SandboxStartError(SandboxError):
    """The sandbox did not come up; whatever had been made for it is removed."""


class SandboxExitedError(SandboxError):
    """The sandbox ended although it was still needed.

    Args:
        name: name of the sandbox.
        status: exit status, or minus the signal that ended its process.
        reason: what is known of the cause, such as ``out of memory``.
    """

    def __init__(self, name: str, status: int, reason: str = "") -> None:
        cause = reason or describe_status(status)
        super().__init__(f"sandbox {name} ended: {cause}")
        self.status = status
        self.reason = reason


class SandboxTimeoutError(SandboxError):
    """The sandbox did not do something in time."""


class ProcessError(IsolationError):
    """A host program failed, could not be started or took too long.

    Args:
        argv: the command.
        returncode: exit status, minus the signal, or None when it never started or was ended for being late.
        stderr: what it wrote to standard error; the tail is kept.
        problem: overrides the description of ``returncode``.
    """

    def __init__(self, argv: Sequence[str], returncode: int | None, stderr: str = "", *, problem: str = "") -> None:
        self.argv = tuple(argv)
        self.returncode = returncode
        self.stderr = stderr[-_STDERR_TAIL_CHARS:]
        if not problem:
            problem = describe_status(returncode) if returncode is not None else "did not finish"
        said = f": {self.stderr.strip()}" if self.stderr.strip() else ""
        super().__init__(f"command {problem}: {shlex.join(self.argv)}{said}")


class RuntimeNotFoundError(IsolationError):
    """No runsc that is recent enough was found."""


class UserNamespaceError(IsolationError):
    """The kernel or its security module refuses an unprivileged user namespace."""


class GpuError(IsolationError):
    """A sandbox was to have a GPU, and driver, device nodes, libraries and runsc of this machine do not allow it."""


class RootfsError(IsolationError):
    """A file that a sandbox's root needs is missing, or its user could not read it."""


class CheckpointError(IsolationError):
    """A saved sandbox cannot be used, or none could be saved; starting one without it works as ever."""


class ImageError(RootfsError):
    """An image is not what it shall be: changed, malformed, not signed, not the pinned one.

    Args:
        message: what is wrong.
        path: the file by which it was found.
        hint: what to do.
    """

    def __init__(self, message: str, path: Path, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.path = path


def describe_status(status: int) -> str:
    """Say an exit status in words; negative numbers are signals, as ``subprocess`` has them."""
    if status == 0:
        return "ended with status 0"
    if status < 0:
        return f"was ended by {_signal_name(-status)}{_meaning(-status)}"
    if status > _SHELL_SIGNAL_BASE:
        number = status - _SHELL_SIGNAL_BASE
        return f"ended with status {status} ({_signal_name(number)} inside){_meaning(number)}"
    return f"ended with status {status}"


def _meaning(number: int) -> str:
    """What a signal says of a program that locks itself down."""
    if number == signal.SIGSYS:
        return ": it made a system call beyond its lock-down, by a defect or because it was taken over"
    return ""


_SHELL_SIGNAL_BASE = 128
"""A program inside a sandbox that dies of signal N is reported as 128 + N."""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
