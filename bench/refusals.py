"""How fast requests of sleeping models are refused while other models wake.

Four models of 300 MB, of which two fit, are woken by command one after the other, each in the place of another. Beside
it a client asks for one that sleeps, with a deadline that is before the end of any wake: each request has to be refused
at once, with an estimate. How long the gateway's and the client's own threads were ready and had no core is told beside
it (``/proc/PID/task/TID/schedstat``), so that a refusal that waits for a core is told from one that waits for the loop.
Requests are those of one connection, so the client's own time counts little. However the bench ends, its appliance
ends with it.

Run as root: ``python bench/refusals.py --folder DIR [--seconds 60] [--still] [--turns] [--unprepared]``; ``--still``
wakes nothing (the control), and ``--turns`` has the gateway's loop take turns of 5 s with its own nice value and with
0. With ``--unprepared`` there are no checkpoints: models wake cold while templates are made. Models and checkpoints in
the folder are those of ``bench/residency.py zipf``.
"""

from __future__ import annotations

import argparse
import ctypes
import http.client
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from appliance.common.catalog import embedded_model
from appliance.operator import demo
from appliance.operator.precedence import NICENESS
from bench.process_times import tree
from bench.residency_zipf import CLIENT_NICENESS, WAIT_S, entry, give, make_models, need, prepare, spread, write_tenants
from tests.system.conftest import PLAIN, Appliance, running

MODELS, FIT = 4, 2
TURN_S = 5.0
"""Seconds of each arm's turn."""
GAP_S = 0.05
"""Seconds between the ends of requests and the next ones."""
DEADLINE_MS = 100
PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have the appliance end when the bench does, also when that is killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def waited_s(pid: int) -> float:
    """Seconds that a process's first thread was ready to run and had no core."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[1]) / 1e9


def gateway(appliance: Appliance) -> int:
    """Process of the gateway."""
    for pid in tree([appliance.process.pid]):
        if "child\0gateway" in Path(f"/proc/{pid}/cmdline").read_text(errors="replace"):
            return pid
    raise LookupError("no gateway")


class Waking(threading.Thread):
    """Wakes one model after the other, by command."""

    def __init__(self, appliance: Appliance, names: list[str]) -> None:
        super().__init__(daemon=True)
        self.appliance, self.names = appliance, names
        self.ended = threading.Event()
        self.outcomes = Counter[str]()
        self.asleep = names[-1]
        """A model that sleeps, and is not the next to wake."""

    def run(self) -> None:
        """Wake until it is to end; what is in the way sleeps first."""
        number = 0
        while not self.ended.is_set():
            name, out = self.names[number % len(self.names)], self.names[(number - FIT) % len(self.names)]
            self.asleep = self.names[(number + 1) % len(self.names)]
            give(self.appliance, out, "sleep")
            outcome = give(self.appliance, name, "wake")
            self.outcomes["woken" if outcome["ok"] else str(outcome["message"])] += 1
            number += 1


class Arm:
    """Requests while the gateway's loop had one nice value."""

    def __init__(self, niceness: int) -> None:
        self.niceness = niceness
        self.refused = list[float]()
        """Seconds of each refusal."""
        self.other = Counter[str]()
        self.waited = [0.0, 0.0]
        """Seconds in which the gateway's and the client's thread were ready and had no core."""

    def figures(self) -> dict[str, Any]:
        """What is printed of it."""
        found: dict[str, Any] = {"refused": len(self.refused), "refused_ms": spread(sorted(self.refused))}
        over = sum(one > 0.05 for one in self.refused)
        gateway_s, client_s = (round(one, 2) for one in self.waited)
        return found | {
            "other": dict(self.other),
            "over_50_ms": over,
            "gateway_ready_s": gateway_s,
            "client_ready_s": client_s,
        }


def ask_in_turns(arms: list[Arm], pid: int, address: str, key: str, waking: Waking, seconds: float) -> None:
    """Ask, with a turn of ``TURN_S`` for each arm."""
    until, number = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        arm = arms[number % len(arms)]
        os.setpriority(os.PRIO_PROCESS, pid, arm.niceness)
        before = waited_s(pid), waited_s(os.getpid())
        ask(address, key, waking, min(TURN_S, until - time.monotonic()), arm)
        after = waited_s(pid), waited_s(os.getpid())
        arm.waited = [total + late - early for total, late, early in zip(arm.waited, after, before, strict=True)]
        number += 1


def ask(address: str, key: str, waking: Waking, seconds: float, arm: Arm) -> None:
    """Ask again and again; notes what came."""
    connection = http.client.HTTPConnection(address)
    until = time.monotonic() + seconds
    headers = {"authorization": f"Bearer {key}", "x-request-timeout-ms": str(DEADLINE_MS)}
    while time.monotonic() < until:
        body = json.dumps({"model": waking.asleep, "prompt": "hello", "max_tokens": 1})
        began = time.perf_counter()
        connection.request("POST", "/v1/completions", body, headers | {"content-type": "application/json"})
        answer = connection.getresponse()
        found = json.loads(answer.read())
        took = time.perf_counter() - began
        code = str(found.get("error", {}).get("code", answer.status))
        if code == "model_asleep":
            arm.refused.append(took)
        else:
            arm.other[code] += 1
        time.sleep(GAP_S)
    connection.close()


def measure(folder: Path, seconds: float, *, still: bool, turns: bool, prepared: bool) -> dict[str, Any]:
    """Start an appliance, wake and ask."""
    arms = {f"nice {one}": Arm(one) for one in (NICENESS, 0)[: 1 + turns]}
    models = make_models(folder / "models", MODELS)
    entries = [entry(one) for one in models]
    own = need({"name": demo.EMBEDDED_MODEL, "path": str(embedded_model()), "kv_bytes": demo.KV_BYTES})
    env = {"ATHANOR_SANDBOX__MODELS_MEMORY_BYTES": str(own + FIT * max(map(need, entries)))}
    with tempfile.TemporaryDirectory() as place:
        state = Path(place) / "state"
        keys = write_tenants(state, ["asker"])
        saved = "--checkpoints", str(folder / "saved" if prepared else Path(place) / "saved")
        with running(state, *saved, env=env, preexec_fn=end_with_parent) as appliance:
            described = appliance.state / "models.d"
            described.mkdir(exist_ok=True)
            (described / "models.yaml").write_text(json.dumps({"models": entries}))
            httpx.post(appliance.ready["admin"] + "/reload", timeout=WAIT_S, verify=PLAIN).raise_for_status()
            if prepared:
                prepare(appliance, models)
            waking = Waking(appliance, [one.name for one in models])
            if not still:
                waking.start()
            pid, address = gateway(appliance), urlsplit(appliance.ready["http"]).netloc
            os.setpriority(os.PRIO_PROCESS, os.getpid(), CLIENT_NICENESS)
            ask_in_turns(list(arms.values()), pid, address, keys["asker"], waking, seconds)
            waking.ended.set()
            if not still:
                waking.join(WAIT_S)
    found = {name: arm.figures() for name, arm in arms.items()}
    return found | {"wakes": dict(waking.outcomes), "load": os.getloadavg()[0]}


def main() -> int:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--still", action="store_true")
    parser.add_argument("--turns", action="store_true")
    parser.add_argument("--unprepared", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the appliance ends as well
    how = {"still": options.still, "turns": options.turns, "prepared": not options.unprepared}
    found = measure(options.folder.resolve(), options.seconds, **how)
    print(json.dumps(found, indent=2), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
