"""What the host notices of a sandbox that takes all it can get: nothing that lasts."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from bench.guarantees.intruder import serving_spec
from isolation.errors import ProcessError
from isolation.gvisor import GvisorRuntime
from isolation.ipc.messages import Role
from isolation.process import MINIMAL_ENVIRONMENT, run
from isolation.spec import Limits

KINDS = ("forks", "threads", "memory", "descriptors", "disk", "output", "processor")
"""Ways of ``redteam.exhaust``."""

PROGRAM = Path(__file__).parent / "redteam" / "exhaust.py"
MEMORY_BYTES = 384 << 20
TAKE_S = 30.0
"""Seconds after which a sandbox that goes on is ended by the host."""

START_S = 10.0
"""Within which a program of the host must start and end beside it."""

OWN_GROWTH_BYTES = 64 << 20
"""What this process may grow by meanwhile: it keeps the last lines of a log and no more."""


@dataclass(frozen=True, slots=True)
class Taken:
    """How one way ended."""

    kind: str
    said: str
    """How much it took, in its own words; how it ended, where it could say nothing."""
    host_starts: bool
    """Whether the host could start a program while the sandbox held what it had."""
    grown_bytes: int
    """Of this process."""
    left: int
    """Processes of the sandbox that outlived it."""

    @property
    def harmless(self) -> bool:
        """Whether the host came through."""
        return self.host_starts and self.grown_bytes < OWN_GROWTH_BYTES and self.left == 0


def take(kind: str, runtime: GvisorRuntime) -> Taken:
    """Run one way in a sandbox of its own, look at the host meanwhile and afterwards."""
    with tempfile.TemporaryDirectory(prefix="ath-") as folder:
        spec = serving_spec(Role.TEXT, f"greedy-{kind}", Path(folder), ("-c", PROGRAM.read_text(), kind))
        spec = replace(spec, limits=Limits(MEMORY_BYTES), tmpfs_bytes=16 << 20)
        lines: list[str] = []
        before = _own_bytes()
        sandbox = runtime.boot(spec, on_line=lambda line: lines.append(line) if line.startswith("took") else None)
        try:
            pids = sandbox.peer_pids
            deadline = time.monotonic() + TAKE_S
            while not lines and sandbox.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            starts = _starts()
            sandbox.wait(3.0)
            grown = _own_bytes() - before
        finally:
            sandbox.delete()
        ending = sandbox.ending()
        said = lines[0] if lines else (ending.reason if ending is not None else "was ended")
    return Taken(kind, said, starts, grown, sum(Path(f"/proc/{pid}").exists() for pid in pids))


def _starts() -> bool:
    try:
        run((sys.executable, "-S", "-c", ""), timeout_s=START_S, env=MINIMAL_ENVIRONMENT)
    except ProcessError:
        return False
    return True


def _own_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
