"""The real run of ``bench/residency.py zipf``: an appliance with more models than fit, asked by Zipf's law.

Models of 300 MB with random weights are made once (``bench/peer_weights.py small``), and each is woken once, so that it
has its checkpoints, before traffic begins; both stay in the folder for the next run. Requests come at the times of a
Poisson process, whatever became of those before them, from as many tenants as the sequence has. One that waited for no
wake is a hit: its trace says so. Beside the appliance's rate stand those of the same sequence by simulation
(``bench/residency_policies.py``).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from appliance.common.catalog import embedded_model, find_files
from appliance.common.config import ModelConfig
from appliance.common.credentials import new_pepper
from appliance.common.keys import KeyRecord, issue, serialise_records
from appliance.common.model_memory import model_need
from appliance.operator import demo
from bench.idle import watch
from bench.process_times import held_kib, tree
from bench.residency_policies import Request, belady, fixed, least_used, lru, names_of
from tests.system.conftest import PLAIN, Appliance, running

KV_BYTES = 32 << 20
CONTEXT = 512
IDLE_S = 86_400.0
TOKENS = 4
WAIT_S = 600.0
"""Longest that one request, or one order about a model, may take."""
CLIENT_NICENESS = -15
"""A client has a machine of its own: it shall not wait for a core itself."""
SAVED_S = 600.0
"""Longest that a checkpoint with a model is waited for, which takes half a core."""
SAVED_BYTES = 250 << 20
"""Least size of a checkpoint with such a model in it; one of imports alone has 150 MB."""
SAMPLE_S = 5.0
"""Seconds between two readings of the number of wakes."""
MINUTE_S = 60.0
IDLE_PAIRS = 6
"""Pairs of samples of an idle appliance, with gateway and supervisor and without."""
TRACE_TRIES = 20


@dataclass(frozen=True, slots=True)
class Asked:
    """One request."""

    model: str
    status: int
    code: str
    """Code of its error; empty where there was none."""
    took_s: float
    waited_s: float
    """Seconds that it waited for a wake; 0: it waited for none."""

    @property
    def hit(self) -> bool:
        """Whether it was answered without a wait."""
        return self.status == 200 and not self.waited_s


def make_models(folder: Path, count: int) -> list[Path]:
    """Make what is missing, in a process that gives its memory back."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(Path(__file__).with_name("peer_weights.py")), "small", str(folder), str(count)]
    subprocess.run(command, check=True)
    for one in (folder, *folder.rglob("*")):
        one.chmod(one.stat().st_mode | (0o055 if one.is_dir() else 0o044))
    return [folder / f"model-{number:02}" for number in range(count)]


def write_tenants(state: Path, tenants: Sequence[str]) -> dict[str, str]:
    """Make a demo's state with these tenants beside its own; returns their keys."""
    state.mkdir(mode=0o700)
    (state / demo.LOCK).touch()
    pepper, plain, records = new_pepper(), dict[str, str](), dict[str, KeyRecord]()
    everybody = (*demo.TENANTS, *tenants)
    for tenant in everybody:
        plain[tenant], digest = issue(f"{tenant}-1", pepper)
        records[f"{tenant}-1"] = KeyRecord(digest, datetime.now(UTC), tenant=tenant)
    (state / "pepper").write_bytes(pepper)
    (state / "credentials.json").write_text(serialise_records(records))
    (state / "keys.json").write_text(json.dumps(plain))
    for name in ("pepper", "credentials.json", "keys.json"):
        (state / name).chmod(0o600)
    policy = demo.POLICY + "".join(demo.TENANT.format(name=name, key=f"{name}-1") for name in everybody)
    (state / "policy.yaml").write_text(policy)
    return plain


def entry(folder: Path) -> dict[str, Any]:
    """Configuration of a model that may sleep."""
    settings = {"kv_bytes": KV_BYTES, "max_context": CONTEXT, "keep": "while_used", "idle_s": IDLE_S}
    return {"name": folder.name, "path": str(folder), **settings}


def need(settings: dict[str, Any]) -> int:
    """Bytes that a model counts with."""
    config = ModelConfig.model_validate(settings)
    return model_need(config, find_files(config.name, Path(settings["path"]))[0]).about


def give(appliance: Appliance, model: str, order: str) -> dict[str, Any]:
    """Give an order about a model."""
    url = f"{appliance.ready['admin']}/models/{model}/{order}"
    return dict(httpx.post(url, timeout=WAIT_S, verify=PLAIN).json())


def prepare(appliance: Appliance, models: Sequence[Path]) -> None:
    """Wake each model once, until a checkpoint with it is there; all sleep afterwards."""
    for model in models:
        began = time.monotonic()
        outcome = give(appliance, model.name, "wake")
        assert outcome["ok"], outcome
        while not _is_saved(appliance, model.name):
            if time.monotonic() > began + SAVED_S:
                raise TimeoutError(f"{model.name} has no checkpoint after {SAVED_S:g} s:\n{appliance.tail()}")
            time.sleep(0.2)
        outcome = give(appliance, model.name, "sleep")
        assert outcome["ok"], outcome
        line = {"prepared": model.name, "s": round(time.monotonic() - began, 1)}
        print(json.dumps(line), file=sys.stderr, flush=True)


def _is_saved(appliance: Appliance, model: str) -> bool:
    """Whether there is a checkpoint that has this model in it: the folder may hold those of other trees too."""
    status = httpx.get(appliance.ready["admin"] + "/status", timeout=WAIT_S, verify=PLAIN).json()
    return any(
        one["role"] == "engine" and one["model"] == model and one["bytes"] >= SAVED_BYTES
        for one in status["checkpoints"]
    )


async def ask(appliance: Appliance, client: httpx.AsyncClient, key: str, model: str) -> Asked:
    """Ask once, and look up in the request's trace how long it waited for a wake."""
    body = {"model": model, "prompt": "hello", "max_tokens": TOKENS}
    began = time.monotonic()
    try:
        answer = await client.post(
            f"{appliance.ready['http']}/v1/completions", json=body, headers={"authorization": f"Bearer {key}"}
        )
    except httpx.HTTPError as error:
        return Asked(model, 0, type(error).__name__, time.monotonic() - began, 0.0)
    took = time.monotonic() - began
    if answer.status_code != 200:
        return Asked(model, answer.status_code, str(answer.json()["error"]["code"]), took, 0.0)
    for _ in range(TRACE_TRIES):  # It ends a moment after the answer.
        # On a connection of its own: a request that meets the end of one would lose the whole measurement.
        trace = await client.get(
            f"{appliance.ready['admin']}/traces/{answer.headers['x-request-id']}", headers={"connection": "close"}
        )
        if trace.status_code == 200:
            break
        await asyncio.sleep(0.05)
    else:
        return Asked(model, trace.status_code, "no trace", took, 0.0)
    found = re.search(r'athanor\.model\.waited_for_wake_ms"[^0-9]*([0-9]+)', trace.text)
    return Asked(model, 200, "", took, int(found[1]) / 1e3 + 1e-3 if found else 0.0)


async def traffic(appliance: Appliance, keys: dict[str, str], requests: Sequence[Request]) -> tuple[list[Asked], int]:
    """Serve the sequence; also returns the most wakes within a minute."""
    samples: list[int] = []

    async def count_wakes(client: httpx.AsyncClient) -> None:
        while True:
            samples.append(wakes((await client.get(appliance.ready["admin"] + "/metrics")).text))
            await asyncio.sleep(SAMPLE_S)

    limits = httpx.Limits(max_connections=512, max_keepalive_connections=64)
    async with httpx.AsyncClient(timeout=WAIT_S, verify=PLAIN, limits=limits) as client:
        counting = asyncio.create_task(count_wakes(client))
        began, tasks = time.monotonic(), list[asyncio.Task[Asked]]()
        for at, model, tenant in requests:
            await asyncio.sleep(max(0.0, began + at - time.monotonic()))
            tasks.append(asyncio.create_task(ask(appliance, client, keys[tenant], model)))
        found = await asyncio.gather(*tasks)
        counting.cancel()
    window = round(MINUTE_S / SAMPLE_S)
    most = max((later - samples[max(0, at - window)] for at, later in enumerate(samples)), default=0)
    return found, most


def wakes(metrics: str) -> int:
    """Wakes that were begun, from a scrape."""
    return round(sum(float(one) for one in re.findall(r"^athanor_model_wakes_total\{.*\} (\S+)$", metrics, re.M)))


def held(appliance: Appliance) -> dict[str, int]:
    """Memory and open files of the host's processes, to see what grows: that which they alone hold, and their share of
    files. The supervisor keeps the weights of awake models in memory, which is most of the latter."""
    found = {}
    for pid in tree([appliance.process.pid]):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            if (role := next((one for one in ("supervisor", "gateway") if f"child\0{one}" in line), "")) == "":
                continue
            found |= {f"{role}_{kind}_kib": kib for kind, kib in held_kib(pid).items()}
            found[f"{role}_files"] = len(os.listdir(f"/proc/{pid}/fd"))
        except OSError:
            continue
    return found


def idle(appliance: Appliance, duration_s: float) -> dict[str, Any]:
    """Processor time without requests, in percent of a core, beside what the same sandboxes take while gateway and
    supervisor are stopped (``bench/idle.py``): as many others that sleep for good, with which they were compared
    before, take a tenth more or less by themselves, which with seven models is more than the bar."""
    return watch(appliance.process.pid, duration_s / IDLE_PAIRS, IDLE_PAIRS)


def asleep_processes(appliance: Appliance) -> int:
    """Processes that name a sandbox of a sleeping model of this appliance."""
    states = {one["name"]: one["state"] for one in appliance.status()["models"]}
    lines = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            lines.append((folder / "cmdline").read_bytes().decode(errors="replace"))
        except OSError:
            continue
    names = [f"{role}-{name}" for name, state in states.items() if state == "asleep" for role in ("engine", "text")]
    return sum(str(appliance.state) in line and any(f"{name}" in line for name in names) for line in lines)


def measure(folder: Path, count: int, fit: int, requests: Sequence[Request], idle_s: float) -> dict[str, Any]:
    """Make models, start an appliance, serve the sequence, watch it idle."""
    models = make_models(folder / "models", count)
    entries, saved = [entry(one) for one in models], folder / "saved"
    own = need({"name": demo.EMBEDDED_MODEL, "path": str(embedded_model()), "kv_bytes": demo.KV_BYTES})
    budget = own + fit * max(map(need, entries))
    env = {"ATHANOR_SANDBOX__MODELS_MEMORY_BYTES": str(budget)}
    tenants = sorted({tenant for _, _, tenant in requests})
    with tempfile.TemporaryDirectory() as place:
        state = Path(place) / "state"
        keys = write_tenants(state, tenants)
        with running(state, "--checkpoints", str(saved), env=env) as appliance:
            described = appliance.state / "models.d"
            described.mkdir(exist_ok=True)
            (described / "models.yaml").write_text(json.dumps({"models": entries}))
            reloaded = httpx.post(appliance.ready["admin"] + "/reload", timeout=WAIT_S, verify=PLAIN)
            assert reloaded.status_code == 200, reloaded.text
            prepare(appliance, models)
            before, scrape = held(appliance), httpx.get(appliance.ready["admin"] + "/metrics", verify=PLAIN).text
            os.setpriority(os.PRIO_PROCESS, 0, CLIENT_NICENESS)  # this thread's alone, which is the client
            began = time.monotonic()
            asked, most = asyncio.run(traffic(appliance, keys, requests))
            minutes = (time.monotonic() - began) / MINUTE_S
            after = httpx.get(appliance.ready["admin"] + "/metrics", verify=PLAIN).text
            found = summary(asked, requests, fit)
            found |= {"wakes_a_minute": round((wakes(after) - wakes(scrape)) / minutes, 1), "most_wakes": most}
            found["starts"] = starts(after) - starts(scrape)
            awake = sum(one["state"] == "ready" for one in appliance.status()["models"])
            found |= {"awake": awake, "before": before, "after": held(appliance)}
            found["load"] = round(os.getloadavg()[0], 1)
            if idle_s:
                time.sleep(MINUTE_S)  # The last requests, and what follows them, are no part of it.
                found["idle"] = idle(appliance, idle_s)
            found["asleep_processes"] = asleep_processes(appliance)
    return found


def starts(metrics: str) -> Counter[str]:
    """Starts of sandboxes by outcome, from a scrape."""
    found: Counter[str] = Counter()
    for labels, value in re.findall(r"^athanor_sandbox_starts_total\{(.*)\} (\S+)$", metrics, re.M):
        outcome = next(one for one in ("cold", "restored", "fallen_back") if f'"{one}"' in labels)
        found[outcome] += round(float(value))
    return found


def summary(asked: Sequence[Asked], requests: Sequence[Request], fit: int) -> dict[str, Any]:
    """Figures of what became of the requests."""
    names = names_of(requests)
    refused = sorted(one.took_s for one in asked if one.code == "model_asleep")
    errors = Counter(f"{one.status} {one.code}" for one in asked if one.status != 200 and one.code != "model_asleep")
    waits = sorted(one.waited_s for one in asked if one.waited_s)
    hits = sorted(one.took_s for one in asked if one.hit)
    found: dict[str, Any] = {"requests": len(asked), "errors": dict(errors), "refused": len(refused)}
    found |= {"refused_in_ms": spread(refused), "wait_ms": spread(waits), "hit_in_ms": spread(hits)}
    rates = {"hit_rate": len(hits) / len(asked), "uses": least_used(requests, fit)}
    rates |= {"lru": lru(names, fit), "fixed": fixed(names, fit), "belady": belady(names, fit)}
    return found | {name: round(100 * rate, 1) for name, rate in rates.items()}


def spread(values: Sequence[float]) -> dict[str, int]:
    """Median, p99 and maximum of sorted seconds, in milliseconds; empty where there are none."""
    if not values:
        return {}
    found = {"p50": statistics.median(values), "p99": values[min(len(values) - 1, int(0.99 * len(values)))]}
    return {name: round(1e3 * one) for name, one in (found | {"max": values[-1]}).items()}
