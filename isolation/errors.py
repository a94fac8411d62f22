"""Errors raised while a sandbox starts, runs or ends.

``IsolationError``
  * ``SandboxError``: an error of one sandbox
      * ``SandboxStartError``: the sandbox did not start; everything made for it has been removed.
      * ``SandboxTimeoutError``: the sandbox missed a deadline.
  * ``ProcessError``: a host program that Athanor started failed.
  * ``RuntimeNotFoundError``: this machine has no usable runsc.
  * ``UserNamespaceError``: this machine refuses an unprivileged user namespace.
  * ``GpuError``: something that a sandbox with a GPU needs from the machine is missing or incompatible.
  * ``RootfsError``: files for a sandbox's root are missing, or its user cannot read them.
      * ``ImageError``: an image does not match its manifest, its signature or its pinned digest.

Each message says what happened and what it means; ``hint`` says what to do, where something can be done.
"""

from __future__ import annotations

import shlex
import signal
from collections.abc import Sequence
from pathlib import Path

_STDERR_TAIL_CHARS = 2_000
"""Characters of a failed program's error output kept in the message; the last lines name the cause."""


class IsolationError(Exception):
    """Base class of all errors of this package.

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
    """Base class of errors that concern one sandbox."""


class SandboxStartError(SandboxError):
    """The sandbox did not start; everything made for it has been removed."""


class SandboxTimeoutError(SandboxError):
    """The sandbox did not do something in time."""


class ProcessError(IsolationError):
    """A host program failed, could not be started, or exceeded its time limit.

    Args:
        argv: the command.
        returncode: exit status, minus the signal, or None when it never started or was killed on time-out.
        stderr: what it wrote to standard error; only the end is kept.
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
    """This machine's driver, device nodes, libraries and runsc cannot give a sandbox a GPU."""


class RootfsError(IsolationError):
    """A file that a sandbox's root needs is missing, or the sandbox's user cannot read it."""


class CheckpointError(IsolationError):
    """A checkpoint cannot be used, or could not be saved; a cold start still works."""


class ImageError(RootfsError):
    """An image was changed, is malformed or unsigned, or is not the pinned one.

    Args:
        message: what is wrong.
        path: the file where the problem was found.
        hint: what to do.
    """

    def __init__(self, message: str, path: Path, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.path = path


def describe_status(status: int) -> str:
    """Describe an exit status in words; negative numbers are signals, as in ``subprocess``."""
    if status == 0:
        return "ended with status 0"
    if status < 0:
        return f"was ended by {_signal_name(-status)}{_meaning(-status)}"
    if status > _SHELL_SIGNAL_BASE:
        number = status - _SHELL_SIGNAL_BASE
        return f"ended with status {status} ({_signal_name(number)} inside){_meaning(number)}"
    return f"ended with status {status}"


def _meaning(number: int) -> str:
    """Explain a signal's meaning for a program that locks itself down."""
    if number == signal.SIGSYS:
        return ": it made a system call beyond its lock-down, by a defect or because it was taken over"
    return ""


_SHELL_SIGNAL_BASE = 128
"""Base of the exit status for a program inside a sandbox that dies of signal N: 128 + N."""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
