"""The search for a killed engine's keys and values: it counts what is there, and its verdict is that of the parts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu_canary import SEEDS, WORDS, Search, pattern, verdict, words_of

GOOD: dict[str, dict[str, Any]] = {
    "living": {"in_cache": 5},
    "killed": {"status": -signal.SIGKILL, "tokens": 9},
    "tenant": {"found": 0},
    "next": {"old_when_ready": 0, "old_after_requests": 0, "own_in_cache": 5},
}


def test_the_search_counts_a_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three lines of it among others are three, in pieces of any size that does not cut one; a pattern of which a word
    differs is none, and neither is the other model's."""
    monkeypatch.setattr("bench.gpu_canary.CHUNK", 1 << 10)
    search, wanted = Search(torch.device("cpu")), words_of(SEEDS[0], True)
    memory = torch.zeros(4_096, dtype=torch.uint8)
    words = memory.view(torch.int64)
    for at in (0, 40, 300):
        words[at : at + WORDS] = torch.tensor(wanted[0])
    words[100 : 100 + WORDS] = torch.tensor(wanted[0])
    words[100 + WORDS - 1] ^= 1
    assert search.count(memory, wanted) == (3, 4 * WORDS)
    assert search.count(memory, words_of(SEEDS[1], True))[0] == 0
    assert not torch.equal(pattern(SEEDS[0], 0, 64), pattern(SEEDS[0], 1, 64))


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("living", {"in_cache": 0}),
        ("killed", {"status": 0}),
        ("killed", {"tokens": 0}),
        ("next", {"old_when_ready": 1}),
        ("next", {"old_after_requests": 1}),
        ("next", {"own_in_cache": 0}),
        ("next", {"failed": "it ended with 1", "old_when_ready": None}),
    ],
)
def test_the_verdict(part: str, change: dict[str, Any]) -> None:
    """Met by good parts only; what the driver leaves to another process is told and not judged."""
    assert verdict(GOOD)["met"]
    assert verdict(GOOD | {"tenant": {"found": 7}}) == verdict(GOOD) | {"driver_cleans_between_processes": False}
    assert not verdict(GOOD | {part: GOOD[part] | change})["met"]


@pytest.mark.full
def test_a_rehearsal_kills_a_program_and_finds_nothing_afterwards(root: Path, tmp_path: Path) -> None:
    """All parts on a CPU: the control finds the pattern, the program dies at work, the next engine reads nothing."""
    out = tmp_path / "out.jsonl"
    done = subprocess.run(
        [sys.executable, "bench/gpu_canary.py", "--rehearse", "--out", str(out)],
        cwd=root,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["living", "killed", "tenant", "next", "verdict"]
    assert lines[-1]["met"]
