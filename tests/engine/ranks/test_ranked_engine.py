"""An engine of several ranks gives what one rank gives, and its deterministic class is blind to its batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from isolation.ipc.messages import FailureCode
from tests.engine.model.families.table import MIXTURES, RANK_CASES
from tests.engine.ranks.comparison import (
    BOTH,
    EXPERT,
    LAYOUTS,
    MIXED,
    PIPELINE,
    alone,
    blind_pair,
    cases_of,
    differences,
    play_on,
    ranks_of,
    saved,
)

pytestmark = pytest.mark.usefixtures("one_thread")

FEW = [next(case for case in RANK_CASES if case[0] == family) for family in dict.fromkeys(one[0] for one in RANK_CASES)]
"""One case of each family."""

EXPERTS = [case for case in FEW if case[0] in MIXTURES]
"""One case of each family with experts."""

QUICK = [case for case in FEW if case[0] in ("llama", "gpt_oss")]
"""What two ranks play in every run: one table and several, windows, sinks and experts. That two ranks give the logits
and ids of further kinds is shown in every run by ``tests/engine/model/families/test_ranks.py``; schedules of all
families are of the full counts."""

DEALT = [case for case in QUICK if case in EXPERTS]
"""Those whose experts are dealt."""

KINDS = {"sampled": True, "structured": True, "prompt_logprobs": 0}
"""Fields of requests."""

FULL_SCHEDULES = 500

BATCHES = 5
"""Batches of deterministic requests beside ordinary ones."""

Play = Callable[[int, list[dict]], list[dict]]


@dataclass(frozen=True, slots=True)
class Played:
    """Jobs of one kind, and what each gave on several ranks."""

    jobs: list[dict]
    found: list[dict]


@pytest.fixture
def play(root: Path, tmp_path: Path) -> Play:
    """Plays jobs on so many ranks."""
    return lambda size, jobs: play_on(size, jobs, root, tmp_path)


@pytest.fixture(scope="module")
def two(root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Played]:
    """What two ranks gave, by kind of job: one pair of processes plays all, since each loads tensors first."""
    folder = tmp_path_factory.mktemp("two")
    few = saved(folder / "few", QUICK, [[1000 * number] for number in range(len(QUICK))])
    staged = [{**job, "layout": PIPELINE} for job in few]
    kinds = {
        "tensor": few,
        "experts": saved(folder / "experts", DEALT, [[9000 + number] for number in range(len(DEALT))], EXPERT),
        "stages": staged,
        "blind tensor": blind_pair(few[0], [1, 2]),
        "blind stages": blind_pair(staged[0], [1]),
        "batches": [{**few[0], "seeds": [5], "batches": BATCHES, "config": {"prefix_caching": False}}],
        "requests": [{**staged[0], "seeds": [21, 22], "fields": {name: value}} for name, value in KINDS.items()],
        "fault": [{**staged[0], "seeds": [], "fault": True}],
    }
    found = iter(play_on(2, [job for jobs in kinds.values() for job in jobs], root, folder))
    return {kind: Played(jobs, [next(found) for _ in jobs]) for kind, jobs in kinds.items()}


def check_families(jobs: list[dict], found: list[dict], record: Callable[[str, object], None]) -> None:
    """Greedy tokens of several ranks against those of one, over all schedules of the jobs."""
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


@pytest.mark.timeout(300)
def test_two_ranks_give_the_tokens_of_one_and_the_deterministic_class_its_bits(
    two: dict[str, Played], record_property: Callable[[str, object], None]
) -> None:
    """A fuzzed schedule for a case of several families: the same greedy tokens on two ranks and on one; deterministic
    requests have the same bits alone and in any batch on two ranks. Controls: other requests give other tokens, and
    ordinary requests are not compared bit by bit."""
    tensor = two["tensor"]
    check_families(tensor.jobs, tensor.found, record_property)
    assert check_blind(*two["blind tensor"].found) > 30
    batches = two["batches"].found[0]["played"][0]
    assert batches["batches"] == BATCHES and batches["tokens"] > BATCHES and not batches["wrong"]
    job, other = ({**tensor.jobs[0], "seeds": [seed]} for seed in (7, 8))
    assert differences(alone(job), alone(other))[2] > 0


@pytest.mark.full
@pytest.mark.timeout(3000)
def test_the_deterministic_class_is_blind_to_its_batch_in_every_family(play: Play, tmp_path: Path) -> None:
    """The same bits alone and in any batch on two ranks, in one case of each family that is promised them."""
    jobs = saved(tmp_path, FEW, [list(range(number, number + 3)) for number in range(len(FEW))])
    both = [one for job in jobs for one in blind_pair(job, job["seeds"])]
    found = play(2, both)
    promised = [pair for pair in zip(found[::2], found[1::2], strict=True) if pair[0]["deterministic"]]
    assert len(promised) > len(FEW) // 2
    assert sum(check_blind(*pair) for pair in promised) > 50 * len(promised)


@pytest.mark.timeout(300)
def test_experts_and_stages_give_the_tokens_of_one_rank(
    two: dict[str, Played], record_property: Callable[[str, object], None]
) -> None:
    """A fuzzed schedule for a case of several families: experts dealt to two ranks, and layers cut into two stages, of
    which both have rows on their way, give the greedy tokens of one rank; deterministic requests have the same bits
    alone and in any batch in a pipeline."""
    experts, stages = two["experts"], two["stages"]
    check_families([*experts.jobs, *stages.jobs], [*experts.found, *stages.found], record_property)
    assert check_blind(*two["blind stages"].found) > 10


@pytest.mark.timeout(300)
def test_a_pipeline_draws_masks_scores_and_checks_as_one_rank(
    two: dict[str, Played], record_property: Callable[[str, object], None]
) -> None:
    """While rows are on their way through two stages: drawn tokens with penalties, masks that change with the place of
    a token, and log-probabilities of prompts are those of one rank. A row that is given another's block fails alone, on
    all ranks alike."""
    kinds = two["requests"]
    check_families(kinds.jobs, kinds.found, record_property)
    masked = [answer for one in kinds.found[1]["played"] for answer in one.values()]
    assert all(token % 2 == place % 2 for one in masked for place, token in enumerate(one["token_ids"]))
    assert all(one["prompt"] for answers in kinds.found[2]["played"] for one in answers.values() if not one["aborted"])
    broken, whole = two["fault"].found[0]["played"][0], alone(two["fault"].jobs[0])[0]
    assert broken["failures"] == whole["failures"] == [FailureCode.INTEGRITY, None]
    assert broken["2"]["token_ids"] == whole["2"]["token_ids"]
    assert len(broken["1"]["token_ids"]) < len(broken["2"]["token_ids"])


@pytest.mark.full
def test_four_ranks_give_the_tokens_of_one(
    play: Play, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Two stages of two ranks each, which share heads or deal experts: the greedy tokens of one rank."""
    jobs = saved(tmp_path / "tensor", FEW[:2], [[1], [2]], BOTH)
    jobs += saved(tmp_path / "experts", EXPERTS[:1], [[3]], MIXED)
    check_families(jobs, play(4, jobs), record_property)


@pytest.mark.full
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_each_layout_gives_the_tokens_of_one_rank_over_many_schedules(
    play: Play, tmp_path: Path, layout: dict[str, int], record_property: Callable[[str, object], None]
) -> None:
    """The full count of each layout: 500 schedules and more, over all cases of all families that have what it deals."""
    cases = cases_of(layout)
    count = -(-FULL_SCHEDULES // len(cases))
    seeds = [list(range(1000 * number, 1000 * number + count)) for number in range(len(cases))]
    jobs = saved(tmp_path, cases, seeds, layout)
    check_families(jobs, play(ranks_of(layout), jobs), record_property)
