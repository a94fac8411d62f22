"""An engine of several ranks gives what one rank gives, and its deterministic class is blind to its batch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.startup.load import load_engine
from isolation.ipc.messages import FailureCode
from tests.engine.model.families.table import FAMILIES, MIXTURES, RANK_CASES, VOCAB, save_reference
from tests.engine.ranks.pair import configured, play_job

pytestmark = pytest.mark.usefixtures("one_thread")

TIE = 1e-4
"""Two best logits nearer than this may change places between rank layouts: sums are rounded in another order."""

NEAR = 1e-3
"""Log-probabilities of a prompt's tokens differ by less between rank layouts."""

FEW = [next(case for case in RANK_CASES if case[0] == family) for family in dict.fromkeys(one[0] for one in RANK_CASES)]
"""One case of each family."""

EXPERTS = [case for case in FEW if case[0] in MIXTURES]
"""One case of each family with experts."""

EXPERT = {"expert_parallel": 2}
PIPELINE = {"pipeline_parallel": 2}
BOTH = {"tensor_parallel": 2, "pipeline_parallel": 2}
MIXED = {"expert_parallel": 2, "pipeline_parallel": 2}

KINDS = {"sampled": True, "structured": True, "prompt_logprobs": 0}
"""Fields of requests."""

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
        place.mkdir(parents=True)
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


def check_families(jobs: list[dict], found: list[dict], record: Callable[[str, object], None]) -> None:
    """Greedy tokens of two ranks against those of one, over all schedules of the jobs."""
    schedules = sum(len(job["seeds"]) for job in jobs)
    compared = ties = 0
    for job, two in zip(jobs, found, strict=True):
        tokens, tied, wrong = differences(alone(job), two["played"])
        assert wrong == 0, job
        compared, ties = compared + tokens, ties + tied
    record("schedules", schedules)
    record("tokens", compared)
    record("ties", ties)
    assert compared > 10 * schedules
    assert ties <= compared / 1000


def check_blind(together: dict, apart: dict) -> int:
    """Tokens and log-probabilities of the same requests in a batch and alone; gives how many were compared."""
    assert together["deterministic"]
    count = 0
    for batch, one in zip(together["played"], apart["played"], strict=True):
        for request, answer in batch.items():
            length = min(len(answer["token_ids"]), len(one[request]["token_ids"]))
            assert answer["token_ids"][:length] == one[request]["token_ids"][:length]
            assert answer["best"][:length] == one[request]["best"][:length]
            count += length
    return count


def test_two_ranks_give_the_tokens_of_one_and_the_deterministic_class_its_bits(
    play: Play, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """A fuzzed schedule for one case of each family: the same greedy tokens on two ranks and on one; deterministic
    requests have the same bits alone and in any batch on two ranks. Controls: other requests give other tokens, and
    ordinary requests are not compared bit by bit."""
    jobs = saved(tmp_path, FEW, [[1000 * number] for number in range(len(FEW))])
    config = {"prefix_caching": False}
    strict = {**jobs[0], "seeds": [1, 2], "fields": {"deterministic": True}}
    wide = {**strict, "config": {**config, "max_num_batched_tokens": 31}}
    *found, together, apart = play(2, [*jobs, wide, {**strict, "config": config, "alone": True}])
    check_families(jobs, found, record_property)
    assert check_blind(together, apart) > 30
    job, other = ({**jobs[0], "seeds": [seed]} for seed in (7, 8))
    assert differences(alone(job), alone(other))[2] > 0


@pytest.mark.full
@pytest.mark.timeout(3000)
def test_two_ranks_give_the_tokens_of_one_over_many_schedules(
    play: Play, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """The full count: 500 schedules and more, over all cases of all families."""
    count = -(-FULL_SCHEDULES // len(RANK_CASES))
    seeds = [list(range(1000 * number, 1000 * number + count)) for number in range(len(RANK_CASES))]
    jobs = saved(tmp_path, RANK_CASES, seeds)
    check_families(jobs, play(2, jobs), record_property)


@pytest.mark.full
@pytest.mark.timeout(3000)
def test_the_deterministic_class_is_blind_to_its_batch_in_every_family(play: Play, tmp_path: Path) -> None:
    """The same bits alone and in any batch on two ranks, in one case of each family that is promised them."""
    jobs = saved(tmp_path, FEW, [list(range(number, number + 3)) for number in range(len(FEW))])
    both = []
    for job in jobs:
        strict = {**job, "fields": {"deterministic": True}}
        config = {"prefix_caching": False}
        both += [{**strict, "config": {**config, "max_num_batched_tokens": 31}}]
        both += [{**strict, "config": config, "alone": True}]
    found = play(2, both)
    promised = [pair for pair in zip(found[::2], found[1::2], strict=True) if pair[0]["deterministic"]]
    assert len(promised) > len(FEW) // 2
    assert sum(check_blind(*pair) for pair in promised) > 50 * len(promised)


def test_experts_and_stages_give_the_tokens_of_one_rank(
    play: Play, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """A fuzzed schedule for one case of each family: experts dealt to two ranks, and layers cut into two stages, of
    which both have rows on their way, give the greedy tokens of one rank; deterministic requests have the same bits
    alone and in any batch in a pipeline."""
    mixtures = saved(tmp_path / "experts", EXPERTS, [[9000 + number] for number in range(len(EXPERTS))], layout=EXPERT)
    staged = saved(tmp_path / "stages", FEW, [[1000 * number] for number in range(len(FEW))], layout=PIPELINE)
    config = {"prefix_caching": False}
    strict = {**staged[0], "seeds": [1], "fields": {"deterministic": True}}
    wide = {**strict, "config": {**config, "max_num_batched_tokens": 31}}
    *found, together, apart = play(2, [*mixtures, *staged, wide, {**strict, "config": config, "alone": True}])
    check_families([*mixtures, *staged], found, record_property)
    assert check_blind(together, apart) > 10


def test_a_pipeline_draws_masks_scores_and_checks_as_one_rank(
    play: Play, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """While rows are on their way through two stages: drawn tokens with penalties, masks that change with the place of
    a token, and log-probabilities of prompts are those of one rank. A row that is given another's block fails alone, on
    all ranks alike."""
    (job,) = saved(tmp_path, FEW[:1], [[21, 22]], layout=PIPELINE)
    kinds = [{**job, "fields": {name: value}} for name, value in KINDS.items()]
    *found, fault = play(2, [*kinds, {**job, "seeds": [], "fault": True}])
    check_families(kinds, found, record_property)
    masked = [answer for one in found[1]["played"] for answer in one.values()]
    assert all(token % 2 == place % 2 for one in masked for place, token in enumerate(one["token_ids"]))
    assert all(one["prompt"] for answers in found[2]["played"] for one in answers.values() if not one["aborted"])
    broken, whole = fault["played"][0], alone({**job, "seeds": [], "fault": True})[0]
    assert broken["failures"] == whole["failures"] == [FailureCode.INTEGRITY, None]
    assert broken["2"]["token_ids"] == whole["2"]["token_ids"]
    assert len(broken["1"]["token_ids"]) < len(broken["2"]["token_ids"])


def test_four_ranks_give_the_tokens_of_one(
    play: Play, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Two stages of two ranks each, which share heads or deal experts: the greedy tokens of one rank."""
    jobs = saved(tmp_path / "tensor", FEW[:2], [[1], [2]], layout=BOTH)
    jobs += saved(tmp_path / "experts", EXPERTS[:1], [[3]], layout=MIXED)
    check_families(jobs, play(4, jobs), record_property)


LAYOUTS = {"experts": EXPERT, "stages": PIPELINE, "tensor and stages": BOTH, "experts and stages": MIXED}


@pytest.mark.full
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_each_layout_gives_the_tokens_of_one_rank_over_many_schedules(
    play: Play, tmp_path: Path, layout: dict[str, int], record_property: Callable[[str, object], None]
) -> None:
    """The full count of each layout: 500 schedules and more, over all cases of all families that have what it deals."""
    cases = [case for case in RANK_CASES if "expert_parallel" not in layout or case[0] in MIXTURES]
    count = -(-FULL_SCHEDULES // len(cases))
    seeds = [list(range(1000 * number, 1000 * number + count)) for number in range(len(cases))]
    jobs = saved(tmp_path, cases, seeds, layout=layout)
    size = layout.get("pipeline_parallel", 1) * max(layout.get("tensor_parallel", 1), layout.get("expert_parallel", 1))
    check_families(jobs, play(size, jobs), record_property)
