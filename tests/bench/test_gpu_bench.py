"""The script that judges a GPU runs at toy size on a CPU; what chooses configurations chooses as it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu_prefill import compare
from bench.gpu_report import BARS, Report
from bench.gpu_tune import MARGIN, choose

SECTIONS = ("roofline", "exactness", "memory", "kernels", "cold", "closed", "peer", "trace", "isolation")


@pytest.mark.full
@pytest.mark.timeout(300)
def test_sections_run_at_toy_size(root: Path, tmp_path: Path) -> None:
    """All sections but those that need a card's counters give their figures, results are lines of JSON, and the table
    at the end has a verdict for each bar."""
    out = tmp_path / "results.jsonl"
    done = subprocess.run(
        [sys.executable, "bench/gpu.py", "--toy", "--out", str(out), "--only", *SECTIONS],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    ended = {line["name"]: line["failed"] for line in lines if line["section"] == "section"}
    assert done.returncode == 0, done.stdout[-3_000:]
    assert not any(ended.values())
    assert set(ended) == set(SECTIONS)
    for bar in BARS.values():
        assert bar.name in done.stdout
    exact = next(line for line in lines if line["section"] == "exactness")
    assert exact["decode_error"] < exact["bound"] and exact["prefill_error"] < exact["bound"]
    loops = next(line for line in lines if line["section"] == "loops")
    assert loops["equal"] == loops["schedules"] > 0


def test_without_a_gpu_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that would measure nothing ends at once with the way to run it."""
    import torch

    from bench.gpu import main

    out = tmp_path / "results.jsonl"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["bench/gpu.py", "--out", str(out)])
    with pytest.raises(SystemExit, match="torch sees no GPU; --toy runs everything"):
        main()
    assert not out.exists()


def test_a_failing_section_is_noted_and_the_next_one_runs(tmp_path: Path) -> None:
    """The table names it with its reason, and a bar without a figure is not met."""
    import torch

    from bench.gpu import _run_section

    report = Report(tmp_path / "results.jsonl", True, torch.device("cpu"))
    ran = []

    def broken() -> None:
        raise RuntimeError("no such kernel")

    _run_section(report, "kernels", broken)
    _run_section(report, "closed", lambda: ran.append(1))
    assert ran == [1]
    assert "section kernels failed: RuntimeError: no such kernel" in report.summary()
    assert report.summary().count("no figure") == len(BARS)


def test_the_choice_of_a_configuration() -> None:
    """The fastest by the geometric mean, unless it is faster by less than the margin, gives no numbers, or is none."""
    times = {"now": [1.0, 1.0], "a": [0.5, 1.0], "b": [0.7, 0.7], "c": None, "d": [0.1, 10.0]}
    assert choose("now", times, times.get)[0] == "b"
    near = {"now": [1.0], "a": [1 - MARGIN / 2]}
    assert choose("now", near, near.get) == ("now", 1.0)
    with pytest.raises(ValueError, match="cannot be used"):
        choose("c", times, times.get)


def test_a_form_that_never_ends_is_left_out() -> None:
    """Neither one that gives no answer, nor one with wrong numbers, nor one that fails is timed; the others are."""

    def says(*lines: str) -> list[str]:
        return [sys.executable, "-c", "\n".join(lines)]

    ready = "print('{\"ready\": true}', flush=True)"
    found = compare(
        {
            "right": says(ready, "input()", 'print(\'{"seconds": {"a": 1.0}}\', flush=True)'),
            "wrong": says("print('{\"ready\": false}', flush=True)", "input()"),
            "fails": says("raise SystemExit(3)"),
            "endless": says(ready, "import threading", "threading.Event().wait()"),
        },
        30.0,
        2.0,
    )
    assert found["right"] == {"ready": True, "seconds": {"a": 1.0}}
    assert found["wrong"] == {"ready": False}
    assert found["fails"] == {"failed": "no answer in time, or an error"}
    assert found["endless"] == {"ready": True, "failed": "not timed in time"}


@pytest.mark.full
@pytest.mark.timeout(300)
def test_one_pass_is_timed_beside_two_in_a_rehearsal(root: Path) -> None:
    """Every section gives its figures in tiny sizes: the same tokens, both ways for each cell, a load with each,
    and a table."""
    done = subprocess.run(
        [sys.executable, "bench/gpu_mixed.py", "--rehearse"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0 and "failed" not in done.stdout, done.stdout[-3_000:] + done.stderr[-3_000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    tokens = next(line for line in lines if line["section"] == "tokens")
    assert tokens["differ"] == 0 and tokens["mixed_passes"] > 0
    assert {"alike", "passes", "load", "table"} <= {line["section"] for line in lines}
