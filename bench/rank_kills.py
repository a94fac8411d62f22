"""Random kills of processes of engines of several ranks in real sandboxes: gone within 1 s, back within 5 s.

``python -m bench.rank_kills [--kills 200] [--seed N] [--load N] [--layouts NAME ...]`` boots an engine of each layout
as the supervisor does, from a checkpoint, has one after the other serve four requests, kills a process of it (the
keeper or a rank) at a moment drawn at random, and measures: until its channel has ended, until the sandbox has, and
until another one has given a real token. ``one rank`` is the control, an engine of one process. The kill is asked for
on the sandbox's own control socket, since ``runsc kill`` takes as long to start as what is measured. ``--load`` adds so
many busy processes from just before each kill until the engine has ended, with ``--busy-boot`` until the next serves.
Needs root. One JSON line a kill, then the sums; ends with 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from appliance.common.catalog import embedded_model, read_model
from appliance.common.config import ApplianceConfig, ModelConfig, SandboxConfig
from appliance.selftest import intruder
from appliance.supervisor import layout, templates, warm
from appliance.supervisor.boot import Booted, BootPlan, end, plan_boot
from appliance.supervisor.warm import WarmStarts, open_warm_starts
from isolation.gvisor.gvisor_runtime import GvisorRuntime
from isolation.gvisor.runsc import container_id
from isolation.host.cores import Cores, Cpu
from isolation.ipc.engine import StepOutput
from isolation.ipc.errors import PeerGoneError
from isolation.ipc.messages import Role
from tests.engine.support import submit

GONE_S, BACK_S = 1.0, 5.0
"""The bars: seconds from the kill to the end of the sandbox, and to the first token of the next."""

HUNG_S = 60.0
"""Seconds after which an engine that has not ended counts as hung."""

REQUESTS = 4
TOKENS = 400
SPREAD_S = 0.05
"""Seconds over which moments are drawn: some steps, from the first token on."""

CORES = 4
"""Cores that a plan counts with, so that four ranks are planned on fewer."""

LAYOUTS = {
    "one rank": {},
    "tensor": {"tensor_parallel": 2},
    "stages": {"pipeline_parallel": 2},
    "tensor and stages": {"tensor_parallel": 2, "pipeline_parallel": 2},
}


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill."""

    layout: str
    pid: int
    """In the sandbox: 1 is the keeper, 2 the first rank."""
    after_s: float
    told_s: float
    """From the kill until the channel ended: requests inside are answered or go to the next engine."""
    gone_s: float
    """Until no process of the sandbox was left."""
    back_s: float
    """Until the next engine had given a token."""
    start: str
    """How the next engine started."""
    load: float


def kill_inside(runtime: GvisorRuntime, booted: Booted, pid: int) -> float:
    """SIGKILL to one process of a sandbox by its number there; gives the moment before."""
    name = booted.sandbox.name
    arg = {"CID": container_id(name), "Signo": int(signal.SIGKILL), "PID": pid, "Mode": 0}
    with socket.socket(socket.AF_UNIX) as control:
        control.connect(os.fspath(runtime.control_socket(name)))
        begun = time.monotonic()
        control.sendall(json.dumps({"method": "containerManager.Signal", "arg": arg}).encode())
        control.settimeout(HUNG_S)
        answer = control.recv(65536)  # Empty where the sandbox ended before it answered.
    assert not answer or json.loads(answer)["success"], answer
    return begun


def serve(booted: Booted) -> None:
    """Have it serve some requests; returns with the first token."""
    channel = booted.channel
    assert channel is not None
    for number in range(9, 9 + REQUESTS):
        channel.send(submit(number, range(1, 20), TOKENS))
    while not any(isinstance(one, StepOutput) for one in channel.receive(8)):
        channel.wait(1.0)


def await_end(booted: Booted) -> float:
    """Read what comes until the channel ends, as the gateway does; gives the moment."""
    channel = booted.channel
    assert channel is not None
    deadline = time.monotonic() + HUNG_S
    with suppress(PeerGoneError):
        while time.monotonic() < deadline:
            channel.receive(8)
            channel.wait(1.0)
        raise AssertionError("the channel of a killed engine does not end")
    return time.monotonic()


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """So many processes that take all the time they get."""
    code = "while True: bytearray(1 << 20)"
    started = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(processes)]
    try:
        if started:
            time.sleep(1.0)
        yield
    finally:
        for one in started:
            one.kill()
        for one in started:
            one.wait()


def processes(plan: BootPlan) -> int:
    """Processes of an engine: its ranks, and the one that keeps them where there are several."""
    return plan.ranks + (plan.ranks > 1)


class Kills:
    """Engines of one layout that are killed one after the other."""

    def __init__(self, name: str, plan: BootPlan, runtime: GvisorRuntime, starts: WarmStarts) -> None:
        self._name, self._plan, self._runtime, self._starts = name, plan, runtime, starts
        self._booted: Booted | None = starts.boot(plan, threading.Event())
        starts.take(warm.starts(plan)[-1], self._booted.boot_s)

    def kill(self, dice: random.Random, load: int, *, busy_boot: bool) -> Kill:
        """Kill one process at a moment drawn at random, and have the next engine serve."""
        booted, pid, after_s = self._booted, dice.randint(1, processes(self._plan)), dice.uniform(0, SPREAD_S)
        assert booted is not None
        with busy(load if busy_boot else 0):
            with busy(0 if busy_boot else load):
                serve(booted)
                time.sleep(after_s)
                assert booted.sandbox.poll() is None
                begun = kill_inside(self._runtime, booted, pid)
                told_s = await_end(booted) - begun
                assert booted.sandbox.wait(HUNG_S) is not None, "the engine hangs"
                gone_s, average = time.monotonic() - begun, os.getloadavg()[0]
            self._booted, since = None, time.monotonic()
            end(booted)
            self._booted = self._starts.boot(self._plan, threading.Event())
            back_s = gone_s + time.monotonic() - since
        return Kill(self._name, pid, round(after_s, 4), told_s, gone_s, back_s, self._booted.start, average)

    def close(self) -> None:
        """End the last one."""
        if self._booted is not None:
            end(self._booted)


def config_for(folder: Path, names: list[str]) -> ApplianceConfig:
    """An appliance of the embedded model in each of some layouts."""
    model, run_dir = embedded_model(), folder / "run"
    run_dir.mkdir(exist_ok=True)
    run_dir.chmod(0o755)
    values = {"path": model, "kv_bytes": 32 << 20, "dtype": "float32"}
    entries = tuple(ModelConfig(name=name.replace(" ", "-"), **values, **LAYOUTS[name]) for name in names)
    saved = SandboxConfig(checkpoints=folder / "saved")
    return ApplianceConfig(
        models=entries, policy=model, credentials=model, pepper=model, run_dir=run_dir, sandbox=saved
    )


def measure(options: argparse.Namespace) -> Iterator[Kill]:
    """Kill, and give what each took."""
    layout.read_cores = lambda: Cores(tuple(Cpu(number, number, 0) for number in range(CORES)), CORES, None)
    warm.BEGIN_AFTER_S, templates.TEMPLATE_CORES = 0.0, 1.0
    dice = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as where, intruder.gvisor() as runtime:
        folder = Path(os.path.realpath(where))
        folder.chmod(0o755)
        config = config_for(folder, options.layouts)
        starts = open_warm_starts(config, runtime)
        assert starts is not None
        with ExitStack() as engines:
            kills = []
            for name, entry in zip(options.layouts, config.models, strict=True):
                plan = plan_boot(config, entry, read_model(entry.name, entry.path), runtime, Role.ENGINE)
                kills.append(Kills(name, plan, runtime, starts))
                engines.callback(kills[-1].close)
            for number in range(options.kills):
                yield kills[number % len(kills)].kill(dice, options.load, busy_boot=options.busy_boot)


def add_up(name: str, found: list[Kill]) -> dict[str, object]:
    """Median, 95th percentile and longest of each time of a layout, and how many are above its bar."""
    sums: dict[str, object] = {"layout": name, "kills": len(found)}
    for time_of, bar in (("told_s", GONE_S), ("gone_s", GONE_S), ("back_s", BACK_S)) if found else ():
        values = sorted(getattr(one, time_of) for one in found)
        sums[time_of] = [round(one, 3) for one in (median(values), values[int(len(values) * 0.95)], values[-1])]
        sums[f"{time_of} above {bar:g}"] = sum(one > bar for one in values)
    return sums


def main(arguments: list[str]) -> int:
    """Print each kill and the sums; 0 when all bars are met."""
    parser = argparse.ArgumentParser(prog="bench.rank_kills")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=20261127)
    parser.add_argument("--load", type=int, default=0)
    parser.add_argument("--busy-boot", action="store_true")
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))  # Sandboxes are removed on the way out.
    found = []
    for one in measure(options):
        found.append(one)
        row = {name: round(value, 3) if isinstance(value, float) else value for name, value in asdict(one).items()}
        print(json.dumps(row), flush=True)
    for name in options.layouts:
        print(json.dumps(add_up(name, [one for one in found if one.layout == name])))
    return int(any(max(one.gone_s / GONE_S, one.back_s / BACK_S) > 1 for one in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
