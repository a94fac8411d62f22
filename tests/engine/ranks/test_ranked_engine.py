"""An engine of several ranks gives what one rank gives, and its deterministic class is blind to its batch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.startup.load import load_engine
from tests.engine.model.families.table import FAMILIES, RANK_CASES, VOCAB, save_reference
from tests.engine.ranks.pair import configured, play_job

pytestmark = pytest.mark.usefixtures("one_thread")

TIE = 1e-4
"""Two best logits nearer than this may change places between rank layouts: sums are rounded in another order."""

FEW = [next(case for case in RANK_CASES if case[0] == family) for family in dict.fromkeys(one[0] for one in RANK_CASES)]
"""One case of each family."""

FULL_SCHEDULES = 500
Play = Callable[[int, list[dict]], list[dict]]


@pytest.fixture
def play(root: Path, tmp_path: Path) -> Play:
    """Plays jobs on so many ranks in processes of their own."""

    def run(size: int, jobs: list[dict]) -> list[dict]:
        (tmp_path / "jobs.json").write_text(json.dumps(jobs))
        command = [sys.executable, "-m", "tests.engine.ranks.pair", str(size)]
        done = subprocess.run(
            [*command, str(tmp_path / "jobs.json"), str(tmp_path / "out.json")],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=1000,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads((tmp_path / "out.json").read_text())

    return run


def saved(folder: Path, cases: list[tuple[str, str]], seeds: list[list[int]], **fields: object) -> list[dict]:
    """A job for each case, with its checkpoint on disk."""
    jobs = []
    for number, ((family, case), own) in enumerate(zip(cases, seeds, strict=True)):
        place = folder / f"model-{number}"
        place.mkdir()
        save_reference(place, family, **FAMILIES[family].cases[case])
        jobs.append({"folder": str(place), "seeds": own, "vocab": VOCAB, **fields})
    return jobs


def alone(job: dict) -> list[dict]:
    """The same schedules on one rank, in this process."""
    return play_job(load_engine(configured(job, 1), warm=False), job)


def differences(one: list[dict], two: list[dict]) -> tuple[int, int, int]:
    """Tokens compared, requests that part at a tie, and requests that part elsewhere."""
    compared = ties = wrong = 0
    for first, second in zip(one, two, strict=True):
        assert first.keys() == second.keys()
        for request, left in first.items():
            right = second[request]
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


def check_families(
    play: Play, folder: Path, per_case: int, cases: list[tuple[str, str]], record: Callable[[str, object], None]
) -> None:
    """Greedy tokens of two ranks against those of one, over so many schedules for each case."""
    seeds = [list(range(1000 * number, 1000 * number + per_case)) for number in range(len(cases))]
    jobs = saved(folder, cases, seeds)
    found = play(2, jobs)
    compared = ties = 0
    for case, job, two in zip(cases, jobs, found, strict=True):
        tokens, tied, wrong = differences(alone(job), two["played"])
        assert wrong == 0, case
        compared, ties = compared + tokens, ties + tied
    record("schedules", per_case * len(cases))
    record("tokens", compared)
    record("ties", ties)
    assert compared > 10 * per_case * len(cases)
    assert ties <= compared / 1000


def test_two_ranks_give_the_tokens_of_one(
    play: Play, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """A fuzzed schedule for one case of each family: the same greedy tokens on two ranks and on one; control: other
    requests give other tokens."""
    check_families(play, tmp_path, 1, FEW, record_property)
    job = {"folder": str(tmp_path / "model-0"), "seeds": [7], "vocab": VOCAB}
    other = {**job, "seeds": [8]}
    assert differences(alone(job), alone(other))[2] > 0


@pytest.mark.full
@pytest.mark.timeout(3000)
def test_two_ranks_give_the_tokens_of_one_over_many_schedules(
    play: Play, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """The full count: 500 schedules and more, over all cases of all families."""
    check_families(play, tmp_path, -(-FULL_SCHEDULES // len(RANK_CASES)), RANK_CASES, record_property)


def test_the_deterministic_class_is_blind_to_its_batch_at_one_layout(play: Play, tmp_path: Path) -> None:
    """Tokens and log-probabilities of deterministic requests are the same bits alone and in any batch on two ranks."""
    fields = {"deterministic": True}
    (job,) = saved(tmp_path, [FEW[0]], [[1, 2, 3]], fields=fields)
    config = {"prefix_caching": False}
    wide = {**job, "config": {**config, "max_num_batched_tokens": 31}}
    single = {**job, "config": config, "alone": True}
    together, apart = play(2, [wide, single])
    assert together["deterministic"]
    count = 0
    for batch, one in zip(together["played"], apart["played"], strict=True):
        for request, answer in batch.items():
            length = min(len(answer["token_ids"]), len(one[request]["token_ids"]))
            assert answer["token_ids"][:length] == one[request]["token_ids"][:length]
            assert answer["best"][:length] == one[request]["best"][:length]
            count += length
    assert count > 50
