"""What ``athanor bench --record`` does: gather the facts of a machine card, measure its memory, write the card."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import TypedDict

from appliance.operator import kernels
from appliance.operator.bench.machine_card import MachineCard
from appliance.operator.bench.processor import look_at_processor, memory_gib
from isolation.errors import RuntimeNotFoundError
from isolation.gvisor.runsc import find_runsc
from isolation.host.cgroup_tree import parse_mountinfo
from isolation.host.cores import read_quota
from isolation.host.process import MINIMAL_ENVIRONMENT, run

SPEED_TIMEOUT_S = 300.0
"""Seconds for the memory's speed: ten readings of a gigabyte, and an import of torch."""

ROOT = Path("/")


class MemorySpeed(TypedDict):
    """What the program that reads memory prints."""

    one_core: float
    """Bytes a second of one core."""
    all_cores: float
    """Bytes a second of all usable cores."""
    torch: str
    """Version of torch."""


def record(note: str) -> MachineCard:
    """Gather the facts of this machine and measure its memory; takes seconds and a gigabyte.

    Raises:
        IsolationError: the program that reads memory fails.
    """
    found = look_at_processor()
    features = kernels.features_here()
    version, cores = cgroup_limit()
    speed = _memory_speed()
    return MachineCard(
        architecture=platform.machine(),
        best_kernel_variant=kernels.best_variant(features) if features else None,
        cgroup_cpu_cores=cores,
        cgroup_version=version,
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        family=found.family,
        features=kernels.telling_features(features) if features else None,
        kernel=platform.release(),
        logical_cores=found.logical_cores,
        memory_gib=memory_gib(),
        memory_read_gb_s_all_cores=_gb_s(speed["all_cores"]),
        memory_read_gb_s_one_core=_gb_s(speed["one_core"]),
        model=found.model,
        note=note,
        numa_nodes=found.numa_nodes,
        physical_cores=found.physical_cores,
        processor=found.name,
        python=platform.python_version(),
        runsc=_runsc_version(),
        stepping=found.stepping,
        torch=speed["torch"],
        usable_cores=len(os.sched_getaffinity(0)),
        vendor=found.vendor,
    )


def cgroup_limit(root: Path = ROOT) -> tuple[int, float]:
    """Read the version of the hierarchy that limits processor time (0: none is mounted), and the cores that this
    process's group and those above it allow (0: no limit that can be seen)."""
    mounts = parse_mountinfo(_read(root / "proc/self/mountinfo"))
    version = 1 if "cpu" in mounts else 2 if "" in mounts else 0
    return version, round(read_quota(root) or 0.0, 2)


def _memory_speed() -> MemorySpeed:
    """Run the program that reads memory: this process has no tensors."""
    argv = [sys.executable, "-m", "appliance.operator.bench.memory_speed"]
    # The folder of the packages as working directory: they need not be installed for the interpreter.
    done = run(argv, timeout_s=SPEED_TIMEOUT_S, env=MINIMAL_ENVIRONMENT, cwd=Path(__file__).parents[3])
    found: MemorySpeed = json.loads(done.stdout)
    return found


def _runsc_version() -> int | None:
    try:
        return find_runsc().version
    except RuntimeNotFoundError:
        return None


def _gb_s(rate: float) -> float:
    return round(rate / 1e9, 1)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
