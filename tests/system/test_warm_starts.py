"""The whole appliance with checkpoints: made in the background and used at the next start."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

import httpx
import pytest

from isolation.gvisor.checkpoint import ACCOUNT
from tests.system.conftest import PLAIN, Appliance, checkpoints
from tests.system.test_deaths import host_pid, wait_answer

pytestmark = pytest.mark.runsc

WAIT_S = 60.0

PET: dict[str, Any] = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}},
    "required": ["kind"],
    "additionalProperties": False,
}


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


def structured(appliance: Appliance) -> str:
    """A greedy answer that a grammar of the text sandbox leads."""
    made = appliance.openai().chat.completions.create(
        model="athanor-mini",
        messages=[{"role": "user", "content": "Which animal?"}],
        temperature=0,
        max_tokens=40,
        response_format={"type": "json_schema", "json_schema": {"name": "pet", "schema": PET, "strict": True}},
    )
    return str(made.choices[0].message.content)


@pytest.mark.full
def test_restored_sandboxes_answer_as_before(battered: Appliance) -> None:
    """With checkpoints a killed engine and a killed text sandbox come back as copies, which the metrics show, and give
    the same tokens: of plain text, and of an answer by a JSON schema."""
    # Sandboxes that earlier tests have killed within a minute boot cold, for the checkpoint may be why they die; a
    # supervisor that begins anew counts anew.
    os.kill(host_pid(battered, "supervisor"), signal.SIGKILL)
    wait_answer(battered)
    before = answer(battered), structured(battered)
    assert json.loads(before[1])["kind"] in PET["properties"]["kind"]["enum"]
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
    assert (answer(battered), structured(battered)) == before
