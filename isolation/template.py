"""A template: a sandbox that is started only to be saved, at the point where its program waits for its host."""

from __future__ import annotations

import threading
from pathlib import Path

from isolation.errors import SandboxStartError
from isolation.runtime import Runtime
from isolation.spec import SandboxSpec
from isolation.stdio import LineCallback

SLICE_S = 0.25
"""How often the wait looks whether the template lives and whether it is still wanted."""

END_TIMEOUT_S = 60.0


def save_template(
    runtime: Runtime,
    spec: SandboxSpec,
    folder: Path,
    *,
    waits_line: str,
    timeout_s: float,
    stop: threading.Event | None = None,
    on_line: LineCallback | None = None,
) -> None:
    """Start a sandbox, wait until it prints that it waits, save it into a folder, and end it.

    Args:
        runtime: starts it.
        spec: the sandbox, with nothing in it that a copy may not know.
        folder: existing and empty.
        waits_line: what its program prints when it has come so far.
        timeout_s: until it prints that.
        stop: asks to give it up.
        on_line: called with every other line.

    Raises:
        IsolationError: it did not come so far, or could not be saved; nothing of the sandbox is left.
    """
    waits = threading.Event()

    def hear(line: str) -> None:
        if line == waits_line:
            waits.set()
        elif on_line is not None:
            on_line(line)

    sandbox = runtime.boot(spec, hear)
    try:
        for _ in range(max(1, round(timeout_s / SLICE_S))):
            if waits.wait(SLICE_S) or sandbox.poll() is not None or (stop is not None and stop.is_set()):
                break
        if not waits.is_set():
            said = " / ".join(sandbox.output_tail()[-3:])
            raise SandboxStartError(f"{spec.name}, a template, did not come to the point where it waits: {said}")
        sandbox.save(folder)
    finally:
        sandbox.kill()
        sandbox.wait(END_TIMEOUT_S)
        sandbox.delete()
