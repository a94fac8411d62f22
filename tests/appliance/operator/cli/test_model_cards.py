"""``athanor model add`` of models with a GPU, on a machine with simulated cards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from appliance.common.model_memory import Memory
from isolation.gpu import card_memory, gpu_facts
from tests.appliance.common.cards import machine, make_8b
from tests.appliance.operator.cli.conftest import Run

FILE = """\
models: [{name: first, path: %s, gpu: auto}]
policy: policy.yaml
credentials: credentials.json
pepper: pepper
run_dir: run
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files of an 8B model, a configuration that serves it on a card, and memory enough."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "athanor.yaml").write_text(FILE % make_8b(tmp_path / "8b"))
    monkeypatch.setattr("appliance.common.model_memory.machine_memory", lambda: Memory(1 << 40, 1 << 40))
    monkeypatch.setattr(card_memory, "with_memory", lambda facts: facts)
    return tmp_path


def test_a_second_model_is_told_its_card_and_its_plan(run: Run, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The card that the first one leaves, for people and for programs; the host's memory has no KV then."""
    monkeypatch.setattr(gpu_facts, "look_at_gpus", lambda: machine(2))
    words = ("model", "add", "second", "--path", str(place / "8b"), "--set", "gpu=auto", "--dry-run")
    sandbox = ("-c", "athanor.yaml")
    told = run(*words, *sandbox, columns=400)
    assert told.exit_code == 0, told.output
    assert "GPU     card 1 (NVIDIA H100 80GB HBM3): 73,403 MiB (90 % of 81,559 MiB) = weights 15,316 +" in told.stdout
    assert "KV 0 B" in told.stdout
    found = json.loads(run(*words, *sandbox, "-o", "json").stdout)
    assert (found["card"], found["kv_bytes"]) == (1, 0) and found["card_plan"].startswith("73,403 MiB")


def test_one_too_many_is_refused_with_numbers(run: Run, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One card that the first model holds has no room; a model without a GPU is added all the same."""
    monkeypatch.setattr(gpu_facts, "look_at_gpus", lambda: machine(1))
    words = ("model", "add", "second", "--path", str(place / "8b"), "--dry-run", "-c", "athanor.yaml")
    refused = run(*words, "--set", "gpu=auto")
    assert refused.exit_code != 0
    assert "first may hold 90 %, 5 % are left and 90 % (72 GiB) are asked for" in " ".join(refused.output.split())
    assert run(*words).exit_code == 0
