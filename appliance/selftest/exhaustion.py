"""Effects on the host of a sandbox that takes all resources it can get: none may last."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from appliance.selftest.intruder import serving_spec
from isolation.errors import ProcessError
from isolation.gvisor.gvisor_runtime import GvisorRuntime
from isolation.gvisor.spec import Limits
from isolation.host.process import MINIMAL_ENVIRONMENT, run
from isolation.ipc.messages import Role

KINDS = ("forks", "threads", "memory", "descriptors", "disk", "output", "processor")
"""Attacks in ``redteam.exhaust``."""

PROGRAM = Path(__file__).parent / "redteam" / "exhaust.py"
MEMORY_BYTES = 384 << 20
TAKE_S = 30.0
"""Seconds after which the host ends a sandbox that continues."""

START_S = 10.0
"""Seconds within which a host program must start and end meanwhile."""

OWN_GROWTH_BYTES = 64 << 20
"""Largest growth of this process in bytes meanwhile: it keeps only the last lines of a log."""


@dataclass(frozen=True, slots=True)
class Taken:
    """Result of one attack."""

    kind: str
    said: str
    """Amount that it took, as printed by it; its exit when it could print nothing."""
    host_starts: bool
    """Whether the host could start a program while the sandbox held the resources."""
    grown_bytes: int
    """Growth of this process in bytes."""
    left: int
    """Number of the sandbox's processes that outlived it."""

    @property
    def harmless(self) -> bool:
        """Return whether the host was unaffected."""
        return self.host_starts and self.grown_bytes < OWN_GROWTH_BYTES and self.left == 0


def take(kind: str, runtime: GvisorRuntime) -> Taken:
    """Run one attack in a new sandbox and observe the host meanwhile and afterwards."""
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
