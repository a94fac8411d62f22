"""Commands that start an appliance or sandboxes: what they started ends with them, also when they are killed.

The mechanism is ``isolation.host.guard``, imported only by a command that needs it.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from isolation.host.scratch import Scratch

OWN_PROCESS = "athanor.own_process"
"""Key of the context's ``meta``: whether a command may divide its process. One called by another program may not."""


def guard_command(context: typer.Context, *, temporary: bool = True) -> Scratch | None:
    """Continue as the worker of a guarded command, in a process below this one.

    Args:
        context: context of the command.
        temporary: make the worker's temporary files in the scratch folder.

    Returns:
        The command's scratch folder; None for a command that is called by another program, and is not guarded.

    Raises:
        ConfigError: no folder can be made.
        IsolationError: the kernel cannot guard it.
    """
    return guard_process(temporary=temporary) if context.meta.get(OWN_PROCESS) else None


def guard_process(*, temporary: bool = True) -> Scratch:
    """Remove what killed commands left, then continue as the worker of a guarded command; see ``guard_command``.

    Raises:
        ConfigError: no folder can be made.
        IsolationError: the kernel cannot guard it.
    """
    from appliance.common.errors import os_errors_as
    from isolation.host.guard import guarded
    from isolation.host.scratch import Scratch, sweep

    with os_errors_as("cannot make a folder for temporary files, for which TMPDIR may name a directory"):
        for folder in sweep(Path(tempfile.gettempdir())):
            print(f"removed what a killed command left in {folder}", file=sys.stderr)
        scratch = Scratch.make()
    guarded(scratch, temporary=temporary)
    return scratch
