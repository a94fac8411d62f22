"""Templates: sandboxes started only to be saved, at the point where their program waits for its host."""

from __future__ import annotations

import threading
from pathlib import Path

from isolation.errors import SandboxStartError
from isolation.gvisor.runtime import Runtime
from isolation.gvisor.spec import SandboxSpec
from isolation.host.stdio import LineCallback
from isolation.ipc.weights_file import WeightsFile

SLICE_S = 0.25
"""Interval of the checks whether the template is alive and still wanted."""

END_TIMEOUT_S = 60.0


def save_template(  # noqa: PLR0913 - what a template has
    runtime: Runtime,
    spec: SandboxSpec,
    folder: Path,
    *,
    waits_line: str,
    timeout_s: float,
    stop: threading.Event | None = None,
    on_line: LineCallback | None = None,
    weights: WeightsFile | None = None,
) -> None:
    """Start a sandbox, wait for its "waiting" line, save it into a folder, and end it.

    Args:
        runtime: the runtime that starts it.
        spec: the sandbox; it must hold nothing that a copy may not know.
        folder: an existing, empty folder.
        waits_line: the line that its program prints once it waits for its host.
        timeout_s: seconds until that line must appear.
        stop: set to abandon the template.
        on_line: called with every other line.
        weights: takes the weights of its program into a file, which ``spec`` mounts; None: they are saved as memory.

    Raises:
        IsolationError: it did not reach that point, or could not be saved; everything of the sandbox is removed.
    """
    waits = threading.Event()

    def hear(line: str) -> None:
        if line == waits_line:
            waits.set()
        elif on_line is not None:
            on_line(line)

    sandbox = runtime.boot(spec, hear)
    try:
        if weights is not None:
            weights.serve(sandbox.peer_pids)
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
