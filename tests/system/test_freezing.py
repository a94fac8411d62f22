"""Idle sandboxes are frozen where the policy lets them be, count as ready, and answer at once."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.system.conftest import PLAIN, Appliance

pytestmark = [pytest.mark.runsc, pytest.mark.timeout(180)]

ATHANOR = str(Path(sys.executable).parent / "athanor")

MODEL = 'gen_ai_request_model="athanor-mini"'
"""The label."""

AFTER_S = 5
"""The least that can be configured."""

WINDOW_S = 2.0

MOST_WAKES = 8.0
"""Of gateway and supervisor together, in a second: five are to be expected, and there were some 29 when each loop slept
for its own period."""

THAW_MS = 500
"""Bound for a busy machine; a thaw takes 1 to 5 (``bench/sandbox.py idle``), a start thousands."""


@pytest.fixture
def idle(battered: Appliance) -> Iterator[Appliance]:
    """The battered demo, whose sandboxes are frozen soon, once the policy allows it; afterwards both are as before."""
    files = [battered.state / name for name in ("athanor.yaml", "policy.yaml")]
    before = [file.read_text() for file in files]
    values = json.loads(before[0].partition("\n")[2])
    values["sandbox"]["freeze_after_s"] = AFTER_S
    files[0].write_text(json.dumps(values))
    reload(battered)
    yield battered
    for file, text in zip(files, before, strict=True):
        file.write_text(text)
    reload(battered)


def reload(appliance: Appliance) -> None:
    """Put the files in force."""
    httpx.post(appliance.ready["admin"] + "/reload", timeout=60, verify=PLAIN).raise_for_status()


def athanor(*arguments: str) -> str:
    """Run the command; gives what it prints."""
    done = subprocess.run([ATHANOR, *arguments], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def allow(appliance: Appliance, *, freeze: bool) -> None:
    """Say in the policy whether idle sandboxes may be frozen, for every tenant."""
    policy = appliance.state / "policy.yaml"
    lines = [line for line in policy.read_text().splitlines() if "freeze_idle" not in line]
    places = [index for index, line in enumerate(lines) if line.startswith("    models:")]
    for index in reversed(places if freeze else []):
        lines.insert(index, "    freeze_idle: true")
    policy.write_text("\n".join(lines) + "\n")
    reload(appliance)


def rooms(appliance: Appliance) -> list[dict[str, Any]]:
    """Its sandboxes."""
    return [model[role] for model in appliance.status()["models"] for role in ("engine", "text")]


def family(pid: int) -> set[int]:
    """A process and its descendants."""
    below = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {pid}.union(*(family(int(one)) for one in below))


def used_s(appliance: Appliance) -> float:
    """Processor time of all sandboxes so far, in seconds."""
    total = 0
    for room in rooms(appliance):
        for pid in family(room["pid"]):
            total += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
    return total / 100


def until(happens: Callable[[], bool], limit_s: float = 20.0) -> None:
    """Wait for it."""
    deadline = time.monotonic() + limit_s
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def ask_ms(appliance: Appliance) -> float:
    """Time of a small request."""
    began = time.perf_counter()
    appliance.openai("alpha").completions.create(model="athanor-mini", prompt="hello", max_tokens=1, temperature=0)
    return 1e3 * (time.perf_counter() - began)


def levels(appliance: Appliance) -> dict[str, float]:
    """Metrics of sandboxes."""
    lines = httpx.get(appliance.ready["admin"] + "/metrics", verify=PLAIN, timeout=10).text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line.startswith("athanor_sandbox_"))
    return {name: float(value) for name, value in pairs}


def counted(appliance: Appliance) -> float:
    """Thaws so far."""
    return levels(appliance).get(f"athanor_sandbox_thaws_total{{{MODEL}}}", 0)


def all_frozen(appliance: Appliance) -> bool:
    """Whether all are."""
    return all(room["frozen"] for room in rooms(appliance))


@pytest.mark.full
def test_idle_sandboxes_rest_and_answer_at_once(idle: Appliance) -> None:
    """Without a word in the policy they never rest, which is the control; with it they take no processor time after
    the configured time, are ready, and the first request thaws them in a fraction of what a start takes. Status,
    metrics, the request's trace and the audit log tell of it."""
    ask_ms(idle)
    generations, thaws = [room["generation"] for room in rooms(idle)], counted(idle)
    time.sleep(AFTER_S + 2)
    before = used_s(idle)
    time.sleep(2)
    assert used_s(idle) > before, "the control: gVisor's own timers are seen"
    assert not any(room["frozen"] for room in rooms(idle))

    allow(idle, freeze=True)
    warm = sorted(ask_ms(idle) for _ in range(9))[4]
    until(lambda: all_frozen(idle))
    before = used_s(idle)
    time.sleep(1)
    assert used_s(idle) == before
    assert all(room["state"] == "ready" for room in rooms(idle))
    assert httpx.get(idle.ready["http"] + "/health/ready").status_code == 200
    assert athanor("status", "--admin", idle.ready["admin"]).count("frozen") == 2
    first = ask_ms(idle)
    assert first < warm + THAW_MS, (first, warm)
    assert not any(room["frozen"] for room in rooms(idle))
    assert [room["generation"] for room in rooms(idle)] == generations
    assert counted(idle) == thaws + 1
    assert f'athanor_sandbox_frozen{{athanor_role="engine",{MODEL}}}' in levels(idle)
    (newest,) = json.loads(athanor("traces", "-n", "1", "-o", "json", "--admin", idle.ready["admin"]))["traces"]
    spans = athanor("traces", newest["request_id"], "-o", "json", "--admin", idle.ready["admin"])
    assert '"athanor.sandbox.thawed": true' in spans
    time.sleep(2)  # The log is written once a second.
    shown = athanor("audit", "show", "--from", str(idle.state / "audit"), "--kind", "sandbox", "-o", "json")
    assert {(one["state"], one["role"]) for one in json.loads(shown)} >= {("frozen", "engine"), ("thawed", "engine")}


def switches(pid: int) -> int:
    """How often the threads of a process have gone to sleep so far."""
    found = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            found += int((task / "status").read_text().partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    return found


def child(appliance: Appliance, role: str) -> int:
    """The gateway's or the supervisor's process."""
    for pid in family(appliance.process.pid):
        if f"appliance.operator.child\0{role}\0" in Path(f"/proc/{pid}/cmdline").read_text():
            return pid
    raise LookupError(role)


@pytest.mark.full
def test_an_idle_appliance_seldom_wakes_up(idle: Appliance) -> None:
    """The host processes of a frozen appliance go to sleep a few times a second, in the quietest of some windows: what
    looks now and then does so together. Somebody who asks for the state ten times a second is seen (control)."""
    pids = child(idle, "gateway"), child(idle, "supervisor")
    allow(idle, freeze=True)
    until(lambda: all_frozen(idle))

    def woken(each: Callable[[], object] = lambda: None) -> float:
        began, before = time.monotonic(), sum(map(switches, pids))
        while time.monotonic() < began + WINDOW_S:
            time.sleep(0.1)
            each()
        return (sum(map(switches, pids)) - before) / (time.monotonic() - began)

    seen: list[float] = []
    until(lambda: seen.append(woken()) or seen[-1] <= MOST_WAKES, 40)
    assert woken(lambda: idle.status()) > MOST_WAKES, "control"


@pytest.mark.full
def test_a_frozen_sandbox_that_dies_comes_back_and_a_policy_thaws(idle: Appliance) -> None:
    """The end of a frozen one is seen, and the next serves; a policy that forbids it thaws after a reload, and
    afterwards nothing rests any more."""
    allow(idle, freeze=True)
    until(lambda: all_frozen(idle))
    engine = rooms(idle)[0]
    subprocess.run(["kill", "-9", str(engine["pid"])], check=True)
    ask_ms(idle)
    until(lambda: rooms(idle)[0]["generation"] == engine["generation"] + 1)
    until(lambda: all_frozen(idle))
    allow(idle, freeze=False)
    until(lambda: not any(room["frozen"] for room in rooms(idle)), 5)
    before = used_s(idle)
    time.sleep(1)
    assert used_s(idle) > before
