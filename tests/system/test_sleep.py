"""A model of a whole appliance sleeps and wakes: nothing of it is left, one wake serves all, answers are the same."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from bench.process_times import held_kib, label, tree
from tests.system.audit_files import written
from tests.system.conftest import PLAIN, Appliance

pytestmark = [pytest.mark.runsc, pytest.mark.timeout(180)]

MODEL = "athanor-mini"

WAIT_S = 60.0
"""Within which a model wakes on a busy machine."""

AT_ONCE_S = 0.05
"""Bound of a refusal; the fastest of several, since this process and the appliance share busy cores."""


def order(appliance: Appliance, what: str, model: str = MODEL) -> dict[str, Any]:
    """Give an order about the model."""
    url = f"{appliance.ready['admin']}/models/{model}/{what}"
    return dict(httpx.post(url, timeout=WAIT_S, verify=PLAIN).json())


def state(appliance: Appliance) -> str:
    """State of the model."""
    return next(str(one["state"]) for one in appliance.status()["models"] if one["name"] == MODEL)


def until(happens: Callable[[], bool]) -> None:
    """Wait for it."""
    deadline = time.monotonic() + WAIT_S
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def answer(appliance: Appliance, tenant: str = "alpha", **options: Any) -> str:
    """The greedy answer to a small prompt."""
    client = appliance.openai(tenant)
    found = client.completions.create(model=MODEL, prompt="Count:", max_tokens=12, temperature=0, **options)
    return found.choices[0].text


def processes(appliance: Appliance, *roles: str) -> list[int]:
    """Processes of the model's sandboxes of this appliance, in these roles or in both."""
    run_dir = json.loads((appliance.state / "athanor.yaml").read_text().partition("\n")[2])["run_dir"]
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(run_dir) in line and any(f"{role}-{MODEL}" in line for role in roles or ("engine", "text")):
            found.append(int(path.parent.name))
    return found


def wakes(appliance: Appliance) -> int:
    """Wakes for requests, as the metric counts them."""
    metrics = httpx.get(appliance.ready["admin"] + "/metrics", verify=PLAIN).text
    lines = [line for line in metrics.splitlines() if line.startswith("athanor_model_wakes_total{")]
    return sum(int(float(line.split()[-1])) for line in lines if MODEL in line and '"request"' in line)


def entries(appliance: Appliance) -> list[dict[str, Any]]:
    """Entries of the audit log about sleep and wake."""
    found = written(appliance.state / "audit")
    return [one for one in found if one["kind"] == "model" and one["what"] in ("sleep", "wake")]


@pytest.fixture
def sleeper(appliance: Appliance) -> Iterator[Appliance]:
    """The shared demo, whose model is awake again afterwards."""
    assert state(appliance) == "ready"
    yield appliance
    until(lambda: order(appliance, "wake")["ok"])


def fall_asleep(appliance: Appliance) -> None:
    """Put the model to sleep, and wait until nothing of it is left."""
    until(lambda: bool(order(appliance, "sleep")["ok"]))
    until(lambda: not processes(appliance))


def test_a_model_sleeps_without_a_process_and_one_wake_serves_all(sleeper: Appliance) -> None:
    """Asleep it has no process, is listed, is ready and is no alert. A request whose deadline is too short is refused
    at once, with the time after which it may come again; two tenants that ask then wait for one wake and get the answer
    that there was before. Metric, trace and audit log tell of it."""
    before, earlier = answer(sleeper), wakes(sleeper)
    assert processes(sleeper), "the control: they are seen while they are there"
    fall_asleep(sleeper)
    assert state(sleeper) == "asleep"
    assert MODEL in [one.id for one in sleeper.openai().models.list()]
    assert httpx.get(sleeper.ready["http"] + "/health/ready", verify=PLAIN).status_code == 200
    assert not [one for one in sleeper.status()["alerts"] if MODEL in one["key"]]

    took = []
    for _ in range(3):
        began = time.perf_counter()
        with pytest.raises(openai.InternalServerError) as refused:
            answer(sleeper, extra_headers={"x-request-timeout-ms": "50"})
        took.append(time.perf_counter() - began)
        assert refused.value.status_code == 503
        assert refused.value.code == "model_asleep"
        assert int(refused.value.response.headers["retry-after"]) >= 1
    assert min(took) < AT_ONCE_S, took

    answers: list[str] = []
    threads = [
        threading.Thread(target=lambda name=name: answers.append(answer(sleeper, name))) for name in ("alpha", "beta")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert answers == [before, before]
    assert wakes(sleeper) == earlier + 1
    url = sleeper.ready["admin"] + "/traces?limit=2"
    ids = [one["trace_id"] for one in httpx.get(url, verify=PLAIN).json()["traces"]]
    traces = [httpx.get(f"{sleeper.ready['admin']}/traces/{one}", verify=PLAIN).text for one in ids]
    assert all("athanor.model.waited_for_wake_ms" in one for one in traces), traces
    until(
        lambda: (
            [(one["what"], one["reason"]) for one in entries(sleeper)][-2:]
            == [("sleep", "operator"), ("wake", "request")]
        )
    )
    assert entries(sleeper)[-1]["tenant"] == "alpha"


@pytest.mark.full  # The demos of a run lose a checkpoint by it.
def test_a_wake_that_is_killed_is_told_and_the_next_one_works(sleeper: Appliance) -> None:
    """The engine's sandbox is killed with SIGKILL whenever it boots, restored or not: the request gets a typed error,
    the model sleeps again with nothing left, and the next request wakes it."""
    before = answer(sleeper)
    fall_asleep(sleeper)
    problems: list[openai.APIStatusError] = []

    def ask() -> None:
        try:
            answer(sleeper)
        except openai.APIStatusError as error:
            problems.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    until(lambda: kill(processes(sleeper, "engine")) or not thread.is_alive())
    thread.join(WAIT_S)
    assert [(one.status_code, one.code) for one in problems] == [(503, "model_wake_failed")]
    until(lambda: state(sleeper) == "asleep" and not processes(sleeper))
    assert answer(sleeper) == before


def kill(pids: list[int]) -> bool:
    """Kill processes that may have ended meanwhile."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return False


GROWTH_KIB = 3 << 10
"""Most memory by which a supervisor may grow in ``ROUNDS`` wakes: what its allocator keeps in pieces. What it held of
each checkpoint, or of each sandbox, would be more."""

ROUNDS = 6


@pytest.mark.full  # Wakes take seconds.
def test_a_supervisor_does_not_grow_with_wakes(sleeper: Appliance) -> None:
    """After two wakes, in which what it needs is imported, six more leave the supervisor's own memory and its open
    files as they were. Control: the measure sees a few MiB that this process holds."""
    pid = next(one for one in tree([sleeper.process.pid]) if label(one) == "supervisor")

    def wake(times: int) -> tuple[int, int]:
        for _ in range(times):
            fall_asleep(sleeper)
            until(lambda: bool(order(sleeper, "wake")["ok"]))
        return held_kib(pid)["anonymous"], len(os.listdir(f"/proc/{pid}/fd"))

    before, files = wake(2)
    after, files_after = wake(ROUNDS)
    assert after - before < GROWTH_KIB
    assert files_after <= files + 1  # One more where a look at its folders is under way.

    own = held_kib(os.getpid())["anonymous"]
    taken = bytearray(os.urandom(2 * GROWTH_KIB << 10))
    assert held_kib(os.getpid())["anonymous"] - own > GROWTH_KIB
    del taken
