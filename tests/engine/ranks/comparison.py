"""Schedules on several ranks beside the same on one rank, and what differs; ``bench.rank_schedules`` uses it too."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine.startup.load import load_engine
from tests.engine.model.families.table import BASE, FAMILIES, RANK_CASES, VOCAB, save_reference
from tests.engine.ranks.pair import configured, play_job

TIE = 1e-4
"""Two best logits nearer than this may change places between rank layouts: sums are rounded in another order."""

NEAR = 1e-3
"""Log-probabilities of a prompt's tokens differ by less between rank layouts."""

EXPERT = {"expert_parallel": 2}
PIPELINE = {"pipeline_parallel": 2}
BOTH = {"tensor_parallel": 2, "pipeline_parallel": 2}
MIXED = {"expert_parallel": 2, "pipeline_parallel": 2}
LAYOUTS = {
    "tensor": {"tensor_parallel": 2},
    "experts": EXPERT,
    "stages": PIPELINE,
    "tensor and stages": BOTH,
    "experts and stages": MIXED,
}


EXPERT_COUNTS = "num_local_experts", "num_experts", "n_routed_experts"
"""Names that descriptions have for the number of experts."""


def ranks_of(layout: dict[str, int]) -> int:
    """Processes of a layout."""
    wide = max(layout.get("tensor_parallel", 1), layout.get("expert_parallel", 1))
    return layout.get("pipeline_parallel", 1) * wide


def cases_of(layout: dict[str, int]) -> list[tuple[str, str]]:
    """Cases of all families that a layout can deal: several experts, or as many layers as stages."""
    return [case for case in RANK_CASES if _deals(layout, *case)]


def _deals(layout: dict[str, int], family: str, case: str) -> bool:
    values = {**BASE, **FAMILIES[family].base, **FAMILIES[family].cases[case]}
    experts = max((values[name] for name in EXPERT_COUNTS if name in values), default=0)
    dealt, stages = layout.get("expert_parallel", 1), layout.get("pipeline_parallel", 1)
    return values["num_hidden_layers"] >= stages and (dealt == 1 or experts >= dealt)


def play_on(size: int, jobs: list[dict], root: Path, folder: Path, *, timeout_s: float = 1000) -> list[dict]:
    """Play jobs on so many ranks in processes of their own, within ``timeout_s``."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, "-m", "tests.engine.ranks.pair", str(size)]
    done = subprocess.run(
        [*command, str(folder / "jobs.json"), str(folder / "out.json")],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "out.json").read_text())


def saved(
    folder: Path, cases: list[tuple[str, str]], seeds: list[list[int]], layout: dict[str, int] | None = None
) -> list[dict]:
    """A job for each case, with its checkpoint on disk; ``layout`` of the ranks, if heads are not all that is dealt."""
    jobs = []
    for number, ((family, case), own) in enumerate(zip(cases, seeds, strict=True)):
        place = folder / f"model-{number}"
        place.mkdir(parents=True)
        save_reference(place, family, **FAMILIES[family].cases[case])
        job = {"folder": str(place), "seeds": own, "vocab": VOCAB}
        jobs.append(job if layout is None else {**job, "layout": layout})
    return jobs


def blind_pair(job: dict, seeds: list[int]) -> list[dict]:
    """Deterministic requests in a batch with short steps, and each alone."""
    config = {"prefix_caching": False}
    strict = {**job, "seeds": seeds, "fields": {"deterministic": True}}
    return [{**strict, "config": {**config, "max_num_batched_tokens": 31}}, {**strict, "config": config, "alone": True}]


@functools.cache
def _alone(job: str) -> list[dict]:
    told = json.loads(job)
    return play_job(load_engine(configured(told, 1), warm=False), told)


def alone(job: dict) -> list[dict]:
    """The same schedules on one rank, in this process; once for all layouts."""
    return _alone(json.dumps({**job, "layout": None}))


def differences(one: list[dict], two: list[dict]) -> tuple[int, int, int]:
    """Tokens compared, requests that part at a tie, and requests that part elsewhere."""
    compared = ties = wrong = 0
    for first, second in zip(one, two, strict=True):
        assert first.keys() == second.keys()
        for request, left in first.items():
            right = second[request]
            assert right["prompt"] == pytest.approx(left["prompt"], abs=NEAR)
            for place, (a, b) in enumerate(zip(left["token_ids"], right["token_ids"], strict=False)):
                compared += 1
                if a != b:
                    _, best, next_best = left["best"][place][:3]
                    ties, wrong = (ties + 1, wrong) if best - next_best < TIE else (ties, wrong + 1)
                    break
            else:
                same = len(left["token_ids"]) == len(right["token_ids"])
                wrong += not (same or left["aborted"] or right["aborted"])
    return compared, ties, wrong
