"""Figures of models that sleep: time of a wake, memory awake and asleep, and how often a request finds its model awake.

``wake`` puts the demo's model to sleep and wakes it by command, so many times; the first wake of a run may be a cold
start, all others restore checkpoints. Memory is the proportional share of every process of the model's sandboxes.
``zipf`` serves 20 models of 300 MB, of which 6 fit, to requests drawn by Zipf's law for ten minutes
(``bench/residency_zipf.py``), and watches the appliance idle afterwards. The models (6 GB) and their checkpoints are
made in the folder when they are missing, half a minute each, and are there for the next run.

Run: ``python bench/residency.py wake [--rounds 5]``, or as root ``python bench/residency.py zipf --folder DIR
[--models 20] [--fit 6] [--minutes 10] [--rate 2] [--exponent 1.0] [--seed 7]``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.residency_policies import draw
from bench.residency_zipf import measure
from tests.system.conftest import Appliance, running

MODEL = "athanor-mini"
WAIT_S = 120.0
IDLE_S = 120.0
"""Seconds in which an appliance is watched idle."""


def order(appliance: Appliance, what: str, model: str = MODEL) -> dict[str, Any]:
    """Give an order about a model."""
    return dict(httpx.post(f"{appliance.ready['admin']}/models/{model}/{what}", timeout=WAIT_S).json())


def until(happens: Callable[[], bool]) -> None:
    """Wait for it."""
    deadline = time.monotonic() + WAIT_S
    while not happens():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.02)


def memory(appliance: Appliance, model: str = MODEL) -> tuple[int, int]:
    """Processes of a model's sandboxes, and the bytes that they have."""
    count = found = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if str(appliance.state) not in line or not any(f"{one}-{model}" in line for one in ("engine", "text")):
                continue
            for one in (folder, *_children(folder)):
                rollup = (one / "smaps_rollup").read_text().splitlines()
                found += sum(int(line.split()[1]) << 10 for line in rollup if line.startswith("Pss:"))
                count += 1
        except OSError:
            continue
    return count, found


def _children(folder: Path) -> list[Path]:
    """Descendants of a process that do not name the model: the stubs of a sandbox."""
    below = (folder / "task" / folder.name / "children").read_text().split()
    stubs = [Path("/proc") / one for one in below if not (Path("/proc") / one / "cmdline").read_bytes()]
    return [*stubs, *(deeper for one in stubs for deeper in _children(one))]


def measure_wakes(rounds: int) -> dict[str, Any]:
    """Sleep and wake, so many times."""
    with tempfile.TemporaryDirectory() as folder, running(Path(folder) / "state") as appliance:
        awake, times = memory(appliance), []
        asleep = (0, 0)
        for _ in range(rounds + 1):
            until(lambda: bool(order(appliance, "sleep")["ok"]))
            until(lambda: memory(appliance)[0] == 0)
            asleep = memory(appliance)
            began = time.perf_counter()
            outcome = order(appliance, "wake")
            assert outcome["ok"], outcome
            times.append(time.perf_counter() - began)
            time.sleep(8.0)  # A checkpoint that is missing is made meanwhile.
        return {
            "first_wake_s": round(times[0], 2),
            "wakes_s": [round(one, 2) for one in times[1:]],
            "median_wake_s": round(statistics.median(times[1:]), 2),
            "awake_processes": awake[0],
            "awake_mib": awake[1] >> 20,
            "asleep_processes": asleep[0],
            "asleep_mib": asleep[1] >> 20,
        }


def main() -> int:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("wake", "zipf"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where models and checkpoints of `zipf` are kept")
    parser.add_argument("--models", type=int, default=20)
    parser.add_argument("--fit", type=int, default=6, help="models that are awake at a time")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--rate", type=float, default=2.0, help="requests a second")
    parser.add_argument("--exponent", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--idle", type=float, default=IDLE_S, help="seconds of idleness at the end")
    options = parser.parse_args()
    if options.what == "wake":
        print(json.dumps({"wake": measure_wakes(options.rounds)}, indent=2), flush=True)
        return 0
    if options.folder is None:
        parser.error("zipf needs --folder")
    count = round(options.rate * options.minutes * 60)
    requests = draw(options.seed, options.exponent, count=count, rate=options.rate, models=options.models)
    found = measure(options.folder.resolve(), options.models, options.fit, requests, options.idle)
    print(json.dumps({"zipf": found}, indent=2), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
