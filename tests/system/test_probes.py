"""Idle sandboxes are probed: one that hangs makes the appliance unready before a tenant meets it, and is replaced."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from appliance.gateway.sandboxes.probe import LATE_S, PERIOD_S
from appliance.gateway.watch.state import PERIOD_S as WATCH_S
from tests.system.conftest import PLAIN, Appliance, running

pytestmark = [pytest.mark.runsc, pytest.mark.timeout(240)]

ATHANOR = str(Path(sys.executable).parent / "athanor")

NOTICED_S = PERIOD_S + WATCH_S + LATE_S
"""Seconds within which docs/operate.md says that readiness changes: 12."""

HURRIED_PERIOD_S, HURRIED_LATE_S = 1.0, 3.0
"""Intervals of the demo that is not asked to keep the documented ones (``tests/system/hurried.py``): three seconds
without an answer are still more than a busy machine takes."""

STEP_TIMEOUT_S = 20
"""``sandbox: step_timeout_s`` of the demo: long enough for a look at a sandbox that hangs."""

FREEZE_AFTER_S = 5
"""The least that can be configured; nothing is frozen before the policy allows it."""

SLACK_S = 2.0
"""Seconds for a busy machine, and between two looks of the test."""


ENVIRONMENT = {
    "ATHANOR_SANDBOX__STEP_TIMEOUT_S": str(STEP_TIMEOUT_S),
    "ATHANOR_SANDBOX__FREEZE_AFTER_S": str(FREEZE_AFTER_S),
}


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory, runsc_path: Path) -> Iterator[Appliance]:
    """A demo that ends what hangs soon, and that nobody but these tests uses."""
    with running(tmp_path_factory.mktemp("probes") / "state", env=ENVIRONMENT) as appliance:
        yield appliance


@pytest.fixture(scope="module")
def hurried(tmp_path_factory: pytest.TempPathFactory, runsc_path: Path) -> Iterator[Appliance]:
    """A demo whose idle sandboxes are probed more often, and are late sooner."""
    script = str(Path(__file__).with_name("hurried.py"))
    command = (sys.executable, script, str(HURRIED_PERIOD_S), str(HURRIED_LATE_S))
    with running(tmp_path_factory.mktemp("hurried") / "state", env=ENVIRONMENT, command=command) as appliance:
        yield appliance


def readiness(appliance: Appliance) -> tuple[int, int, str]:
    """Status codes of the tenants' port and of the admin listener, and the reason."""
    tenants = httpx.get(appliance.ready["http"] + "/health", timeout=10, verify=PLAIN)
    operator = httpx.get(appliance.ready["admin"] + "/health/ready", timeout=10, verify=PLAIN)
    return tenants.status_code, operator.status_code, operator.json()["reason"]


def wait_for(appliance: Appliance, code: int, limit_s: float) -> float:
    """Wait until both say this; gives the seconds that it took."""
    began = time.monotonic()
    while readiness(appliance)[:2] != (code, code):
        assert time.monotonic() - began < limit_s, (readiness(appliance), appliance.tail())
        time.sleep(0.1)
    return time.monotonic() - began


def series(appliance: Appliance, beginning: str) -> dict[str, float]:
    """Values of the metrics whose line begins so."""
    lines = httpx.get(appliance.ready["admin"] + "/metrics", timeout=10, verify=PLAIN).text.splitlines()
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(beginning)}


def sandbox(appliance: Appliance, role: str) -> dict[str, Any]:
    """Its state."""
    return dict(appliance.status()["models"][0][role])


def athanor(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command."""
    return subprocess.run([ATHANOR, *arguments], capture_output=True, text=True, check=False, timeout=60)


def ask(appliance: Appliance) -> None:
    """A small request, which must be answered."""
    appliance.openai("alpha").completions.create(model="athanor-mini", prompt="hello", max_tokens=1, temperature=0)


@pytest.mark.full
def test_an_idle_sandbox_that_hangs_is_told_before_a_tenant_meets_it(hurried: Appliance) -> None:
    """The control first: over several intervals an idle appliance stays ready, and probes are in no count of requests
    and take no KV. Then its sandbox is stopped: readiness turns within an interval, a look of the gateway and the time
    for an answer, with the reason; status, its alert and the metrics say it. Continued, it is ready again: the same
    sandbox, and it answers."""
    check_hang(hurried, "engine", HURRIED_PERIOD_S, HURRIED_LATE_S)


def test_the_documented_time_is_that_of_the_intervals(root: Path) -> None:
    """docs/operate.md promises what the intervals of the product add up to."""
    row = next(line for line in (root / "docs/operate.md").read_text().splitlines() if "answers no probe for" in line)
    assert f"answers no probe for {LATE_S:g} s" in row
    assert f"within {NOTICED_S:g} s of the hang" in row


@pytest.mark.full
@pytest.mark.parametrize("role", ["engine", "text"])
def test_it_is_told_within_the_documented_time(idle: Appliance, role: str) -> None:
    """With the intervals of the product, for both sandboxes."""
    check_hang(idle, role, PERIOD_S, LATE_S)


def check_hang(appliance: Appliance, role: str, period_s: float, late_s: float) -> None:
    """Watch an idle demo for several intervals, stop one of its sandboxes, and let it go on."""
    ask(appliance)
    before = sandbox(appliance, role)
    counted = series(appliance, "athanor_requests_total"), series(appliance, "athanor_tokens_total")
    free = appliance.status()["load"]["kv_free"]
    end = time.monotonic() + 3 * (period_s + WATCH_S)
    while time.monotonic() < end:
        assert readiness(appliance) == (200, 200, "")
        time.sleep(0.5)
    assert counted == (series(appliance, "athanor_requests_total"), series(appliance, "athanor_tokens_total"))
    assert appliance.status()["load"]["kv_free"] == free

    hangs = f'athanor_sandbox_hangs_total{{athanor_role="{role}"'
    earlier = sum(series(appliance, hangs).values())
    os.kill(before["pid"], signal.SIGSTOP)
    try:
        took_s = wait_for(appliance, 503, period_s + WATCH_S + late_s + SLACK_S)
        assert f"{role} of athanor-mini answers no probe" in readiness(appliance)[2]
        status = appliance.status()
        assert (status["models"][0]["state"], status["models"][0][role]["state"]) == ("hung", "hung")
        assert f"hung/athanor-mini//{role}" in [alert["key"] for alert in status["alerts"]]
        shown = athanor("status", "--admin", appliance.ready["admin"]).stdout
        assert "hung" in shown and "answers no probe" in shown
        levels = series(appliance, f'athanor_sandbox_ready{{athanor_role="{role}"')
        assert set(levels.values()) == {0.0}
        time.sleep(WATCH_S + 0.5)
        assert sum(series(appliance, hangs).values()) == earlier + 1
    finally:
        os.kill(before["pid"], signal.SIGCONT)
    wait_for(appliance, 200, SLACK_S)
    assert sandbox(appliance, role)["generation"] == before["generation"], took_s
    ask(appliance)


@pytest.mark.full
@pytest.mark.parametrize("role", ["engine", "text"])
def test_an_idle_sandbox_that_hangs_on_is_replaced(idle: Appliance, role: str) -> None:
    """After ``step_timeout_s`` without an answer it is ended like an engine that hangs at work, counted as a fault, and
    the next one serves. No tenant had sent anything."""
    before = sandbox(idle, role)
    requests = series(idle, "athanor_requests_total")
    os.kill(before["pid"], signal.SIGSTOP)
    idle.wait_generation(role, before["generation"], STEP_TIMEOUT_S + NOTICED_S + 20)
    assert f"answered no probe for {STEP_TIMEOUT_S} s" in idle.log.read_text(errors="replace")
    losses = series(idle, "athanor_sandbox_losses_total")
    assert any(f'"{role}"' in name and '"fault"' in name and value for name, value in losses.items()), losses
    assert series(idle, "athanor_requests_total") == requests
    assert readiness(idle) == (200, 200, "")
    ask(idle)


@pytest.mark.full
def test_a_frozen_sandbox_is_not_probed_and_counts_as_ready(idle: Appliance) -> None:
    """Frozen, both stay so and the appliance stays ready for longer than any probe may last; the first request thaws
    them, and idle without the policy's word they are probed again (control: stopped, they make it unready)."""
    policy = idle.state / "policy.yaml"
    good = policy.read_text()
    policy.write_text(good.replace("    models:", "    freeze_idle: true\n    models:"))
    try:
        assert athanor("reload", "--admin", idle.ready["admin"]).returncode == 0
        deadline = time.monotonic() + FREEZE_AFTER_S + 20
        while not all(sandbox(idle, role)["frozen"] for role in ("engine", "text")):
            assert time.monotonic() < deadline
            time.sleep(0.2)
        thaws = series(idle, "athanor_sandbox_thaws_total")
        end = time.monotonic() + NOTICED_S + WATCH_S
        while time.monotonic() < end:
            assert readiness(idle) == (200, 200, "")
            assert all(sandbox(idle, role)["frozen"] for role in ("engine", "text"))
            time.sleep(0.5)
        assert series(idle, "athanor_sandbox_thaws_total") == thaws
    finally:
        policy.write_text(good)
        assert athanor("reload", "--admin", idle.ready["admin"]).returncode == 0
    ask(idle)
    pid = sandbox(idle, "engine")["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_for(idle, 503, NOTICED_S + SLACK_S)
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_for(idle, 200, SLACK_S)
