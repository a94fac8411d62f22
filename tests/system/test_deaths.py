"""Things die: engines, text workers, host processes. Clients hear it in time, service returns, nothing is left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import openai
import pytest

from appliance.gateway.request.lifecycle import REPLAY_S
from tests.system.conftest import Appliance

pytestmark = [pytest.mark.runsc, pytest.mark.timeout(180)]

HEAR_WITHIN_S = 10.0

RETRIES = 4
"""Of a client that takes `Retry-After` at its word: on a busy machine a boot may take longer than a request waits."""


def leftovers(state: Path) -> list[str]:
    """Whatever still names this state directory: processes, mounts, cgroups, files of the run directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(state) in command:
            found.append(f"process {entry.name}: {command[:120]}")
    mounts = Path("/proc/self/mountinfo").read_text()
    found += [f"mount {line}" for line in mounts.splitlines() if str(state) in line]
    config = json.loads((state / "athanor.yaml").read_text().split("\n", 1)[1])
    return found + [f"file {path}" for path in [Path(config["run_dir"])] if path.exists()]


def wait_nothing_added(appliance: Appliance, before: list[str]) -> None:
    """Until as many processes, mounts and bundles are there as before the death; what has died may take a moment."""
    bundles = len(before)
    deadline = time.monotonic() + 10
    while len(found := census(appliance)) > bundles:
        assert time.monotonic() < deadline, (before, found)
        time.sleep(0.05)


def census(appliance: Appliance) -> list[str]:
    """The processes, mounts and sandboxes of a demo that is at rest."""
    config = json.loads((appliance.state / "athanor.yaml").read_text().split("\n", 1)[1])
    places = [path for path in Path(config["run_dir"]).glob("*/*") if path.is_dir()]
    found = leftovers(appliance.state) + [f"directory {path}" for path in places]
    assert {entry.split()[0] for entry in found} >= {"process", "directory"}, found  # The control: what lives is seen.
    return found


async def stream_one(appliance: Appliance, tenant: str, started: asyncio.Event) -> str:
    """One long stream; gives ``complete`` or the name of the typed error."""
    client = appliance.async_openai(tenant)
    try:
        stream = await client.completions.create(
            model="athanor-mini",
            prompt=f"Count {tenant}:",
            max_tokens=150,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for _ in stream:
            started.set()
    except openai.APIStatusError as error:
        return f"{error.status_code}"
    except openai.APIError as error:
        return f"mid-stream {error.code}"
    return "complete"


async def streams_under_death(appliance: Appliance, role: str) -> list[str]:
    """Sixteen streams, a kill -9 of one sandbox in their middle; gives how each ended."""
    started = [asyncio.Event() for _ in range(16)]
    tasks = [
        asyncio.ensure_future(stream_one(appliance, "alpha" if index % 2 else "beta", event))
        for index, event in enumerate(started)
    ]
    await asyncio.gather(*(event.wait() for event in started))
    os.kill(appliance.sandbox_pid(role), signal.SIGKILL)
    began = time.monotonic()
    if role == "engine":
        results = await asyncio.wait_for(asyncio.gather(*tasks), HEAR_WITHIN_S)
        assert time.monotonic() - began < HEAR_WITHIN_S
        return results
    return await asyncio.gather(*tasks)


async def test_a_killed_engine_is_heard_and_replaced(battered: Appliance) -> None:
    """Every one of 16 streams ends typed or complete within ten seconds; the next request succeeds; of the dead
    sandbox nothing stays."""
    before = census(battered)
    generation = battered.status()["models"][0]["engine"]["generation"]
    results = await streams_under_death(battered, "engine")
    assert set(results) <= {"complete", "503", "mid-stream server_is_overloaded"}
    answer = battered.openai(timeout=HEAR_WITHIN_S, max_retries=RETRIES).completions.create(
        model="athanor-mini", prompt="hello", max_tokens=2, temperature=0
    )
    assert answer.usage is not None and answer.usage.completion_tokens == 2
    await asyncio.to_thread(battered.wait_generation, "engine", generation)
    wait_nothing_added(battered, before)


async def test_a_killed_text_worker_is_replaced_and_streams_go_on(battered: Appliance) -> None:
    """Streams that already have their ids do not notice; a new prompt waits for the next worker."""
    before = census(battered)
    results = await streams_under_death(battered, "text")
    assert set(results) == {"complete"}
    answer = battered.openai(timeout=HEAR_WITHIN_S, max_retries=RETRIES).completions.create(
        model="athanor-mini", prompt="hello", max_tokens=2, temperature=0
    )
    assert answer.usage is not None
    wait_nothing_added(battered, before)


def wait_answer(appliance: Appliance) -> None:
    """Ask until there is an answer again."""
    deadline = time.monotonic() + 40
    while True:
        try:
            answer = appliance.openai(timeout=5).completions.create(
                model="athanor-mini", prompt="hello", max_tokens=2, temperature=0
            )
        except openai.APIError:
            assert time.monotonic() < deadline, appliance.tail()
            time.sleep(0.2)
        else:
            assert answer.usage is not None
            return


@pytest.mark.parametrize("role", ["gateway", "supervisor"])
def test_a_killed_host_process_comes_back(battered: Appliance, role: str) -> None:
    """kill -9 of gateway or supervisor: service returns on the same addresses, nothing stays of the dead."""
    before = census(battered)
    os.kill(host_pid(battered, role), signal.SIGKILL)
    wait_answer(battered)
    wait_nothing_added(battered, before)


async def test_a_request_that_kills_twice_is_quarantined(battered: Appliance) -> None:
    """Killed while it waits for its first token, the request is replayed alone; killed again, it is refused for good,
    and others are served."""
    await asyncio.to_thread(battered.wait_checkpoints)
    for number in range(TRIES):
        outcome = await killed_twice(battered, f"poison {number}: " + "very " * 1_500)
        if outcome == "request_quarantined":
            break
        # The replay gave its first token before the second kill: then it is not replayed, and told so.
        assert outcome in ("server_is_overloaded", "complete")
    else:
        raise AssertionError("no replay was met before its first token")
    answer = await battered.async_openai("beta", timeout=HEAR_WITHIN_S, max_retries=RETRIES).completions.create(
        model="athanor-mini", prompt="hello", max_tokens=2, temperature=0
    )
    assert answer.usage is not None


TRIES = 5
"""A replay is killed while its prompt is being computed, which takes a few steps; so it may be missed."""


async def killed_twice(appliance: Appliance, prompt: str) -> str:
    """Send a request and kill the engine under it and under its replay; gives how it ended."""

    async def poison() -> str:
        client = appliance.async_openai("alpha")
        try:
            await client.completions.create(model="athanor-mini", prompt=prompt, max_tokens=4, temperature=0)
        except openai.APIStatusError as error:
            return str(error.code)
        return "complete"

    # A stopped engine takes the request in and gives nothing: it dies with the request live and without a token.
    await asyncio.to_thread(appliance.wait_generation, "engine", 0)
    first = appliance.sandbox_pid("engine")
    freeze(first)
    task = asyncio.ensure_future(poison())
    await until_in_flight(appliance)
    os.kill(first, signal.SIGKILL)
    began = time.monotonic()
    second = await next_engine(appliance, first)
    if (back_s := time.monotonic() - began) > REPLAY_S:
        task.cancel()
        pytest.skip(f"a killed engine is back after {back_s:.0f} s here; a replay waits {REPLAY_S:.0f} s for one")
    await until_running(appliance, task)
    os.kill(second, signal.SIGKILL)
    return await asyncio.wait_for(task, 20)


def freeze(pid: int) -> None:
    """Stop a sandbox's process."""
    os.kill(pid, signal.SIGSTOP)


async def until_in_flight(appliance: Appliance) -> None:
    """Until a request is in the appliance and had time to reach the ring."""
    async with asyncio.timeout(20):
        while not (await asyncio.to_thread(appliance.status))["tenants"][0]["in_flight"]:
            await asyncio.sleep(0.02)
    await asyncio.sleep(0.3)


async def until_running(appliance: Appliance, task: asyncio.Future[str]) -> None:
    """Until the engine says that it runs a request, or the task has ended."""
    async with asyncio.timeout(20):
        while not task.done() and not (await asyncio.to_thread(appliance.status))["models"][0]["engine"]["running"]:
            await asyncio.sleep(0.002)


async def next_engine(appliance: Appliance, before: int) -> int:
    """The pid of the engine after this one."""
    async with asyncio.timeout(20):
        while True:
            status = await asyncio.to_thread(appliance.status)
            pid = status["models"][0]["engine"]["pid"]
            if pid and pid != before and status["models"][0]["engine"]["state"] == "ready":
                return int(pid)
            await asyncio.sleep(0.02)  # each look makes the appliance compute its status


def host_pid(appliance: Appliance, role: str) -> int:
    """The process of one host role."""
    done = subprocess.run(
        ["pgrep", "-f", f"appliance.operator.child {role} {appliance.state}/"],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout.split()[0])
