"""Commands of `athanor` inside of the test's process: a process of its own imports for longer than most commands work.

`test_readme.py` and all that starts an appliance run the installed program.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
from collections.abc import Mapping
from unittest import mock

from typer.testing import CliRunner

from appliance.operator.cli.app import for_line


def athanor(*words: str) -> subprocess.CompletedProcess[str]:
    """What a command did: its status, and what it printed on both streams. What it does not catch, and would end the
    program with a traceback, is raised."""
    done = CliRunner().invoke(for_line(words), list(words), env={"COLUMNS": "80"}, prog_name="athanor")
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return subprocess.CompletedProcess(["athanor", *words], done.exit_code, done.stdout, done.stderr)


def python(text: str, environment: Mapping[str, str] | None = None) -> str:
    """What a document's Python block prints, run as a program under these variables: the clients that it imports are
    imported once for all blocks."""
    said = io.StringIO()
    with mock.patch.dict(os.environ, environment or {}), contextlib.redirect_stdout(said):
        exec(compile(text, "block", "exec"), {"__name__": "__main__"})
    return said.getvalue()
