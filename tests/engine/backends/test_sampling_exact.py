"""The sampler against ``docs/sampling.md``: every draw by the exact inverse, frequencies by chi-square.

False alarms: seeds are fixed, so a run repeats. Had they been drawn, each frequency test would fail a sound sampler
with probability ``ALARM``, all of them together with less than 2e-8.
"""

from __future__ import annotations

import functools
import math
from array import array
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.backends.common.rng import uniforms
from engine.backends.common.sampler import Sampler
from engine.core.scheduler.plan import Admission
from isolation.ipc.sampling import Sampling
from tests.engine.backends.sampling_reference import Keep, chi_square, distribution, kept, tail

ALARM = 1e-9
"""Probability below which a statistic is taken as the wrong distribution."""

BORDER = 2e-6
"""Distance from a border of the cumulative distribution within which float32 may decide either way."""

CASES = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.5),
    Sampling(temperature=2.0),
    Sampling(top_k=1),
    Sampling(top_k=5),
    Sampling(top_k=29),
    Sampling(top_p=0.3),
    Sampling(top_p=0.9),
    Sampling(min_p=0.2),
    Sampling(temperature=0.7, top_k=12, top_p=0.8, min_p=0.05),
    Sampling(temperature=1.5, top_k=4, top_p=0.5),
    Sampling(typical_p=0.2),
    Sampling(temperature=1.5, top_k=20, top_p=0.9, min_p=0.02, typical_p=0.7),
    Sampling(temperature=1.2, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, top_p=0.95),
]
PROMPT, OUTPUT = (3, 4, 5, 5), (5, 7, 7, 7, 11)


def draw(logits: np.ndarray, sampling: Sampling, draws: int) -> np.ndarray:
    """Tokens that ``draws`` seeds give."""
    sampler = Sampler(draws, len(logits))
    tokens = array("I", PROMPT + OUTPUT)
    for row in range(draws):
        sampler.admit(Admission(row, tokens, len(PROMPT), replace(sampling, seed=row), -1, (1,)))
    wide = torch.from_numpy(logits).expand(draws, -1)
    return np.array(sampler.sample(wide, list(range(draws)), np.full(draws, 5)).token_ids)


@functools.cache
def counts_of(sampling: Sampling, draws: int, ties: bool) -> np.ndarray:
    """How often each of 30 tokens is drawn; a control holds the same draws against something else."""
    counts = np.bincount(draw(logits_of(30, 3, ties=ties), sampling, draws), minlength=30)
    counts.flags.writeable = False
    return counts


def logits_of(size: int, seed: int, *, ties: bool = False) -> np.ndarray:
    """Float32 logits, with ties where wanted."""
    scores = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 2
    return (scores.mul(2).round().div(2) if ties else scores).numpy()


@pytest.mark.parametrize("sampling", CASES)
@pytest.mark.parametrize("ties", [False, True])
def test_frequencies_match_the_exact_distribution(sampling: Sampling, ties: bool) -> None:
    """8,000 draws fit the distribution of the document, and nothing outside its support is drawn."""
    logits, draws = logits_of(30, 3, ties=ties), 8_000
    counts = counts_of(sampling, draws, ties)
    expected = distribution(logits, sampling, PROMPT, OUTPUT) * draws
    assert not counts[expected == 0].any()
    assert tail(*chi_square(counts, expected)) > ALARM


def test_typical_p_looks_past_the_nearest_ids_where_they_do_not_suffice() -> None:
    """Of 40,000 nearly equal ids some thousand are typical, far more than the few hundred that are looked at first:
    what is drawn lies in the exact set, and in all of it. Control: a small share is settled by the first look."""
    logits = torch.randn(40_000, generator=torch.Generator().manual_seed(8)).mul_(0.05).numpy()
    for share, least in ((0.2, 5_000), (0.001, 10)):
        sampling = Sampling(typical_p=share)
        exact = np.nonzero(distribution(logits, sampling))[0]
        drawn = draw(logits, sampling, 64)
        assert len(exact) > least
        assert np.isin(drawn, exact).mean() >= 63 / 64


def test_typical_p_of_one_changes_no_bit() -> None:
    """Beside rows with a typical-p, rows without one draw what they draw when nobody has
    one. A worked case beside it: of four ids the second is the most typical, and the likeliest comes next."""
    logits = logits_of(900, 5)
    sampler, alone = Sampler(64, 900), Sampler(64, 900)
    tokens = array("I", PROMPT)
    for row in range(64):
        sampling = Sampling(top_p=0.9 if row % 3 else 1.0, seed=row)
        alone.admit(Admission(row, tokens, len(tokens), sampling, -1, ()))
        mixed = replace(sampling, typical_p=0.3) if row % 2 else sampling
        sampler.admit(Admission(row, tokens, len(tokens), mixed, -1, ()))
    wide = torch.from_numpy(logits).expand(64, -1)
    rows, positions = list(range(64)), np.full(64, 5)
    together = sampler.sample(wide, rows, positions).token_ids
    before = alone.sample(wide, rows, positions).token_ids
    assert together[::2] == before[::2] and together[1::2] != before[1::2]
    skewed = np.log(np.array([0.5, 0.3, 0.15, 0.05], dtype=np.float32))
    # Entropy 1.14 nats; information 0.69, 1.20, 1.90, 3.00: the second id is the most typical, the first comes next.
    assert set(draw(skewed, Sampling(typical_p=0.3), 200)) == {1}
    assert set(draw(skewed, Sampling(typical_p=0.31), 200)) == {0, 1}


@pytest.mark.parametrize(("size", "seed"), [(30, 1), (513, 2), (1_500, 3)])
def test_every_draw_is_the_inverse_of_the_distribution(size: int, seed: int) -> None:
    """For random numbers of every kind, each of 300 draws is the id in whose stretch of the exact cumulative
    distribution the row's uniform number lies."""
    generator = np.random.default_rng(seed)
    near = checked = 0
    for number in range(40):
        logits = logits_of(size, 100 * seed + number, ties=bool(number % 3 == 0))
        sampling = Sampling(
            temperature=float(generator.choice([0.3, 0.7, 1.0, 1.6])),
            top_k=int(generator.choice([0, 1, 7, 25])),
            top_p=float(generator.choice([1.0, 0.95, 0.5, 0.1])),
            min_p=float(generator.choice([0.0, 0.01, 0.3])),
            typical_p=float(generator.choice([1.0, 1.0, 0.9, 0.3])),
            repetition_penalty=float(generator.choice([1.0, 0.8, 1.4])),
            presence_penalty=float(generator.choice([0.0, 0.5])),
            frequency_penalty=float(generator.choice([0.0, -0.3, 0.3])),
        )
        tokens = draw(logits, sampling, 300)
        edges = np.cumsum(distribution(logits, sampling, PROMPT, OUTPUT))
        points = uniforms(np.arange(300, dtype=np.uint64), np.full(300, 5))
        exact = np.searchsorted(edges, points, side="right")
        close = np.abs(edges[np.newaxis, :] - points[:, np.newaxis]).min(-1) < BORDER
        near += int(close.sum())
        checked += 300
        assert tokens[~close].tolist() == exact[~close].tolist(), sampling
    assert near < checked / 50


def _top_k_one_less(scores: np.ndarray, sampling: Sampling) -> np.ndarray:
    return kept(scores, replace(sampling, top_k=max(1, sampling.top_k - 1) if sampling.top_k else 0))


def _top_p_without_its_last(scores: np.ndarray, sampling: Sampling) -> np.ndarray:
    keep = kept(scores, sampling)
    if sampling.top_p < 1:
        keep &= scores > scores[keep].min()
    return keep


def _top_p_of_all_instead_of_what_top_k_left(scores: np.ndarray, sampling: Sampling) -> np.ndarray:
    return kept(scores, replace(sampling, top_k=0)) & kept(scores, replace(sampling, top_p=1.0))


def _min_p_of_the_whole(scores: np.ndarray, sampling: Sampling) -> np.ndarray:
    return kept(scores, replace(sampling, min_p=0.0)) & (np.exp(scores) >= sampling.min_p * np.exp(scores).sum())


def _min_p_before_the_temperature(scores: np.ndarray, sampling: Sampling) -> np.ndarray:
    return kept(scores, replace(sampling, min_p=0.0)) & (np.exp(scores * sampling.temperature) >= sampling.min_p)


def _typical_p_without_its_last(scores: np.ndarray, sampling: Sampling) -> np.ndarray:
    keep = kept(scores, sampling)
    weights = np.where(kept(scores, replace(sampling, typical_p=1.0)), np.exp(scores), 0)
    distance = np.where(keep, np.abs(scores - np.sum(weights * scores) / weights.sum()), 0)
    return keep & (distance < distance.max())


def _typical_p_of_all(scores: np.ndarray, sampling: Sampling) -> np.ndarray:
    alone = Sampling(typical_p=sampling.typical_p)
    return kept(scores, replace(sampling, typical_p=1.0)) & kept(scores, alone)


@pytest.mark.parametrize(
    ("wrong", "sampling"),
    [
        (_top_k_one_less, Sampling(top_k=5)),
        (_top_p_without_its_last, Sampling(top_p=0.9)),
        (_top_p_of_all_instead_of_what_top_k_left, Sampling(temperature=1.5, top_k=4, top_p=0.5)),
        (_min_p_of_the_whole, Sampling(min_p=0.05)),
        (_min_p_before_the_temperature, Sampling(temperature=0.5, min_p=0.2)),
        (_typical_p_without_its_last, Sampling(typical_p=0.6)),
        (_typical_p_of_all, Sampling(top_k=6, typical_p=0.5)),
    ],
)
def test_a_wrong_filter_is_noticed(wrong: Keep, sampling: Sampling) -> None:
    """Control: draws held against a definition that is off by a little fail the same frequency test."""
    logits, draws = logits_of(30, 3), 8_000
    counts = counts_of(sampling, draws, False)
    expected = distribution(logits, sampling, PROMPT, OUTPUT, keep=wrong) * draws
    assert counts[expected == 0].any() or tail(*chi_square(counts, expected)) < ALARM


@pytest.mark.parametrize("change", [{"temperature": 1.05}, {"repetition_penalty": 1.4}, {"frequency_penalty": 0.3}])
def test_a_number_that_is_a_little_off_is_noticed(change: dict[str, float]) -> None:
    """Control: 40,000 draws tell a temperature of 1 from 1.05, and mild penalties from none."""
    logits, draws = logits_of(30, 3), 40_000
    counts = counts_of(Sampling(), draws, False)
    right, off = (distribution(logits, numbers, PROMPT, OUTPUT) for numbers in (Sampling(), Sampling(**change)))
    assert tail(*chi_square(counts, right * draws)) > ALARM
    assert tail(*chi_square(counts, off * draws)) < ALARM


def test_the_statistics_know_published_values() -> None:
    """Tails of chi-square against tables, for even and odd degrees of freedom."""
    known = {(3.841459, 1): 0.05, (5.991465, 2): 0.05, (16.81189, 6): 0.01, (21.66599, 9): 0.01, (124.3421, 100): 0.05}
    for (statistic, freedom), wanted in known.items():
        assert math.isclose(tail(statistic, freedom), wanted, rel_tol=1e-5)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("size", [97, 40_000])
def test_a_rows_numbers_are_the_same_bits_in_any_batch(size: int, threads: int) -> None:
    """Token, log-probability and alternatives are equal alone and beside other rows with other numbers, ties and a
    vocabulary that two threads share included."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        generator = torch.Generator().manual_seed(7)
        logits = torch.randn(12, size, generator=generator).mul(4).round().div(2)
        logits[::2] += torch.randn(6, size, generator=generator)
        sampler = Sampler(12, size)
        for row in range(12):
            kind = replace(CASES[row], seed=row)
            sampler.admit(Admission(row, array("I", PROMPT), len(PROMPT), kind, (0, 1, 20)[row % 3], (1,)))
        alone = [sampler.sample(logits[row : row + 1].clone(), [row], np.array([9])) for row in range(12)]
        for _ in range(6):
            rows = torch.randperm(12, generator=generator)[
                : int(torch.randint(2, 13, (), generator=generator))
            ].tolist()
            for row in range(12):
                kind = replace(CASES[row], seed=row)
                sampler.admit(Admission(row, array("I", PROMPT), len(PROMPT), kind, (0, 1, 20)[row % 3], (1,)))
            together = sampler.sample(logits[rows], rows, np.full(len(rows), 9))
            assert together.token_ids == [alone[row].token_ids[0] for row in rows]
            assert [replace(one, index=0) for one in together.logprobs] == [alone[row].logprobs[0] for row in rows]
    finally:
        torch.set_num_threads(before)


def test_a_sum_over_a_whole_row_is_not_the_same_in_any_batch() -> None:
    """Control: what the sampler avoids does differ, where two threads share the only row."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        rows = torch.randn(8, 151_936, generator=torch.Generator().manual_seed(1)).exp()
        together = rows.sum(-1)
        assert any(float(rows[place : place + 1].sum(-1)) != float(together[place]) for place in range(8))
    finally:
        torch.set_num_threads(before)
