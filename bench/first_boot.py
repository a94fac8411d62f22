"""First boots of a model on a host: cold, and from the base that all models begin with, in turns.

Two models with the same files, of which the base was made for the first; each round boots each of them both ways, with
each sandbox alone. The processor time is that of the sandbox, of runsc and of this process, where the base is read for
its digests once. Without a form cache, each engine tries its forms, as it does at a model's first start.

Run as root: ``python -m bench.first_boot [MODEL] [--rounds 3] [--role engine]``.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

from appliance.common.catalog import embedded_model, read_model
from appliance.common.config import ApplianceConfig, ModelConfig, SandboxConfig
from appliance.operator import kernels
from appliance.selftest import intruder
from appliance.supervisor import templates
from appliance.supervisor import warm as warmth
from appliance.supervisor.boot import BootPlan, boot, end, plan_boot
from appliance.supervisor.templates import starts
from appliance.supervisor.warm import WarmStarts, open_warm_starts
from isolation.gvisor.gvisor_runtime import GvisorRuntime
from isolation.ipc.messages import Role

COLD_S = 60.0
"""What the base says of a cold start: copies have patience with a busy machine."""


def spent_s() -> float:
    """Processor seconds of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def measure(warm: WarmStarts, runtime: GvisorRuntime, plan: BootPlan, *, cold: bool) -> tuple[float, float, float]:
    """Boot once and end it; gives wall and processor seconds until it was ready, and those of its sandbox alone."""
    before, begun, stop = spent_s(), time.monotonic(), threading.Event()
    booted = boot(plan, runtime, stop) if cold else warm.boot(plan, stop)
    wall, sandbox = time.monotonic() - begun, booted.sandbox.processor_s()
    ours = spent_s() - before
    assert booted.start == ("cold" if cold else "restored"), booted.start
    end(booted)
    return wall, ours + sandbox, sandbox


def rounds(folder: Path, model: Path, role: Role, count: int, runtime: GvisorRuntime) -> None:
    """Make the base, boot in turns, and print what each took."""
    other = folder / "other"
    shutil.copytree(model, other)
    run = folder / "run"
    run.mkdir()
    run.chmod(0o755)
    entries = tuple(ModelConfig(name=path.name, path=path) for path in (model, other))
    compiled = kernels.installed()
    config = ApplianceConfig(
        models=entries,
        policy=model,
        credentials=model,
        pepper=model,
        run_dir=run,
        sandbox=SandboxConfig(checkpoints=folder / "saved", kernels=None if compiled is None else compiled.resolve()),
    )
    warm = open_warm_starts(config, runtime)
    assert warm is not None
    plans = [plan_boot(config, one, read_model(one.name, one.path), runtime, role) for one in entries]
    before, begun = spent_s(), time.monotonic()
    made = warm.take(starts(plans[0])[-1], COLD_S)
    assert made is not None
    took = time.monotonic() - begun
    print(json.dumps({"made_s": round(took, 2), "made_cpu_s": round(spent_s() - before, 2), "bytes": made.size}))
    found: dict[str, list[tuple[float, float, float]]] = {"cold": [], "base": []}
    for turn in range(count):
        for plan in plans:
            for how in ("cold", "base"):
                one = measure(warm, runtime, plan, cold=how == "cold")
                found[how].append(one)
                line = {"round": turn, "model": plan.model, "how": how, "load": os.getloadavg()[0]}
                wall, cpu, alone = (round(value, 2) for value in one)
                print(json.dumps({**line, "wall_s": wall, "cpu_s": cpu, "sandbox_cpu_s": alone}), flush=True)
    for how, all_ in found.items():
        wall, cpu, alone = (round(statistics.median(column), 2) for column in zip(*all_, strict=True))
        print(json.dumps({"median": how, "boots": len(all_), "wall_s": wall, "cpu_s": cpu, "sandbox_cpu_s": alone}))


def main() -> int:
    """Parse the command line and measure; gives the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model", nargs="?", type=Path, default=embedded_model())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--role", choices=("engine", "text"), default="engine")
    options = parser.parse_args()
    warmth.BEGIN_AFTER_S, templates.TEMPLATE_CORES = 0.0, 1.0
    role = Role.ENGINE if options.role == "engine" else Role.TEXT
    with tempfile.TemporaryDirectory() as folder, intruder.gvisor() as runtime:
        Path(folder).chmod(0o755)
        rounds(Path(folder), options.model.resolve(), role, options.rounds, runtime)
    return 0


if __name__ == "__main__":
    sys.exit(main())
