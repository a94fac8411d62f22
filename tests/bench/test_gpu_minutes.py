"""Minutes of load on the engine program: the verdict is that of its figures, and a signal gives it at any moment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bench.gpu_minutes import LEAST_SAMPLES, Life, Minutes, growth, largest_growth


class Load:
    """What is counted of a load."""

    def __init__(self, **ended: int) -> None:
        self.ended, self.tokens, self.drained = Counter(ended), 10, False


def made(tmp_path: Path, *lives: Life) -> Minutes:
    """Minutes in which an engine has served something."""
    state = Minutes(tmp_path / "out.jsonl")
    load: Any = Load(length=3, aborted=1)
    state.serving(load)
    state.lives = list(lives)
    return state


def test_growth_is_that_of_thirds() -> None:
    """A line's growth is two thirds of its rise; a single high sample is none; few samples say nothing."""
    assert growth([float(at) for at in range(30)]) == 20.0
    assert growth([100.0] * 29 + [500.0]) == 0.0
    assert growth([1.0] * (LEAST_SAMPLES - 1)) is None
    assert largest_growth([[1.0] * 20, [float(at) for at in range(30)], []]) == 20.0


@pytest.mark.parametrize(
    ("change", "met"),
    [
        ({}, True),
        ({"deaths": 1}, False),
        ({"outside": 1}, False),
        ({"lives": [Life(host=[100.0 + at for at in range(60)])]}, False),
        ({"lives": [Life(host=[100.0] * 60, card=[float(at) for at in range(60)])], "by_process": True}, False),
        ({"lives": [Life(host=[100.0] * 60, card=[float(at) for at in range(60)])]}, True),
    ],
    ids=["good", "death", "call", "host grows", "card grows", "somebody's card memory grows"],
)
def test_the_verdict(change: dict[str, Any], met: bool, tmp_path: Path) -> None:
    """A death, a call beyond the list, and an engine's growing memory each fail it; the whole card's memory, which
    others may take, does not."""
    state = made(tmp_path, Life(host=[100.0] * 60, card=[50.0] * 60))
    for name, value in change.items():
        setattr(state, name, value)
    verdict = state.verdict(cut=True)
    assert verdict["met"] is met
    assert (verdict["requests"], verdict["ended"], verdict["cut"]) == (4, {"length": 3, "aborted": 1}, True)


def test_requests_of_engines_that_ended_stay_counted(tmp_path: Path) -> None:
    """Two engines in turn: the sum of both, and nothing twice."""
    state = made(tmp_path)
    state.ended()
    second: Any = Load(length=2)
    state.serving(second)
    assert state.figures()["requests"] == 6
    state.ended()
    state.ended()
    assert (state.figures()["requests"], state.figures()["tokens"]) == (6, 20)


@pytest.mark.full
def test_a_signal_gives_the_verdict_and_leaves_no_engine(root: Path, tmp_path: Path) -> None:
    """Rehearsed on a CPU and cut off at work: the verdict has the requests that ran, and the engine is gone."""
    out = tmp_path / "out.jsonl"
    process = subprocess.Popen(
        [sys.executable, "bench/gpu_program.py", "--rehearse", "--minutes", "5", "--every", "1", "--out", str(out)],
        cwd=root,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for text in process.stdout:
        line = json.loads(text) if text.startswith("{") else {}
        if line.get("requests"):
            break
    process.send_signal(signal.SIGTERM)
    rest = process.stdout.read()
    assert process.wait(60) == 0, rest
    verdict = json.loads(out.read_text().splitlines()[-1])
    assert verdict["kind"] == "verdict" and verdict["cut"] and verdict["met"] and verdict["requests"] > 0
    assert verdict["deaths"] == verdict["outside"] == 0
