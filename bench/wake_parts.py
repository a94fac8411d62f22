"""Where the time of a wake goes: both sandboxes of a model restored at the same time, part by part, without a gateway.

``engine ahead`` is the checkpoint with the model loaded, ``engine imports`` the one with imports alone; they alternate,
so that other work on the machine meets both. Beside each part's seconds stands the processor time that the sandboxes
had taken when they were ready: on a busy machine it says what the wake costs where the seconds say what it waited for.

``--turns`` has two models with the same files wake in each other's place: behind the other's end, and with sandboxes
that are made while it ends (``appliance.supervisor.gate``).

Run as root: ``python bench/wake_parts.py MODEL [--rounds 4] [--ahead] [--turns] [--saved DIR]``. With ``--ahead`` the
slow kind is left out, and with ``--saved`` checkpoints stay for the next run, whose first wake reads them for their
digests. ``python bench/peer_weights.py shape DIR`` makes a model of 1 GB (``chmod o+r`` its files).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from appliance.common.catalog import read_model
from appliance.common.config import ApplianceConfig, ModelConfig, SandboxConfig
from appliance.common.form_cache import open_form_cache
from appliance.operator import kernels
from appliance.selftest import intruder
from appliance.supervisor import boot as boots
from appliance.supervisor import templates
from appliance.supervisor import warm as warmth
from appliance.supervisor.boot import Booted, BootPlan, end, plan_boot
from appliance.supervisor.forms import Forms
from appliance.supervisor.gate import Latch
from appliance.supervisor.templates import starts
from appliance.supervisor.warm import WarmStarts, open_warm_starts
from isolation.gvisor.gvisor_runtime import GvisorRuntime
from isolation.ipc.messages import Role

KV_BYTES = 256 << 20
CONTEXT = 2_048

PARTS: tuple[tuple[Any, str, str], ...] = (
    (WarmStarts, "_find", "find"),
    (boots, "check_model", "check files"),
    (GvisorRuntime, "_create", "create"),
    (GvisorRuntime, "_begin", "restore"),
    (GvisorRuntime, "boot", "create and restore"),
    (boots._Booting, "connect", "connect"),
    (boots.SavedStart, "verified", "verify"),
    (boots._Booting, "configure", "greet"),
    (boots._Booting, "await_ready", "load"),
    (boots._Booting, "probe", "probe"),
    (boots.SavedStart, "lock_weights", "lock"),
)
"""Methods and functions that are timed, with the names that their times have."""


class Parts:
    """Seconds of each part, by thread."""

    def __init__(self) -> None:
        self.spent: dict[int, dict[str, float]] = {}
        for owner, method, name in PARTS:
            setattr(owner, method, self._timed(getattr(owner, method), name))

    def _timed(self, real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            began = time.monotonic()
            try:
                return real(*args, **options)
            finally:
                mine = self.spent.setdefault(threading.get_ident(), {})
                mine[name] = round(mine.get(name, 0.0) + time.monotonic() - began, 2)

        return timed

    def take(self) -> dict[str, float]:
        """What this thread has spent since the last time."""
        return self.spent.pop(threading.get_ident(), {})


def measure(
    model: Path, rounds: int, folder: Path, saved: Path, kinds: tuple[str, ...], *, turns: bool
) -> list[dict[str, Any]]:
    """Restore so many times each way."""
    run_dir = folder / "run"
    run_dir.mkdir(mode=0o755)
    settings = {"path": str(model), "kv_bytes": KV_BYTES, "max_context": CONTEXT, "keep": "while_used"}
    config = ApplianceConfig(
        models=tuple(ModelConfig.model_validate(settings | {"name": name}) for name in ("model", "other")),
        policy=model,
        credentials=model,
        pepper=model,
        run_dir=run_dir,
        sandbox=SandboxConfig(checkpoints=saved, kernels=kernels.installed()),
    )
    warmth.BEGIN_AFTER_S, templates.TEMPLATE_CORES = 0.0, 1.0
    with intruder.gvisor() as runtime, ThreadPoolExecutor(4) as pool:
        warm = open_warm_starts(config, runtime)
        assert warm is not None
        forms = Forms(open_form_cache(saved.with_name(saved.name + "-forms.json")), runtime.label)
        pairs = []
        for one in config.models:
            files = read_model(one.name, model)
            roles = (Role.ENGINE, Role.TEXT)
            pairs.append([plan_boot(config, one, files, runtime, role) for role in roles])
        for plan in pairs[0]:
            booted = warm.boot(forms.told(plan), threading.Event())
            forms.note(plan, booted)
            end(booted)
            for start in starts(forms.told(plan)):
                warm.take(start, booted.boot_s)
        bench = _Bench(warm, pool, [[forms.told(plan) for plan in pair] for pair in pairs])
        return bench.take_turns(rounds) if turns else bench.wake_alone(rounds, kinds)


class _Bench:
    """Wakes two models with the same files, which have the same checkpoints."""

    def __init__(self, warm: WarmStarts, pool: ThreadPoolExecutor, pairs: list[list[BootPlan]]) -> None:
        self._warm, self._pool, self._pairs = warm, pool, pairs
        self._parts = Parts()
        self.found: list[dict[str, Any]] = []

    def _wake(self, plan: BootPlan, gate: Latch) -> tuple[Booted, dict[str, float]]:
        self._parts.take()
        booted = self._warm.boot(plan, threading.Event(), gate)
        return booted, self._parts.take()

    def _begin(self, plans: list[BootPlan], gate: Latch) -> list[Future[tuple[Booted, dict[str, float]]]]:
        return [self._pool.submit(self._wake, plan, gate) for plan in plans]

    def _note(self, name: str, took: float, woken: list[tuple[Booted, dict[str, float]]], **more: float) -> None:
        (first, spent), (second, beside) = woken
        busy = [round(one.sandbox.processor_s(), 2) for one in (first, second)]
        row = {"wake": name, "wake_s": round(took, 2), "engine": spent, "text": beside, "processor_s": busy}
        self.found.append(row | more | {"load": round(os.getloadavg()[0], 1)})
        print(json.dumps(self.found[-1]), flush=True)

    def wake_alone(self, rounds: int, kinds: tuple[str, ...]) -> list[dict[str, Any]]:
        """Wake a model while nothing else happens, from each kind of checkpoint."""
        engine, text = self._pairs[0]
        plans = {"engine ahead": engine, "engine imports": replace(engine, ahead_bytes=0)}
        for name in kinds * rounds:
            began = time.monotonic()
            woken = [one.result() for one in self._begin([plans[name], text], Latch())]
            self._note(name, time.monotonic() - began, woken)
            list(self._pool.map(end, (booted for booted, _ in woken)))
        return self.found

    def take_turns(self, rounds: int) -> list[dict[str, Any]]:
        """Wake each model in the place of the other: when that has ended, or with sandboxes that are made meanwhile."""
        awake = [one.result()[0] for one in self._begin(self._pairs[0], Latch())]
        for number in range(2 * rounds):
            name, gate = ("behind the other", "beside the other")[number % 2], Latch()
            began = time.monotonic()
            ends = [self._pool.submit(end, booted) for booted in awake]
            gate.shut()
            begun = self._begin(self._pairs[1 - number % 2], gate) if number % 2 else []
            for one in ends:
                one.result()
            ended = round(time.monotonic() - began, 2)
            gate.open()
            woken = [one.result() for one in begun or self._begin(self._pairs[1 - number % 2], gate)]
            self._note(name, time.monotonic() - began, woken, other_ended_s=ended)
            awake = [booted for booted, _ in woken]
        list(self._pool.map(end, awake))
        return self.found


def main() -> int:
    """Print each wake, then the best and the median of each kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--ahead", action="store_true", help="only wakes from the checkpoint with the model")
    parser.add_argument("--turns", action="store_true", help="two models that wake in each other's place")
    parser.add_argument("--saved", type=Path, help="folder of checkpoints that stay")
    options = parser.parse_args()
    kinds = ("engine ahead",) if options.ahead else ("engine ahead", "engine imports")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        saved = (options.saved or Path(folder) / "saved").absolute()
        found = measure(options.model.resolve(), options.rounds, Path(folder), saved, kinds, turns=options.turns)
    for name in dict.fromkeys(one["wake"] for one in found):
        times = sorted(one["wake_s"] for one in found if one["wake"] == name)
        print(json.dumps({"wake": name, "best_s": times[0], "median_s": times[len(times) // 2]}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
