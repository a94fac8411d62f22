"""Figures of models that sleep: time of a wake, memory awake and asleep, and how often a request finds its model awake.

``wake`` puts the demo's model to sleep and wakes it by command, so many times; the first wake of a run may be a cold
start, all others restore checkpoints. Memory is the proportional share of every process of the model's sandboxes.
``zipf`` serves four copies of the demo's model, of which two fit, to requests drawn by Zipf's law, one after the other.
A request that waits for no wake is a hit. Beside the appliance's rate stand those of the same sequence by simulation:
least recently used, the best two models kept for good, and Belady's bound, which knows what comes.

Run: ``python bench/residency.py [wake|zipf] [--rounds 5] [--requests 40] [--exponent 1.0]``.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from appliance.common.catalog import embedded_model, find_files
from appliance.common.config import ModelConfig
from appliance.common.model_memory import model_need
from tests.system.conftest import Appliance, running

MODEL = "athanor-mini"
MODELS = ("copy-a", "copy-b", "copy-c", "copy-d")
FIT = 2
"""Copies that fit at a time."""
KV_BYTES = 32 << 20
IDLE_S = 3_600.0
WAIT_S = 120.0


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


def lru(sequence: Sequence[str], places: int) -> float:
    """Hit rate of the least recently used."""
    kept: list[str] = []
    hits = 0
    for name in sequence:
        if name in kept:
            hits += 1
            kept.remove(name)
        elif len(kept) >= places:
            kept.pop(0)
        kept.append(name)
    return hits / len(sequence)


def belady(sequence: Sequence[str], places: int) -> float:
    """Hit rate of who knows what comes: what is needed last goes. Every model that is asked for has to be there."""
    kept: set[str] = set()
    hits = 0
    for at, name in enumerate(sequence):
        if name in kept:
            hits += 1
            continue
        if len(kept) >= places:
            rest = sequence[at + 1 :]
            kept.remove(max(sorted(kept), key=lambda one: rest.index(one) if one in rest else len(sequence)))
        kept.add(name)
    return hits / len(sequence)


def fixed(sequence: Sequence[str], places: int) -> float:
    """Hit rate of the best models kept for good, as if the others needed no place: it may exceed Belady's. Their own
    first loads are misses."""
    best = Counter(sequence).most_common(places)
    return (sum(count for _, count in best) - len(best)) / len(sequence)


def measure_hits(requests: int, exponent: float) -> dict[str, Any]:
    """Serve the sequence."""
    weights = [1 / rank**exponent for rank in range(1, len(MODELS) + 1)]
    sequence = random.Random(7).choices(MODELS, weights, k=requests)
    entry = {"path": str(embedded_model()), "kv_bytes": KV_BYTES, "keep": "while_used", "idle_s": IDLE_S}
    need = model_need(ModelConfig.model_validate(entry | {"name": "x"}), find_files("x", embedded_model())[0]).about
    own = model_need(ModelConfig(name="x", path=embedded_model()), find_files("x", embedded_model())[0]).about
    env = {"ATHANOR_SANDBOX__MODELS_MEMORY_BYTES": str(own + FIT * need)}
    with tempfile.TemporaryDirectory() as folder, running(Path(folder) / "state", env=env) as appliance:
        entries = appliance.state / "models.d"
        entries.mkdir(exist_ok=True)
        (entries / "copies.yaml").write_text(json.dumps({"models": [entry | {"name": name} for name in MODELS]}))
        reloaded = httpx.post(appliance.ready["admin"] + "/reload", timeout=WAIT_S)
        assert reloaded.status_code == 200, reloaded.text
        client = appliance.openai(timeout=WAIT_S)
        hits, waits, refused, most = 0, list[float](), 0, 0
        for name in sequence:
            states = {one["name"]: one["state"] for one in appliance.status()["models"]}
            most = max(most, sum(states[one] in ("ready", "waking") for one in MODELS))
            began = time.perf_counter()
            try:
                client.completions.create(model=name, prompt="hello", max_tokens=4)
            except openai.APIStatusError as error:
                refused += 1
                time.sleep(float(error.response.headers.get("retry-after", "1")))
                continue
            hit = states[name] == "ready"
            hits += hit
            if not hit:
                waits.append(time.perf_counter() - began)
        return {
            "requests": requests,
            "most_awake": most,
            "refused": refused,
            "hit_rate": round(hits / requests, 3),
            "lru": round(lru(sequence, FIT), 3),
            "fixed": round(fixed(sequence, FIT), 3),
            "belady": round(belady(sequence, FIT), 3),
            "median_wait_s": round(statistics.median(waits), 2),
            "longest_wait_s": round(max(waits), 2),
        }


def main() -> int:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("wake", "zipf"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--exponent", type=float, default=1.0)
    options = parser.parse_args()
    if options.what != "zipf":
        print(json.dumps({"wake": measure_wakes(options.rounds)}, indent=2), flush=True)
    if options.what != "wake":
        print(json.dumps({"zipf": measure_hits(options.requests, options.exponent)}, indent=2), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
