"""The sampler on the device against its specification, and against the sampler of the CPU path."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from engine.kernels.gpu import draw as device_draw
from engine.kernels.gpu.sampler import Chosen, SamplingRows, sample
from engine.kernels.gpu.sampling_reference import allowed, draw, logprobs, penalised
from engine.rng import uniforms
from engine.sampler import Sampler
from engine.scheduler.plan import FAILED, Admission
from isolation.ipc.messages import Sampling
from tests.engine.gpu.support import COUNTS, CPU, DTYPES, for_each, noise

ALTERNATIVES = 5
SURE = 1e-5
"""Margin, in probability, from which on a draw has to be that of the specification: some hundred of float32's
roundings, since sums over a row and exponentials have their share."""


@dataclass(frozen=True)
class Row:
    """What one row asks for."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    penalties: tuple[float, float, float] | None
    masked: bool
    logprobs: int
    seed: int
    position: int


ROWS = st.builds(
    Row,
    temperature=st.sampled_from((0.0, 0.3, 1.0, 2.0)),
    top_k=st.sampled_from((0, 0, 1, 3, 40)),
    top_p=st.sampled_from((1.0, 1.0, 0.05, 0.5, 0.95)),
    min_p=st.sampled_from((0.0, 0.0, 0.2)),
    penalties=st.sampled_from((None, None, (1.3, 0.0, 0.0), (0.7, 0.4, -0.3), (1.0, 1.0, 0.5))),
    masked=st.booleans(),
    logprobs=st.sampled_from((-1, 0, 3, ALTERNATIVES)),
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**33),
)


def state_of(rows: list[Row], vocab: int, generator: torch.Generator) -> SamplingRows:
    """The rows' numbers in random places of the state, with counts and masks drawn."""
    count = len(rows)
    lines = torch.arange(count, dtype=torch.int32)
    chosen = torch.randint(0, 2, (count, (vocab + 31) // 32, 32), generator=generator)
    words = (chosen << torch.arange(32)).sum(-1)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).int()
    repetition, presence, frequency = torch.tensor([row.penalties or (1.0, 0.0, 0.0) for row in rows]).T.contiguous()
    return SamplingRows(
        temperature=torch.tensor([row.temperature for row in rows]),
        top_k=torch.tensor([row.top_k if row.top_k < vocab else 0 for row in rows], dtype=torch.int32),
        top_p=torch.tensor([row.top_p for row in rows], dtype=torch.float64),
        log_min_p=torch.tensor([row.min_p for row in rows]).log(),
        seed=torch.from_numpy(np.array([row.seed for row in rows], dtype=np.uint64).view(np.int64)),
        limit=torch.full((count,), 1 << 40),
        stop_ids=torch.full((count, 2), -1, dtype=torch.int32),
        logprobs=torch.tensor([row.logprobs for row in rows], dtype=torch.int32),
        penalty_line=torch.where(torch.tensor([row.penalties is not None for row in rows]), lines, -1).int(),
        mask_line=torch.where(torch.tensor([row.masked for row in rows]), lines, -1).int(),
        repetition=repetition,
        presence=presence,
        frequency=frequency,
        counts=torch.randint(0, 4, (count, vocab), generator=generator, dtype=torch.int32),
        masks=words,
    )


def sampled(logits: Tensor, rows: list[Row], state: SamplingRows) -> Chosen:
    """Sample one token a row; everything that is given back is poisoned before."""
    out = Chosen.empty(len(rows), logits.shape[1], ALTERNATIVES, CPU)
    for part in (out.tokens, out.done, out.top_ids):
        part.fill_(-7_777)
    for numbers in (out.logprobs, out.top_logprobs, out.scores, out.peaks):
        numbers.fill_(torch.nan)
    positions = torch.tensor([row.position for row in rows])
    sample(logits, torch.arange(len(rows), dtype=torch.int32), positions, state, out)
    return out


def test_draws_are_those_of_the_cpu_bit_by_bit() -> None:
    """The counter generator gives the same float64 as the engine's for any seed and position."""
    generator = np.random.default_rng(0)
    seeds = generator.integers(0, 2**64, 64, dtype=np.uint64)
    positions = generator.integers(0, 2**40, 64)
    seeds[:3], positions[:3] = (0, 2**64 - 1, 2**63), (0, 2**32 - 1, 2**32)
    out = torch.zeros(64, dtype=torch.float64)
    device_draw.uniforms(torch.from_numpy(seeds.view(np.int64)), torch.from_numpy(positions), out)
    assert (out.numpy() == uniforms(seeds, positions)).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", COUNTS)
def test_rows_choose_as_specified(count: int, dtype: torch.dtype) -> None:
    """Tokens, counts and log-probabilities under any mix of what rows ask for; few draws are too close to call."""
    seen = {"draws": 0, "close": 0}

    def check(case: tuple[list[Row], int, int]) -> None:
        rows, vocab, seed = case
        generator = torch.Generator().manual_seed(seed)
        logits = (3 * noise(generator, len(rows), vocab)).to(dtype)
        state = state_of(rows, vocab, generator)
        before = state.counts.clone()
        out = sampled(logits, rows, state)
        for line, row in enumerate(rows):
            token = int(out.tokens[line])
            raw = allowed(logits[line], state.masks[line] if row.masked else None)
            if not raw.isfinite().any():
                assert token == FAILED and int(out.done[line]) == 1
                continue
            scores = raw if row.penalties is None else penalised(raw, before[line], row.penalties)
            if row.temperature == 0:
                assert scores[token] >= scores.max() - 1e-5
            else:
                point = uniforms(np.array([row.seed], np.uint64), np.array([row.position]))[0]
                found = draw(scores, row.temperature, (int(state.top_k[line]), row.top_p, row.min_p), point)
                seen["draws"] += 1
                seen["close"] += found.margin < SURE
                assert token == found.token or found.margin < SURE
            added = state.counts[line] - before[line]
            wanted = torch.zeros_like(added)
            if row.penalties is not None:
                wanted[token] = 2 if before[line, token] == 0 else 1
            assert torch.equal(added, wanted)
            assert_reported(out, line, raw, token, row)

    rows = st.lists(ROWS, min_size=1, max_size=3)
    for_each(count, st.tuples(rows, st.integers(1, 1_500), st.integers(0, 999)), check)
    assert seen["draws"] > 0
    assert seen["close"] <= 0.1 * seen["draws"] + 1


def assert_reported(out: Chosen, line: int, raw: Tensor, token: int, row: Row) -> None:
    """The row's log-probabilities are those of the specification; of rows that did not ask there are none."""
    own = logprobs(raw)
    ids = out.top_ids[line].tolist()
    best = min(row.logprobs, int(raw.isfinite().sum())) if row.logprobs > 0 else 0
    assert all(found >= 0 for found in ids[:best]) and ids[best:] == [-1] * (ALTERNATIVES - best)
    if row.logprobs < 0:
        return
    assert abs(float(out.logprobs[line]) - float(own[token])) < 1e-4
    values = own.sort(descending=True).values[:best]
    torch.testing.assert_close(out.top_logprobs[line, :best].double(), values, rtol=0, atol=1e-4)
    torch.testing.assert_close(own[ids[:best]], values, rtol=0, atol=1e-4)
    assert len(set(ids[:best])) == best


def test_tokens_are_those_of_the_cpu_sampler() -> None:
    """The same rows and logits through the sampler of the CPU path: the same tokens, step after step, with counts that
    grow on both sides."""
    vocab, steps = 700, 6
    generator = torch.Generator().manual_seed(5)
    asked = [
        Row(0.0, 0, 1.0, 0.0, None, False, -1, 1, 0), Row(0.8, 0, 1.0, 0.0, None, False, -1, 2, 0),
        Row(1.0, 20, 0.9, 0.0, None, False, -1, 3, 0), Row(1.5, 0, 0.7, 0.01, (1.2, 0.3, 0.2), False, -1, 2**64 - 4, 0),
        Row(0.0, 0, 1.0, 0.0, (1.5, 0.5, 0.5), False, -1, 5, 0),
    ]  # fmt: skip
    state = state_of(asked, vocab, generator)
    state.counts.zero_()
    own = Sampler(len(asked), vocab)
    for place, row in enumerate(asked):
        repetition, presence, frequency = row.penalties or (1.0, 0.0, 0.0)
        numbers = Sampling(
            temperature=row.temperature, top_k=row.top_k, top_p=row.top_p, min_p=row.min_p, seed=row.seed,
            repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency,
        )  # fmt: skip
        own.admit(Admission(place, array("I", [7, 9]), 2, numbers, -1, ()))
        state.counts[place, [7, 9]] = 1
    for step in range(steps):
        logits = 3 * noise(generator, len(asked), vocab)
        rows = [replace(row, position=2 + step) for row in asked]
        wanted = own.sample(logits, list(range(len(asked))), np.full(len(asked), 2 + step)).token_ids
        assert sampled(logits, rows, state).tokens.tolist() == wanted


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_a_broken_row_fails_alone(broken: float) -> None:
    """A row with a logit that is no number, or infinite, gives FAILED and is done; its neighbour is not touched."""
    rows = [Row(1.0, 3, 0.9, 0.0, None, False, 2, 1, 0), Row(1.0, 3, 0.9, 0.0, None, False, 2, 1, 0)]
    generator = torch.Generator().manual_seed(0)
    state = state_of(rows, 90, generator)
    logits = noise(generator, 1, 90).repeat(2, 1)
    healthy = sampled(logits, rows, state).tokens.tolist()
    assert healthy[0] == healthy[1] >= 0
    logits[0, 40] = broken
    out = sampled(logits, rows, state)
    assert out.tokens.tolist() == [FAILED, healthy[1]]
    assert out.done.tolist() == [1, 0]
    assert out.top_ids[0].tolist() == [-1] * ALTERNATIVES


def test_a_row_ends_at_a_stop_id_or_at_its_limit() -> None:
    """The chosen token is a stop id, or the last that the limit allows. Controls: another id, one token earlier."""
    rows = [Row(0.0, 0, 1.0, 0.0, None, False, -1, 0, 10)] * 4
    state = state_of(rows, 40, torch.Generator().manual_seed(0))
    logits = torch.zeros(4, 40)
    logits[:, 17] = 5.0
    state.stop_ids[0] = torch.tensor([3, 17])
    state.stop_ids[1] = torch.tensor([3, 18])
    state.limit[2], state.limit[3] = 11, 12
    out = sampled(logits, rows, state)
    assert out.tokens.tolist() == [17] * 4
    assert out.done.tolist() == [1, 0, 1, 0]
