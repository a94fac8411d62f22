"""An idle appliance with several models awake: what it takes beyond what runsc itself takes.

Sandboxes in which nothing happens take some percent of a core each, for timers of runsc
(``isolation.gvisor.timerslack``), and not always the same: fourteen that sleep differ from fourteen others by more than
is to be found here, and a program with three processes takes up to a tenth more than one that sleeps alone. So each
sandbox is compared with itself. In every other sample gateway and supervisor are stopped (SIGSTOP): nothing is sent to
a sandbox then and none is looked at, so what they take is runsc's. What sandboxes take more beside a gateway and a
supervisor that run, and what these two take, is ours. Beside the processor time stand time slices and system calls a
second. ``programs`` are the processes in which the sandboxes' own programs run: busy cores beside it move these figures
far less than those of the sentries.

A sample begins when the appliance has been idle for ``--rest`` seconds; a pair in which a process began or ended, as
while checkpoints are made, is taken again.

Run: ``python bench/idle.py [--models 1 3 7] [--seconds 20] [--pairs 6] [--rest 75] [--folder DIR]``; needs root.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from appliance.common.catalog import embedded_model
from bench.process_times import name_of, steady, tree
from bench.syscalls import Counter
from tests.system.conftest import Appliance, running

OWN = ("gateway", "supervisor", "launcher")
"""Processes of the host; all others are sandboxes."""

PROGRAMS = "stub"
"""Processes of sandboxes in which programs run; those of the guard and of the downloader, which sleep, count here."""

STOPPED = ("gateway", "supervisor")
"""Those that are stopped in every other sample."""

SETTLE_S = 2.0
"""Seconds before a sample: probes that were sent are answered, those that were due are sent."""


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


def sample(pids: Sequence[int], duration_s: float) -> dict[str, Use]:
    """Return what these processes use in so many seconds, by what they are."""
    counter = Counter(pids)
    try:
        before = read(counter, pids)
        time.sleep(duration_s)
        return {name: use - before.get(name, Use()) for name, use in read(counter, pids).items()}
    finally:
        counter.close()


@contextlib.contextmanager
def stopped(pids: Sequence[int]) -> Iterator[None]:
    """Stop gateway and supervisor for the time of a block, which their watch over sandboxes does not count."""
    host = [pid for pid in pids if name_of(pid) in STOPPED]
    for pid in host:
        os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(SETTLE_S)
        yield
    finally:
        for pid in host:
            os.kill(pid, signal.SIGCONT)


def pair(appliance: int, duration_s: float, *, stopped_first: bool) -> dict[str, dict[str, Use]]:
    """Return two samples, with gateway and supervisor and without."""
    found = {}
    for running_now in (not stopped_first, stopped_first):
        pids = tree([appliance])
        if running_now:
            time.sleep(SETTLE_S)
            found["running"] = sample(pids, duration_s)
        else:
            with stopped(pids):
                found["stopped"] = sample(pids, duration_s)
    return found


def watch(appliance: int, duration_s: float, pairs: int) -> dict[str, Any]:
    """Return what an idle appliance takes, in medians of so many pairs of samples: percent of a core, slices, calls."""
    took: list[dict[str, dict[str, Use]]] = []
    for number in range(pairs):
        look = partial(pair, appliance, duration_s, stopped_first=bool(number % 2))
        took.append(steady((appliance,), look)[0])

    def median(of: Callable[[dict[str, dict[str, Use]]], Use]) -> dict[str, float]:
        rows = [of(one).per(duration_s) for one in took]
        return {name: round(statistics.median(row[name] for row in rows), 3) for name in rows[0]}

    def sandboxes(found: dict[str, Use]) -> Use:
        return sum((use for name, use in found.items() if name not in OWN), Use())

    more = [sandboxes(one["running"]) - sandboxes(one["stopped"]) for one in took]
    return {
        **{name: median(lambda one, name=name: one["running"].get(name, Use())) for name in OWN},
        "runsc": median(lambda one: sandboxes(one["stopped"])),
        "programs": median(lambda one: one["running"].get(PROGRAMS, Use())),
        "programs_beside_nothing": median(lambda one: one["stopped"].get(PROGRAMS, Use())),
        "sandboxes_beyond": median(lambda one: sandboxes(one["running"]) - sandboxes(one["stopped"])),
        "sandboxes_beyond_by_pair": [one.per(duration_s)["percent"] for one in more],
        "beyond": median(lambda one: sum(one["running"].values(), Use()) - sandboxes(one["stopped"])),
    }


def ask(appliance: Appliance, models: Sequence[str]) -> None:
    """Ask every model once, so that the appliance has served."""
    with appliance.openai("alpha") as client:
        for model in models:
            client.completions.create(model=model, prompt="hello", max_tokens=4, temperature=0)


def measure(folder: Path, count: int, options: argparse.Namespace) -> dict[str, Any]:
    """Start an appliance with so many models and watch it idle."""
    others = make_models(folder, count - 1)
    arguments = [word for one in others for word in ("--model", str(one))]
    saved = folder / "saved"
    with tempfile.TemporaryDirectory() as place:
        state = Path(place) / "state"
        with running(state, *arguments, "--checkpoints", str(saved)) as appliance:
            ask(appliance, [one["name"] for one in appliance.status()["models"]])
            time.sleep(options.rest)
            found = watch(appliance.process.pid, options.seconds, options.pairs)
            return {"models": count, "load": round(os.getloadavg()[0], 2)} | found


def main() -> int:
    """Measure and print a line of JSON for each number of models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, nargs="+", default=[1, 3, 7], help="numbers of models that are awake")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of a sample")
    parser.add_argument(
        "--pairs", type=int, default=6, help="pairs of samples, with gateway and supervisor and without"
    )
    parser.add_argument("--rest", type=float, default=75.0, help="seconds without a request before a sample")
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
