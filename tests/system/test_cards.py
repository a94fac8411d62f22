"""A card falls off under a whole appliance: what its callers and its operator are told, and who answers then."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from appliance.common.catalog import embedded_model
from tests.appliance.supervisor.cards.conftest import LOST, build_library, make_machine
from tests.system.conftest import PLAIN, Appliance, running
from tests.system.test_probes import athanor, series

pytestmark = [pytest.mark.full, pytest.mark.timeout(180)]

MODEL = "athanor-mini"
WAIT_S = 60.0
"""Within which an engine boots on a busy machine."""


def until(holds: Callable[[], bool], appliance: Appliance) -> None:
    """Wait for something."""
    end = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end, (appliance.status(), appliance.tail())
        time.sleep(0.1)


def ask(appliance: Appliance, **keys: Any) -> Any:
    """A request to the model."""
    return appliance.openai("alpha").completions.create(model=MODEL, prompt="hello", temperature=0, **keys)


def answers(appliance: Appliance) -> bool:
    """Whether the model answers."""
    try:
        ask(appliance, max_tokens=1)
    except openai.APIStatusError:
        return False
    return True


def cards(appliance: Appliance) -> dict[int, tuple[str, list[str]]]:
    """State of each card that is watched, and the models whose engines have it."""
    return {one["index"]: (one["state"], one["engines"]) for one in appliance.status()["cards"]}


def test_the_other_card_answers_and_then_none(tmp_path: Path) -> None:
    """A stream on the card that falls off ends with ``gpu_lost`` and its number, and the model answers from the other
    one; doctor, status, metrics and audit log name both. When that falls off as well, requests are told to come again,
    and the alert has the reason of each card."""
    (tmp_path / "nvml").mkdir()
    machine = make_machine(tmp_path / "machine", build_library(tmp_path / "nvml"))
    for index in (0, 1):
        machine.card(index, used=0)
    (tmp_path / "kernels/sm_90-triton").mkdir(parents=True)
    env = {
        "ATHANOR_MODELS": json.dumps([{"name": MODEL, "path": str(embedded_model()), "gpu": "auto"}]),
        "ATHANOR_SANDBOX__GPU_KERNELS": str(tmp_path / "kernels"),
    }
    command = (sys.executable, str(Path(__file__).with_name("carded.py")), str(tmp_path / "machine"))
    with running(tmp_path / "state", "--unsafe-no-sandbox", env=env, command=command) as appliance:
        admin = appliance.ready["admin"]
        until(lambda: cards(appliance) == {0: ("ok", [MODEL])}, appliance)
        stream = iter(ask(appliance, max_tokens=4_000, stream=True, extra_body={"ignore_eos": True}))
        next(stream)
        machine.card(0, state=LOST)
        with pytest.raises(openai.APIError, match="card 0, is lost"):
            for _ in stream:
                pass
        until(lambda: answers(appliance), appliance)
        until(lambda: cards(appliance) == {0: ("lost", []), 1: ("ok", [MODEL])}, appliance)
        until(lambda: series(appliance, "athanor_gpu_moves_total") != {}, appliance)
        assert list(series(appliance, "athanor_gpu_moves_total").values()) == [1]
        status = athanor("status", "--admin", admin)
        doctor = athanor("doctor", "--json", "--config", str(appliance.state / "athanor.yaml"))
        assert "GPU 0 is lost: it has fallen off the bus" in status.stdout, status.stdout
        assert "GPU 0 is lost: it has fallen off the bus" in doctor.stdout, doctor.stdout + doctor.stderr
        shown = athanor("audit", "show", "--kind", "card", "-o", "json", "--from", str(appliance.state / "audit"))
        assert all(word in shown.stdout for word in ('"lost"', '"moved"')), shown.stdout + shown.stderr
        machine.card(1, state=LOST)
        until(lambda: not answers(appliance), appliance)
        until(lambda: list(series(appliance, "athanor_gpu_unplaced").values()) == [1], appliance)
        alerts = [one["what"] for one in appliance.status()["alerts"]]
        assert any("is down: no GPU can be given to an engine of athanor-mini: card 0 is lost" in one for one in alerts)
        assert not httpx.get(admin + "/health/ready", timeout=10, verify=PLAIN).json()["ready"]
