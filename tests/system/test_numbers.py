"""Status, top, console, metrics and traces show one number for one thing, under a steady load, also when the clock of
the gateway's machine is set by three days.

A number that moves while it is asked for cannot be compared. So each surface is asked between two looks at the status,
and counts where the number stood still between them; what never agrees until the deadline differs.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from appliance.gateway.console.latency import percentile
from appliance.operator.cli.app import for_line
from tests.system.conftest import PLAIN, Appliance, running

pytestmark = [pytest.mark.runsc, pytest.mark.timeout(300)]

TOLERANCE = 0.03
"""By what share two surfaces may differ in a number that flows. Requests in engines, KV blocks and sandboxes are whole
numbers that stand still for a moment, and then they are equal."""

STREAMS = 3
TOKENS = 48
REFUSED_S, INVALID_S = 0.25, 1.0
"""Between two calls with a wrong key, and between two malformed ones."""

WINDOW_S = 10.0
"""Of the gateway's rates; scrapes are compared over as long."""

PATIENCE_S = 60.0
DAY_S = 86_400
ROUNDING = 1e-9
"""By what share one number may differ from itself, after a division and a multiplication."""

Numbers = dict[str, float]
"""Numbers by name."""

COUNTS = (
    "requests",
    "ok",
    "refused",
    "invalid",
    "cancelled",
    "failed",
    "input_tokens",
    "cached_tokens",
    "output_tokens",
)
KV = ("kv_blocks", "kv_held", "kv_free", "kv_cached")
FLOWS = ("requests", "refused", "input_tokens", "output_tokens")
RATES = tuple(f"rate of {name}" for name in FLOWS)
TIMES = tuple(f"{time} {share}" for time in ("first_token", "each_token", "total") for share in ("p50", "p90", "p99"))
NOW = ("running", "waiting", "in_flight", "sandboxes_ready", "restarts", "up_s")
WHOLE = frozenset({*KV, *NOW} - {"up_s"})


@dataclass
class Load:
    """Callers who go on until they are told to pause."""

    appliance: Appliance
    stop: threading.Event = field(default_factory=threading.Event)
    run: threading.Event = field(default_factory=threading.Event)
    busy: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def call(self, expected: int, key: str, **body: Any) -> None:
        """One call, whose status must be this."""
        url, headers = f"{self.appliance.ready['http']}/v1/completions", {"authorization": f"Bearer {key}"}
        body = {"model": "athanor-mini", "prompt": "Count from one to a great number: one, two, three, four,", **body}
        answer = httpx.post(url, json=body, headers=headers, timeout=60, verify=PLAIN)
        if answer.status_code != expected:
            self.failures.append(f"{answer.status_code} instead of {expected}: {answer.text[:300]}")

    def repeat(self, name: str, pause_s: float, expected: int, key: str, **body: Any) -> None:
        """Call again and again, as long as the load shall run."""
        while not self.stop.is_set():
            if not self.run.wait(0.1):
                continue
            self.busy[name] = 1
            began = time.monotonic()
            self.call(expected, key, **body)
            self.busy[name] = 0
            self.stop.wait(max(0.0, pause_s - (time.monotonic() - began)))

    def pause(self) -> None:
        """Let what runs end."""
        self.run.clear()
        wait(lambda: not any(self.busy.values()), "the callers to pause")


def wait(holds: Callable[[], bool], what: str) -> None:
    """Until something holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, f"no {what} in {PATIENCE_S:g} s"
        time.sleep(0.05)


@dataclass
class Stage:
    """An appliance under load whose gateway's wall clock the file sets."""

    appliance: Appliance
    load: Load
    clock: Path
    listed: dict[str, dict[str, Any]] = field(default_factory=dict)
    """All requests that the traces have listed, by id."""

    def get(self, path: str) -> Any:
        """An answer of the admin listener."""
        return httpx.get(self.appliance.ready["admin"] + path, timeout=10, verify=PLAIN)

    def command(self, *words: str) -> Any:
        """What a command prints as JSON."""
        result = CliRunner().invoke(for_line(words), [*words, "-o", "json", "--admin", self.appliance.ready["admin"]])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory, runsc_path: Path) -> Iterator[Stage]:
    """Three callers in a closed loop, and two who are wrong, at a steady pace: slow enough that traces, which keep 512
    requests, have each of them when they are listed."""
    folder = tmp_path_factory.mktemp("numbers")
    clock = folder / "clock"
    clock.write_text("0")
    command = (sys.executable, str(Path(__file__).with_name("clocked.py")), str(clock))
    with running(folder / "state", command=command) as appliance, ThreadPoolExecutor(STREAMS + 2) as pool:
        load = Load(appliance)
        good = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        for number in range(STREAMS):
            key = appliance.key(("alpha", "beta")[number % 2])
            pool.submit(load.repeat, f"stream {number}", 0.5, 200, key, **good)
        pool.submit(load.repeat, "refused", REFUSED_S, 401, "nobody", **good)
        pool.submit(load.repeat, "invalid", INVALID_S, 400, appliance.key("alpha"), max_tokens=-1)
        load.run.set()
        try:
            yield Stage(appliance, load, clock)
        finally:
            load.stop.set()
        assert not load.failures


def of_load(load: Mapping[str, Any]) -> Numbers:
    """Numbers of the value that status, top and console have."""
    found = {name: load["counts"][name] for name in COUNTS if name != "requests"}
    found |= {name: load[name] for name in ("requests", *KV, *NOW)}
    return found | {f"rate of {name}": load["rates"][name] for name in FLOWS}


def of_latency(latency: Mapping[str, Any]) -> Numbers:
    """Percentiles that status and console have."""
    return {
        f"{time} {share}": latency[time][share]
        for time in ("first_token", "each_token", "total")
        if latency[time] is not None
        for share in ("p50", "p90", "p99")
    }


def status(stage: Stage) -> Numbers:
    """``athanor status``: its sums, which are what its rows add up to."""
    body = stage.get("/status").json()
    return of_load(body["load"]) | of_latency(body["latency"])


def status_rows(stage: Stage) -> Numbers:
    """The rows of ``athanor status``, added up."""
    body = stage.get("/status").json()
    engines, tenants = [model["engine"] for model in body["models"]], body["tenants"]
    return {
        "running": sum(one["running"] for one in engines),
        "waiting": sum(one["waiting"] for one in engines),
        "kv_blocks": sum(one["num_blocks"] for one in engines),
        "kv_free": sum(one["free_blocks"] for one in engines),
        "kv_cached": sum(one["cached_blocks"] for one in engines),
        "in_flight": sum(one["in_flight"] for one in tenants),
        "rate of output_tokens": sum(one["output_tokens_per_s"] for one in tenants),
    }


def top(stage: Stage) -> Numbers:
    """``athanor top --once``, with its rows in place of the sums where it has rows."""
    found = stage.command("top", "--once")
    models, tenants = found["models"], found["tenants"]
    return of_load(found["load"]) | {
        "running": sum(one["running"] for one in models),
        "waiting": sum(one["waiting"] for one in models),
        "restarts": sum(one["restarts"] for one in models),
        "kv_held": sum(one["kv_used"] * one["num_blocks"] for one in models),
        "in_flight": sum(one["in_flight"] for one in tenants),
        "rate of output_tokens": sum(one["output_tokens_per_s"] for one in tenants),
    }


def console(stage: Stage) -> Numbers:
    """What the console's headline shows."""
    look = stage.get("/console/look").json()
    return of_load(look["load"]) | of_latency(look["latency"])


def console_rows(stage: Stage) -> Numbers:
    """What the console's rows show, added up."""
    look = stage.get("/console/look").json()
    pools, rows = [model["kv"] for model in look["models"]], look["tenants"]["rows"]
    boxes = [box for model in look["models"] for box in model["sandboxes"]]
    return {
        "running": sum(model["running"] for model in look["models"]),
        "waiting": sum(model["waiting"] for model in look["models"]),
        "kv_blocks": sum(pool["blocks"] for pool in pools),
        "kv_free": sum(pool["free"] for pool in pools),
        "kv_held": sum(one["held"] for pool in pools for one in pool["accounts"]),
        "kv_cached": sum(one["cached"] for pool in pools for one in pool["accounts"]),
        "in_flight": sum(row["in_flight"] for row in rows),
        "rate of output_tokens": sum(row["output_tokens_per_s"] for row in rows),
        "sandboxes_ready": sum(box["state"] == "ready" for box in boxes),
        "restarts": sum(box["restarts"] for box in boxes),
    }


def scrape(stage: Stage) -> Numbers:
    """Counters and gauges of ``/metrics``, all series of a name added up."""
    found: Numbers = dict.fromkeys(COUNTS, 0.0)
    names = {
        "athanor_engine_running_requests": "running",
        "athanor_engine_waiting_requests": "waiting",
        "athanor_engine_kv_blocks": "kv_blocks",
        "athanor_engine_kv_free_blocks": "kv_free",
        "athanor_engine_kv_cached_blocks": "kv_cached",
        "athanor_sandbox_ready": "sandboxes_ready",
        "athanor_sandbox_restarts_total": "restarts",
    }
    for family in text_string_to_metric_families(stage.get("/metrics").text):
        for sample in family.samples:
            name = names.get(sample.name)
            if sample.name == "athanor_tokens_total":
                name = f"{sample.labels['athanor_token_type']}_tokens"
            elif sample.name == "athanor_requests_total":
                name = sample.labels["athanor_outcome"]
                found["requests"] += sample.value
            if name is not None:
                found[name] = found.get(name, 0.0) + sample.value
    found["kv_held"] = found["kv_blocks"] - found["kv_free"]
    return found


def listed(stage: Stage) -> Numbers:
    """Counts of the requests that ``athanor traces`` lists, now and before, which are all there ever were, and the
    percentiles of those that it lists now, the last 512."""
    body = stage.command("traces", "-n", "512")
    stage.listed.update((row["request_id"], row) for row in body["traces"])
    rows = list(stage.listed.values())
    assert len(rows) == body["recorded"], "requests that were never listed"
    outcomes = Counter(row["outcome"] for row in rows)
    found: Numbers = {name: outcomes[name] for name in ("ok", "refused", "invalid", "cancelled", "failed")}
    found |= {name: sum(row[name] for row in rows) for name in ("input_tokens", "cached_tokens", "output_tokens")}
    answered = [row for row in body["traces"] if row["outcome"] == "ok"]
    for title, name in (("first_token", "ttft_s"), ("each_token", "token_s"), ("total", "duration_s")):
        values = sorted(row[name] for row in answered if row[name] is not None)
        if values:
            found |= {f"{title} {share}": percentile(values, int(share[1:]) / 100) for share in ("p50", "p90", "p99")}
    return found | {"requests": body["recorded"]}


class OverTime:
    """Rates of a surface that has counts alone: between two looks a window apart, by this machine's monotonic clock."""

    def __init__(self, ask: Callable[[Stage], Numbers], names: tuple[str, ...]) -> None:
        self._ask, self._names = ask, names
        self._seen: deque[tuple[float, Numbers]] = deque()

    def __call__(self, stage: Stage) -> Numbers:
        """The surface's numbers, with rates once there are two looks."""
        now, found = time.monotonic(), self._ask(stage)
        self._seen.append((now, found))
        while len(self._seen) > 2 and now - self._seen[1][0] >= WINDOW_S:
            self._seen.popleft()
        then, before = self._seen[0]
        if now - then < WINDOW_S:
            return dict(found)
        rates = {name: (found[name] - before[name]) / (now - then) for name in self._names}
        return found | {f"rate of {name}": value for name, value in rates.items()}


def surfaces() -> dict[str, tuple[Callable[[Stage], Numbers], tuple[str, ...]]]:
    """Each surface and the numbers that it must have. Traces have requests that have ended, and nothing that flows."""
    return {
        "top": (top, (*COUNTS, *KV, *RATES, *NOW)),
        "console": (console, (*COUNTS, *KV, *RATES, *TIMES, *NOW)),
        "status rows": (
            status_rows,
            ("running", "waiting", "kv_blocks", "kv_free", "kv_cached", "in_flight", "rate of output_tokens"),
        ),
        "console rows": (
            console_rows,
            ("running", "waiting", *KV, "in_flight", "rate of output_tokens", "sandboxes_ready", "restarts"),
        ),
        "metrics": (
            OverTime(scrape, FLOWS),
            (*COUNTS, *KV, *RATES, "running", "waiting", "sandboxes_ready", "restarts"),
        ),
        "traces": (
            OverTime(listed, FLOWS[:2]),
            ("requests", "ok", "refused", "invalid", "cancelled", "failed", *RATES[:2], *TIMES),
        ),
    }


def near(one: float, other: float, tolerance: float) -> bool:
    """Whether two values are the same, but for this share."""
    return abs(one - other) <= max(tolerance, ROUNDING) * max(abs(one), abs(other))


def disagreeing(
    stage: Stage,
    asked: Mapping[str, tuple[Callable[[Stage], Numbers], tuple[str, ...]]],
    tolerance: float = TOLERANCE,
    patience_s: float = PATIENCE_S,
) -> dict[str, str]:
    """Which numbers of which surfaces never agreed with the status until the deadline, with what was seen last."""
    wanted = {surface: set(names) for surface, (_, names) in asked.items()}
    last: dict[str, str] = {}
    deadline = time.monotonic() + patience_s
    while any(wanted.values()) and time.monotonic() < deadline:
        for surface, (ask, _) in asked.items():
            before, found, after = status(stage), ask(stage), status(stage)
            for name in tuple(wanted[surface]):
                apart = 0.0 if name in WHOLE else tolerance
                if name not in found or name not in before or not near(before[name], after[name], apart):
                    continue
                last[f"{surface}: {name}"] = f"{found[name]:g}, status {before[name]:g} to {after[name]:g}"
                if near(found[name], before[name], apart) or near(found[name], after[name], apart):
                    wanted[surface].discard(name)
    return {
        f"{surface}: {name}": last.get(f"{surface}: {name}", "never comparable")
        for surface, names in wanted.items()
        for name in names
    }


@pytest.mark.full
@pytest.mark.parametrize(
    "ahead_s",
    [
        pytest.param(0, id="as it is"),
        pytest.param(3 * DAY_S, id="3 days ahead"),
        pytest.param(-3 * DAY_S, id="3 days behind"),
    ],
)
def test_surfaces_agree_under_load(stage: Stage, ahead_s: int) -> None:
    """Counts, rates, requests, KV, sandboxes and percentiles of five surfaces agree, and the history goes on across a
    clock that is set in the middle of it."""
    before = stage.get("/console/look").json()
    stage.clock.write_text(str(ahead_s))
    began = time.monotonic()
    found = disagreeing(stage, surfaces())
    assert found == {}
    after = stage.get("/console/look").json()
    spent = time.monotonic() - began
    assert abs(after["now"] - time.time() - ahead_s) < 5, "the gateway's clock is set"
    assert spent - 2 < after["load"]["up_s"] - before["load"]["up_s"] < spent + 2
    # The first look has no phase of its own, so the second may follow it at once.
    apart = [later - earlier for earlier, later in pairwise(point["at"] for point in after["points"])]
    assert len(apart) > 2
    assert min(apart) > 0
    assert max(apart) < 10
    assert {alert["key"] for alert in after["alerts"]} <= {"strangers"}
    assert len({name for _, names in surfaces().values() for name in names}) >= 17


def test_counts_are_equal_when_the_load_has_ended(stage: Stage) -> None:
    """Where no time passes nothing may differ, by however little. Control: a console with other definitions of three
    numbers disagrees in them alone."""
    wait(lambda: min(status(stage)[name] for name in SEEN) > 0, "requests of every kind")
    stage.load.pause()
    try:
        wait(lambda: status(stage)["in_flight"] == 0, "the last request to end")
        asked = {
            surface: (ask, tuple(name for name in names if name not in RATES and name != "up_s"))
            for surface, (ask, names) in surfaces().items()
        }
        asked["traces"] = (listed, (*COUNTS, *TIMES))
        assert disagreeing(stage, asked, tolerance=ROUNDING, patience_s=10) == {}
        found = status(stage)
        assert min(found[name] for name in ("ok", "refused", "invalid", *COUNTS[6:])) > 0, "nothing was compared"
        assert found["kv_cached"] > 0 and found["kv_free"] == found["kv_blocks"] > 0
        wrong = {"console": (lambda stage: otherwise(console(stage), RESTING), (*COUNTS, *KV))}
        assert set(disagreeing(stage, wrong, ROUNDING, patience_s=1)) == {f"console: {name}" for name in RESTING}
    finally:
        stage.load.run.set()


SEEN = ("ok", "refused", "invalid", *COUNTS[6:])
"""Counts of which the load has some before they are compared at rest."""

OTHERS: dict[str, Callable[[Numbers], float]] = {
    "rate of output_tokens": lambda found: found["rate of output_tokens"] + found["rate of input_tokens"],
    "rate of refused": lambda found: (
        found["rate of refused"] * (found["refused"] + found["invalid"]) / found["refused"]
    ),
    "kv_free": lambda found: found["kv_free"] - found["kv_cached"],
    "input_tokens": lambda found: found["input_tokens"] - found["cached_tokens"],
    "refused": lambda found: found["refused"] + found["invalid"],
}
"""Definitions that surfaces had once, or might have: input counted with output, cached blocks as not free, and the
like."""

RESTING = ("kv_free", "input_tokens", "refused")
"""Those of them that are no rate."""


def otherwise(found: Numbers, names: Iterable[str]) -> Numbers:
    """A surface's numbers with the other definitions of these."""
    return found | {name: OTHERS[name](found) for name in names}


@pytest.mark.full
def test_another_definition_would_be_seen(stage: Stage) -> None:
    """Control: a console that defines numbers otherwise disagrees in each of them, and in no other."""
    wait(lambda: status(stage)["rate of refused"] > 0, "the load to go on")
    names = (*COUNTS, *KV, *RATES)
    found = disagreeing(stage, {"console": (lambda stage: otherwise(console(stage), OTHERS), names)}, patience_s=8)
    assert set(found) == {f"console: {name}" for name in OTHERS}
