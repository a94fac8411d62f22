"""The script that collects an engine's system calls on a card runs on a CPU; its verdict is that of its lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.full
def test_a_rehearsal_finds_an_engine_on_the_device_backend_within_its_list(root: Path, tmp_path: Path) -> None:
    """The real program with ``backend: device`` makes no call beyond its list, its end included, and lives under it;
    which entries are used is counted. The model is written where it is named, and kept."""
    out, model = tmp_path / "results.jsonl", tmp_path / "model"
    done = subprocess.run(
        [sys.executable, "bench/gpu_program.py", "--rehearse", "--out", str(out), "--model", str(model)],
        cwd=root,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["machine", "collect", "enforced", "used", "verdict"]
    assert lines[-1] == {
        "kind": "verdict",
        "outside": 0,
        "enforced_lived": True,
        "runs": ["collect", "enforced", "used"],
    }
    assert all(line["lived"] and line["tokens"] for line in lines[1:-1])
    assert lines[3]["programs"][0]["used"]["futex"] > 0
    assert (model / "model.safetensors").exists()


def test_without_a_card_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No card and no rehearsal: one line says what to do, before any engine is started."""
    import torch

    from bench import gpu_program

    def unwanted(*_: object) -> None:
        raise AssertionError("a model was made")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu_program, "_model", unwanted)
    monkeypatch.setattr(sys, "argv", ["bench/gpu_program.py", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="torch sees no GPU; --rehearse runs everything"):
        gpu_program.main()
    assert not (tmp_path / "out").exists()
