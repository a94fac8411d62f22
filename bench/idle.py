"""An idle appliance with several models awake, beside as many sandboxes in which a program sleeps for good.

What those bare sandboxes take is runsc's own. All else is told apart by process: gateway, supervisor, launcher, and
what the sentries of engines and of text sandboxes take more than bare ones. Beside the processor time stand time slices
and system calls a second. A sample begins only when the appliance has been idle for ``--rest`` seconds; one in which a
process began or ended below the appliance, as while checkpoints are made, is taken again.

Run: ``python bench/idle.py [--models 1 3 7] [--seconds 60] [--rest 75] [--requests N] [--folder DIR]``; needs root.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from appliance.common.catalog import embedded_model
from bench.process_times import name_of, steady, tree
from bench.sandbox import sleeping
from bench.syscalls import Counter
from tests.system.conftest import Appliance, running

OWN = ("gateway", "supervisor", "launcher")
"""Processes of the host; all others are sandboxes."""


@dataclass(frozen=True, slots=True)
class Use:
    """What some processes used."""

    seconds: float = 0.0
    slices: int = 0
    """Times that one of their threads was given a core."""
    calls: int = 0

    def __add__(self, other: Use) -> Use:
        return Use(self.seconds + other.seconds, self.slices + other.slices, self.calls + other.calls)

    def __sub__(self, other: Use) -> Use:
        return Use(self.seconds - other.seconds, self.slices - other.slices, self.calls - other.calls)

    def per(self, duration_s: float) -> dict[str, float]:
        """Percent of a core, time slices and calls a second."""
        return {
            "percent": round(100 * self.seconds / duration_s, 3),
            "slices_per_s": round(self.slices / duration_s, 1),
            "calls_per_s": round(self.calls / duration_s, 1),
        }


def make_models(folder: Path, count: int) -> list[Path]:
    """Return folders with the embedded model under so many other names."""
    found = [folder / f"copy-{number}" for number in range(count)]
    for one in found:
        if not one.is_dir():
            shutil.copytree(embedded_model(), one)
    return found


def read(counter: Counter, pids: Sequence[int]) -> dict[str, Use]:
    """Return what was used until now, by what the processes are."""
    calls, found = counter.read(), collections.defaultdict[str, Use](Use)
    for pid in pids:
        name = name_of(pid)
        found[name] += Use(calls=calls[pid])
        try:
            for task in (Path("/proc") / str(pid) / "task").iterdir():
                ran, _, slices = map(int, (task / "schedstat").read_text().split())
                found[name] += Use(ran / 1e9, slices)
        except OSError:
            continue
    return dict(found)


def watch(appliance: int, sleepers: Sequence[int], duration_s: float) -> dict[str, Any]:
    """Return one sample: everything by process, and what the appliance takes beyond the bare sandboxes."""
    groups = {"appliance": tree([appliance]), "bare": tree(sleepers)}
    counters = {name: Counter(pids) for name, pids in groups.items()}
    try:
        before = {name: read(counters[name], pids) for name, pids in groups.items()}
        began = time.monotonic()
        time.sleep(duration_s)
        after = {name: read(counters[name], pids) for name, pids in groups.items()}
        took_s = time.monotonic() - began
    finally:
        for counter in counters.values():
            counter.close()
    used = {
        name: {one: use - before[name].get(one, Use()) for one, use in found.items()} for name, found in after.items()
    }
    ours, bare = (sum(used[name].values(), Use()) for name in ("appliance", "bare"))
    own = sum((use for name, use in used["appliance"].items() if name in OWN), Use())
    return {
        "appliance": {name: use.per(took_s) for name, use in sorted(used["appliance"].items())},
        "bare": bare.per(took_s),
        "host": own.per(took_s),
        "sandboxes_beyond": (ours - own - bare).per(took_s),
        "beyond": (ours - bare).per(took_s),
    }


def ask(appliance: Appliance, models: Sequence[str], count: int) -> None:
    """Ask every model in turn, so that the appliance has served."""
    with appliance.openai("alpha") as client:
        for number in range(count):
            model = models[number % len(models)]
            client.completions.create(model=model, prompt=f"hello {number}", max_tokens=4, temperature=0)


def measure(folder: Path, count: int, options: argparse.Namespace) -> dict[str, Any]:
    """Start an appliance with so many models and watch it idle."""
    others = make_models(folder, count - 1)
    arguments = [word for one in others for word in ("--model", str(one))]
    saved = folder / "saved"
    with tempfile.TemporaryDirectory() as place:
        state = Path(place) / "state"
        with running(state, *arguments, "--checkpoints", str(saved)) as appliance, sleeping(2 * count) as sleepers:
            names = [one["name"] for one in appliance.status()["models"]]
            ask(appliance, names, max(options.requests, count))
            time.sleep(options.rest)
            sample, samples = steady(
                (appliance.process.pid, *sleepers), lambda: watch(appliance.process.pid, sleepers, options.seconds)
            )
            return {"models": count, "load": round(os.getloadavg()[0], 2), "samples": samples} | sample


def main() -> int:
    """Measure and print a line of JSON for each number of models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, nargs="+", default=[1, 3, 7], help="numbers of models that are awake")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of a sample")
    parser.add_argument("--rest", type=float, default=75.0, help="seconds without a request before a sample")
    parser.add_argument("--requests", type=int, default=0, help="requests before that, one a model at least")
    parser.add_argument("--folder", type=Path, help="keeps models and checkpoints for the next run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = options.folder or Path(place)
        folder.mkdir(parents=True, exist_ok=True)
        for count in options.models:
            print(json.dumps(measure(folder, count, options)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
