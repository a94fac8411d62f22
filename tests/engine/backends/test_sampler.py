"""Sampler: greedy, independence of rows, extremes, logprobs, penalties; for distributions see test_sampling_exact."""

from __future__ import annotations

import math
from array import array
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from engine.backends.common.sampler import Sampler, nucleus_floor
from engine.core.scheduler.plan import FAILED, Admission
from isolation.ipc.codec import decode, encode
from isolation.ipc.engine import StepOutput
from isolation.ipc.sampling import Sampling

GREEDY = Sampling(temperature=0.0)


def admit(
    sampler: Sampler,
    row: int,
    sampling: Sampling,
    *,
    prompt: tuple[int, ...] = (0,),
    output: tuple[int, ...] = (),
    logprobs: int = -1,
) -> None:
    """Give a row to a request."""
    tokens = array("I", prompt + output)
    sampler.admit(Admission(row, tokens, len(prompt), sampling, logprobs, (1,)))


def sample_one(logits: torch.Tensor, sampling: Sampling, position: int = 1, **context: object) -> int:
    """The token of a single row."""
    sampler = Sampler(1, logits.shape[-1])
    admit(sampler, 0, sampling, **context)
    return sampler.sample(logits[None], [0], np.array([position])).token_ids[0]


CASES = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.5),
    Sampling(temperature=3.0),
    Sampling(top_k=1),
    Sampling(top_k=5),
    Sampling(top_k=29),
    Sampling(top_p=0.3),
    Sampling(top_p=0.9),
    Sampling(min_p=0.2),
    Sampling(temperature=0.7, top_k=12, top_p=0.8, min_p=0.05),
    Sampling(temperature=1.5, top_k=4, top_p=0.5),
    Sampling(typical_p=0.3),
]


def test_a_request_draws_the_same_tokens_alone_and_in_any_batch() -> None:
    """Same seed and position: same token, wherever the row is and whoever is beside it."""
    size = 500
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(40, size, generator=generator)
    kinds = [CASES[number % len(CASES)] for number in range(40)]
    sampler = Sampler(64, size)
    for number, kind in enumerate(kinds):
        admit(sampler, number, replace(kind, seed=number))
    rows = torch.randperm(40, generator=generator).tolist()
    together = sampler.sample(logits[rows], rows, np.array([100 + row for row in rows])).token_ids
    for row, token_id in zip(rows, together, strict=True):
        alone = sampler.sample(logits[row : row + 1], [row], np.array([100 + row])).token_ids
        assert alone == [token_id]
    other = sampler.sample(logits[rows], rows, np.array([200 + row for row in rows])).token_ids
    assert other != together


def test_greedy_is_the_exact_first_maximum() -> None:
    """Temperature 0 takes the largest score, the lowest id among equals, in every float type and beside other rows."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        logits = torch.randn(8, 300, generator=torch.Generator().manual_seed(2)).to(dtype)
        logits[3, 40] = logits[3, 20] = logits[3].max() + 1
        expected = [line.index(max(line)) for line in logits.tolist()]
        plain, mixed = Sampler(9, 300), Sampler(9, 300)
        for row in range(8):
            admit(plain, row, GREEDY)
            admit(mixed, row, GREEDY)
        admit(mixed, 8, Sampling())
        rows, positions = list(range(8)), np.arange(8)
        assert plain.sample(logits, rows, positions).token_ids == expected
        wide = torch.cat((logits, logits[:1]))
        assert mixed.sample(wide, [*rows, 8], np.arange(9)).token_ids[:8] == expected


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(), Sampling(top_p=0.5, repetition_penalty=1.2)])
def test_a_row_with_broken_logits_fails_alone(broken: float, sampling: Sampling) -> None:
    """One NaN or infinity fails its row and changes no other."""
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(4))
    sampler = Sampler(5, 50)
    for row in range(5):
        admit(sampler, row, sampling, logprobs=1)
    rows, positions = list(range(5)), np.arange(5)
    whole = sampler.sample(logits.clone(), rows, positions).token_ids
    for row in range(5):
        admit(sampler, row, sampling, logprobs=1)
    logits[2, 17] = broken
    samples = sampler.sample(logits, rows, positions)
    assert samples.token_ids == [*whole[:2], FAILED, *whole[3:]]
    assert [entry.index for entry in samples.logprobs] == [0, 1, 3, 4]


def test_minus_infinity_is_a_score_like_any_other() -> None:
    """A row whose other scores are all masked gives the one that is left."""
    logits = torch.full((20,), -math.inf)
    logits[11] = -3.0
    assert sample_one(logits, GREEDY) == 11
    assert sample_one(logits, Sampling(temperature=2.0, top_p=0.5, top_k=3)) == 11


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e30])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    """Next to nothing is greedy, next to infinity is uniform; both give a token."""
    logits = torch.tensor([1.0, 5.0, 3.0])
    tokens = {sample_one(logits, Sampling(temperature=temperature, seed=seed)) for seed in range(40)}
    assert tokens == ({1} if temperature < 1 else {0, 1, 2})


@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 6),
    st.integers(2, 400),
    st.integers(0, 400),
    st.floats(0.01, 1.0),
    st.booleans(),
)
def test_the_nucleus_is_the_same_with_and_without_a_full_sort(
    seed: int, rows: int, size: int, top_k: int, top_p: float, coarse: bool
) -> None:
    """Looking at a few best scores first gives exactly what sorting all gives, ties included."""
    scores = torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * 3
    if coarse:
        scores = scores.round()
    scaled = scores - scores.amax(-1, keepdim=True)
    ks = torch.full((rows,), top_k if top_k < size else 0)
    ps = torch.full((rows,), top_p, dtype=torch.float64)
    few, full = nucleus_floor(scaled, ks, ps, width=8), nucleus_floor(scaled, ks, ps, width=size)
    assert torch.equal(scaled >= few[:, None], scaled >= full[:, None])
    kept = (scaled >= few[:, None]).sum(-1)
    assert (kept >= 1).all()


EXTREMES = st.sampled_from([0.0, 5e-324, 1e-300, 1e-45, 1e-7, 0.5, 1.0, 2.0, 1e9, 1e38, 1e39, 1.7976931348623157e308])


@given(
    sampling=st.builds(
        Sampling,
        temperature=EXTREMES,
        top_k=st.sampled_from([0, 1, 2, 7, 8, 9, 2**32 - 1]),
        top_p=st.floats(5e-324, 1.0),
        min_p=st.floats(0.0, 1.0),
        typical_p=st.floats(0.0, 1.0, exclude_min=True),
        repetition_penalty=EXTREMES.filter(bool),
        presence_penalty=st.floats(-2, 2),
        frequency_penalty=st.floats(-2, 2),
        seed=st.integers(0, 2**64 - 1),
    ),
    scores=st.lists(st.sampled_from([-math.inf, -3e38, -1e9, -1.0, 0.0, 1e-30, 2.0, 3e38]), min_size=8, max_size=8),
)
@example(sampling=Sampling(temperature=0.0, repetition_penalty=5e-324), scores=[3e38] * 8)
@example(sampling=Sampling(temperature=1e300, repetition_penalty=5e-324), scores=[-math.inf, *[3e38] * 7])
def test_no_admitted_numbers_break_the_arithmetic(sampling: Sampling, scores: list[float]) -> None:
    """Whatever the wire admits, a row with a finite maximum gives an id that the model did not exclude, and its
    logprobs fit a frame."""
    sampler = Sampler(1, 8)
    admit(sampler, 0, sampling, prompt=(1, 2), output=(2, 3, 3), logprobs=8)
    samples = sampler.sample(torch.tensor([scores]), [0], np.array([3]))
    if not math.isfinite(max(scores)):
        assert samples.token_ids == [FAILED]
        return
    (token_id,) = samples.token_ids
    assert 0 <= token_id < 8
    neutral = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1, 0, 0)
    assert scores[token_id] > -math.inf or not neutral
    numbers = array("Q", [9]), array("I", samples.token_ids), b"\0"
    assert decode(encode(StepOutput(*numbers, logprobs=tuple(samples.logprobs)))).logprobs == tuple(samples.logprobs)


def test_penalties_follow_their_definitions() -> None:
    """Repetition over prompt and output, presence and frequency over the output, in float arithmetic by hand."""
    logits = torch.tensor([4.0, 4.2, -1.0, 2.0, 0.5])
    context = {"prompt": (0, 2), "output": (1, 1, 3)}
    wanted = [4.0 / 1.5, 4.2 / 1.5 - 0.5 * 2 - 0.25, -1.0 * 1.5, 2.0 / 1.5 - 0.5 - 0.25, 0.5]
    sampling = Sampling(temperature=0.0, repetition_penalty=1.5, presence_penalty=0.25, frequency_penalty=0.5)
    sampler = Sampler(1, 5)
    admit(sampler, 0, sampling, **context)
    scores = sampler._penalties.apply(logits[None], [0])
    assert torch.allclose(scores[0], torch.tensor(wanted))
    assert sample_one(logits, sampling, **context) == 0
    assert sample_one(logits, GREEDY, **context) == 1


def test_penalties_count_what_is_put_out_and_survive_preemption() -> None:
    """A frequency penalty pushes tokens down one by one; a row rebuilt from its tokens continues the same."""
    logits = torch.tensor([[3.0, 2.5, 2.0, 1.0]])
    sampling = Sampling(temperature=0.0, frequency_penalty=1.0)
    sampler = Sampler(2, 4)
    admit(sampler, 0, sampling, prompt=(3,))
    tokens = [sampler.sample(logits, [0], np.array([1])).token_ids[0] for _ in range(7)]
    assert tokens == [0, 1, 0, 2, 1, 0, 2]
    admit(sampler, 1, sampling, prompt=(3,), output=tuple(tokens[:3]))
    again = [sampler.sample(logits, [1], np.array([1])).token_ids[0] for _ in range(4)]
    assert again == tokens[3:]


def test_a_row_inherits_nothing_from_its_last_request() -> None:
    """Penalties and temperature of a row's previous request are gone with it."""
    sampler = Sampler(1, 3)
    admit(sampler, 0, Sampling(temperature=5.0, frequency_penalty=2.0), output=(1,) * 9, logprobs=3)
    sampler.sample(torch.zeros(1, 3), [0], np.array([1]))
    for logprobs in (-1, 0):
        admit(sampler, 0, GREEDY, logprobs=logprobs)
        samples = sampler.sample(torch.tensor([[0.0, 1.0, 0.5]]), [0], np.array([1]))
        assert (samples.token_ids, len(samples.logprobs)) == ([1], logprobs + 1)


def test_logprobs_are_the_models_own() -> None:
    """They come from the unprocessed distribution whatever the request does to it, for the rows that asked."""
    logits = torch.randn(4, 60, generator=torch.Generator().manual_seed(6))
    exact = torch.log_softmax(logits.double(), -1)
    sampler = Sampler(4, 60)
    hot = Sampling(temperature=2.0, top_k=10, repetition_penalty=1.7, seed=5)
    for row, count in enumerate((-1, 0, 2, 20)):
        admit(sampler, row, hot, prompt=tuple(range(30)), logprobs=count)
    samples = sampler.sample(logits, [0, 1, 2, 3], np.arange(4))
    assert [entry.index for entry in samples.logprobs] == [1, 2, 3]
    for entry, count in zip(samples.logprobs, (0, 2, 20), strict=True):
        token_id = samples.token_ids[entry.index]
        assert entry.logprob == pytest.approx(float(exact[entry.index, token_id]), abs=1e-5)
        best = exact[entry.index].topk(count)
        assert list(entry.top_ids) == best.indices.tolist()
        assert list(entry.top_logprobs) == pytest.approx(best.values.tolist(), abs=1e-5)
