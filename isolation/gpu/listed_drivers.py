"""Asks the installed runsc which NVIDIA drivers it supports: its own list comes before our table."""

from __future__ import annotations

import os
from pathlib import Path

from isolation.errors import GpuError, ProcessError
from isolation.gpu.gpu_drivers import INSTALL_CURRENT, parse_drivers
from isolation.host.process import Completed, run

COMMAND = ("nvproxy", "list-supported-drivers")

TIMEOUT_S = 20.0
"""Seconds; the answer takes some hundredths of one."""

_UNKNOWN_COMMAND = 128
"""Status of a runsc that does not know a command; it prints its usage (seen with 20240729)."""


def listed_drivers(runsc: Path) -> tuple[str, ...]:
    """Return the drivers that a runsc lists; empty where it does not know the command.

    Raises:
        GpuError: it does not run, or its answer cannot be read; the message has the command and what is odd.
    """
    try:
        done = run([os.fspath(runsc), *COMMAND], timeout_s=TIMEOUT_S, check=False)
    except ProcessError as error:
        raise GpuError(f"{_asked(runsc)} failed: {error}") from error
    return read_answer(runsc, done)


def read_answer(runsc: Path, done: Completed) -> tuple[str, ...]:
    """Read the answer of a runsc that was asked. Pure.

    Raises:
        GpuError: as ``listed_drivers``.
    """
    if done.returncode == _UNKNOWN_COMMAND and "Usage:" in done.stdout + done.stderr:
        return ()
    try:
        if done.returncode != 0:
            raise ValueError(f"it ended with status {done.returncode}")
        return parse_drivers(done.stdout)
    except ValueError as error:
        what = f"the answer of {_asked(runsc)} cannot be read: {error}"
        raise GpuError(what, hint=f"use another runsc: {INSTALL_CURRENT}") from error


def _asked(runsc: Path) -> str:
    return f"`{runsc} {' '.join(COMMAND)}`"
