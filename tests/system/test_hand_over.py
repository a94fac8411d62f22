"""A gateway without a free descriptor gets its next engine once it has some: the same supervisor, the same sandbox."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.system.conftest import PLAIN, Appliance
from tests.system.test_deaths import host_pid

pytestmark = [pytest.mark.runsc, pytest.mark.timeout(180)]

CUTS = 3
"""Hand-overs that have to fail before descriptors are given back."""


@contextmanager
def no_descriptor_left(pid: int) -> Iterator[None]:
    """A living process may open none more, not even in place of those that it closes (getrlimit(2))."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("role", ["engine", pytest.param("text", marks=pytest.mark.full)])
def test_a_hand_over_survives_a_gateway_without_descriptors(battered: Appliance, role: str) -> None:
    """A sandbox dies while its gateway may open nothing: the next one's descriptors are lost on their way, several
    times. Readiness and status name the reason; the supervisor stays attached, and no sandbox is ended. With
    descriptors again everything serves within seconds: one restart, the sandbox that was waiting. Connections that were
    open go on all the time (control: a new one is not taken meanwhile)."""
    appliance = battered
    other = {"engine": "text", "text": "engine"}[role]
    gateway, supervisor = host_pid(appliance, "gateway"), host_pid(appliance, "supervisor")
    pid, earlier = appliance.sandbox_pid(role), appliance.log.stat().st_size
    with httpx.Client(base_url=appliance.ready["admin"], verify=PLAIN, timeout=10) as operator:

        def state() -> dict[str, Any]:
            return dict(operator.get("/status").json())

        def told() -> float:
            lines = [line for line in operator.get("/metrics").text.splitlines() if "hand_over_cuts_total{" in line]
            return sum(float(line.rsplit(" ", 1)[1]) for line in lines if f'athanor_role="{role}"' in line)

        assert operator.get("/health/ready").status_code == 200
        before, told_before = state()["models"][0], told()
        with no_descriptor_left(gateway):
            os.kill(pid, signal.SIGKILL)
            deadline = time.monotonic() + 60
            while cuts(appliance, earlier) < CUTS:
                assert time.monotonic() < deadline, appliance.tail()
                assert operator.get("/health/live").status_code == 200
                time.sleep(0.1)
            answer = operator.get("/health/ready")
            assert (answer.status_code, "athanor-mini are not up" in answer.text) == (503, True)
            shown = state()["models"][0]
            assert (shown[role]["state"], shown[other]["state"]) == ("failed", "ready")
            assert "all 0 descriptors that it may open are in use" in shown[role]["cause"]
            assert "supervisor" not in [alert["key"] for alert in state()["alerts"]]
            with pytest.raises(httpx.HTTPError):
                httpx.get(appliance.ready["admin"] + "/health/live", verify=PLAIN, timeout=2)
        appliance.wait_generation(role, before[role]["generation"], 30)
        found = state()["models"][0]
        assert told() - told_before == cuts(appliance, earlier) >= CUTS
    for room, more in ((role, 1), (other, 0)):
        grown = [found[room][name] - before[room][name] for name in ("generation", "restarts")]
        assert grown == [more, more], room
    assert (host_pid(appliance, "gateway"), host_pid(appliance, "supervisor")) == (gateway, supervisor)
    log = told_since(appliance, earlier)
    assert "supervisor is gone" not in log and "gateway detached" not in log
    assert log.count("sandbox is ready") == 1
    answer = appliance.openai().completions.create(model="athanor-mini", prompt="hello", max_tokens=4)
    assert answer.usage is not None and answer.usage.completion_tokens > 0


def told_since(appliance: Appliance, earlier: int) -> str:
    """The log behind so many bytes."""
    return appliance.log.read_bytes()[earlier:].decode(errors="replace")


def cuts(appliance: Appliance, earlier: int) -> int:
    """Hand-overs that the supervisor has learned to be cut off, in the log behind so many bytes."""
    lines = told_since(appliance, earlier).splitlines()
    return sum("a hand-over was cut off" in line and "again_in_s" in line for line in lines)
