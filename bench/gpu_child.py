"""A process of its own whose results are read as they come: a part that takes too long ends the process, and what was
told before stays known."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

BEGINS = "begins"
"""Key of a line that names the part that comes next, and its seconds."""

TAIL = 600
"""Characters of what a failed process said that are repeated."""


class PartError(Exception):
    """A process ended before it should, or one of its parts took too long."""


def begin(part: str, limit_s: float) -> None:
    """Tell the process that reads what comes next, and how long it may take."""
    print(json.dumps({BEGINS: part, "limit_s": limit_s}), flush=True)


def told(
    arguments: Sequence[str], *, first_s: float, whole_s: float, environment: Mapping[str, str] | None = None
) -> Iterator[dict[str, Any]]:
    """Lines of JSON that ``python arguments`` prints, as they come; the process is gone when this ends.

    Args:
        arguments: of Python.
        first_s: seconds until it names its first part.
        whole_s: seconds of all parts.
        environment: what is added to this process's own.

    Raises:
        PartError: it failed, or a part took longer than it said; the message names the part.
    """
    with tempfile.TemporaryFile("w+b") as said:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdout=subprocess.PIPE,
            stderr=said,
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        try:
            yield from _lines(process, first_s, time.monotonic() + whole_s)
            status = process.wait(timeout=max(first_s, 10.0))
            if status:
                said.seek(0)
                end = said.read().decode(errors="replace").strip()[-TAIL:]
                raise PartError(f"it ended with {status}: {end}")
        except subprocess.TimeoutExpired as error:
            raise PartError("it told everything and did not end") from error
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _lines(process: subprocess.Popen[bytes], first_s: float, deadline: float) -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    stream, buffer = process.stdout.fileno(), b""
    part, limit = "its start", time.monotonic() + first_s
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while True:
            left = min(limit, deadline) - time.monotonic()
            if left <= 0:
                raise PartError(f"{part} took too long")
            if not selector.select(left):
                continue
            data = os.read(stream, 1 << 16)
            if not data:
                return
            *whole, buffer = (buffer + data).split(b"\n")
            for line in whole:
                if not line.startswith(b"{"):
                    continue
                values = json.loads(line)
                if BEGINS in values:
                    part, limit = values[BEGINS], time.monotonic() + values["limit_s"]
                else:
                    yield values
