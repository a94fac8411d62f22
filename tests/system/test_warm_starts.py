"""The whole appliance with checkpoints: made in the background and used at the next start."""

from __future__ import annotations

import os
import signal
import time

import httpx
import pytest

from isolation.gvisor.checkpoint import ACCOUNT
from tests.system.conftest import PLAIN, Appliance, checkpoints

pytestmark = pytest.mark.runsc

WAIT_S = 60.0


def counted(appliance: Appliance, role: str, outcome: str) -> float:
    """How many such starts the appliance has counted."""
    text = httpx.get(appliance.ready["admin"] + "/metrics", timeout=10, verify=PLAIN).text
    lines = [line for line in text.splitlines() if line.startswith("athanor_sandbox_starts_total")]
    found = [line for line in lines if f'athanor_role="{role}"' in line and f'athanor_outcome="{outcome}"' in line]
    return sum(float(line.rpartition(" ")[2]) for line in found)


def until(what: str, condition: object, appliance: Appliance) -> None:
    """Wait for it."""
    deadline = time.monotonic() + WAIT_S
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, f"{what}\n{appliance.tail()}"
        time.sleep(0.1)


def answer(appliance: Appliance) -> str:
    """A greedy completion."""
    made = appliance.openai().completions.create(
        model="athanor-mini", prompt="The furnace", max_tokens=24, temperature=0, extra_body={"ignore_eos": True}
    )
    return str(made.choices[0].text)


def test_a_restored_engine_gives_the_same_tokens(battered: Appliance) -> None:
    """With a checkpoint a killed engine comes back as a copy, which the metrics show, and goes on as before."""
    before = answer(battered)
    # Two: the engine's and the text worker's, made here or by an earlier demo of this run.
    until("no checkpoints", lambda: len(list(checkpoints().glob(f"[0-9a-f]*/{ACCOUNT}"))) >= 2, battered)
    for role in ("engine", "text"):
        earlier, generation = counted(battered, role, "restored"), battered.status()["models"][0][role]["generation"]
        os.kill(battered.sandbox_pid(role), signal.SIGKILL)
        battered.wait_generation(role, generation)
        until(
            f"no restored {role}",
            lambda role=role, earlier=earlier: counted(battered, role, "restored") > earlier,
            battered,
        )
    assert answer(battered) == before
