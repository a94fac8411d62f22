"""The sampler on the device against its specification, and against the sampler of the CPU path."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import strategies as st
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from engine.backends.common.rng import uniforms
from engine.backends.common.sampler import Sampler, bounded
from engine.backends.cuda.kernels.sampler import LEAN_FORM, PLAIN_FORM, Chosen, SamplerForm, sample
from engine.backends.cuda.kernels.sampling_row import uniform
from engine.backends.cuda.runtime.operations import SamplingColumns
from engine.backends.cuda.runtime.rows import NUM_FIELDS, Field, words_of
from engine.core.scheduler.plan import FAILED, Admission
from isolation.ipc.logit_bias import MAX_LOGIT_BIASES, LogitBias
from isolation.ipc.sampling import Sampling
from tests.engine.backends.cuda.kernels.sampling_reference import allowed, draw, logprobs, penalised
from tests.engine.backends.cuda.kernels.support import COUNTS, DTYPES, PLACE, for_each, noise
from tests.native import ON_CARD

pytestmark = pytest.mark.usefixtures("place")

kernel = triton.jit if ON_CARD else InterpretedFunction

ALTERNATIVES = 5

FORMS = [pytest.param(PLAIN_FORM, id="plain"), pytest.param(LEAN_FORM, id="lean")]
"""Forms of the sampler's kernels."""

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
    typical_p: float = 1.0
    biases: int = 0

    @property
    def sampling(self) -> Sampling:
        """The row's numbers as the wire has them."""
        repetition, presence, frequency = self.penalties or (1.0, 0.0, 0.0)
        return Sampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            typical_p=self.typical_p,
            repetition_penalty=repetition,
            presence_penalty=presence,
            frequency_penalty=frequency,
            seed=self.seed,
        )


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
    typical_p=st.sampled_from((1.0, 1.0, 0.2, 0.9)),
    biases=st.sampled_from((0, 0, 1, 12)),
)


def state_of(rows: list[Row], vocab: int, generator: torch.Generator) -> SamplingColumns:
    """The rows' numbers in random places of the state, with counts and masks drawn."""
    count = len(rows)
    lines = torch.arange(count)
    chosen = torch.randint(0, 2, (count, (vocab + 31) // 32, 32), generator=generator)
    words = (chosen << torch.arange(32)).sum(-1)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).int()
    state = torch.zeros(NUM_FIELDS, count, dtype=torch.int64)
    state[Field.LOGPROBS] = torch.tensor([row.logprobs for row in rows])
    state[Field.PENALTY_LINE] = torch.where(torch.tensor([row.penalties is not None for row in rows]), lines, -1)
    state[Field.MASK_LINE] = torch.where(torch.tensor([row.masked for row in rows]), lines, -1)
    state[Field.BIASES] = torch.tensor([min(row.biases, vocab) for row in rows])
    state[len(Field) :] = torch.tensor([words_of(bounded(row.sampling, vocab)) for row in rows]).T
    # Behind a row's own entries lie those of another request.
    ids = torch.zeros(count, MAX_LOGIT_BIASES, dtype=torch.int32)
    for line in ids:
        some = torch.randperm(vocab, generator=generator)[:MAX_LOGIT_BIASES]
        line[: len(some)] = some
    return SamplingColumns(
        words=state,
        counts=torch.randint(0, 4, (count, vocab), generator=generator, dtype=torch.int32),
        masks=words,
        bias_ids=ids,
        biases=6 * noise(generator, count, MAX_LOGIT_BIASES),
    )


def biased(raw: Tensor, state: SamplingColumns, line: int) -> Tensor:
    """Scores of a row with its biases."""
    count = int(state.words[Field.BIASES, line])
    return raw.index_add(0, state.bias_ids[line, :count].long(), state.biases[line, :count].double())


def sampled(logits: Tensor, rows: list[Row], state: SamplingColumns, form: SamplerForm = PLAIN_FORM) -> Chosen:
    """Sample one token a row; everything that is given back is poisoned before."""
    out = Chosen.empty(len(rows), logits.shape[1], ALTERNATIVES, PLACE)
    for part in (out.tokens, out.top_ids):
        part.fill_(-7_777)
    for numbers in (out.logprobs, out.top_logprobs, out.scores, out.figures, out.limits):
        numbers.fill_(torch.nan)
    positions = torch.tensor([row.position for row in rows])
    sample(logits, torch.arange(len(rows), dtype=torch.int32), positions, state, out, form)
    return out


@kernel
def draws(seeds: tl.tensor, positions: tl.tensor, out: tl.tensor) -> None:
    """The uniform number of each seed and position."""
    place = tl.program_id(0)
    tl.store(out + place, uniform(tl.load(seeds + place), tl.load(positions + place)))


def test_draws_are_those_of_the_cpu_bit_by_bit() -> None:
    """The counter generator gives the same float64 as the engine's for any seed and position."""
    generator = np.random.default_rng(0)
    seeds = generator.integers(0, 2**64, 64, dtype=np.uint64)
    positions = generator.integers(0, 2**40, 64)
    seeds[:3], positions[:3] = (0, 2**64 - 1, 2**63), (0, 2**32 - 1, 2**32)
    out = torch.zeros(64, dtype=torch.float64)
    given = (torch.from_numpy(part).to(PLACE) for part in (seeds.view(np.int64), positions))
    draws[(64,)](*given, out)
    assert (out.cpu().numpy() == uniforms(seeds, positions)).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", COUNTS)
def test_rows_choose_as_specified(count: int, dtype: torch.dtype, form: SamplerForm) -> None:
    """Tokens, counts and log-probabilities under any mix of what rows ask for; few draws are too close to call."""
    seen = {"draws": 0, "close": 0}

    def check(case: tuple[list[Row], int, int]) -> None:
        rows, vocab, seed = case
        generator = torch.Generator().manual_seed(seed)
        logits = (3 * noise(generator, len(rows), vocab)).to(dtype)
        state = state_of(rows, vocab, generator)
        before = state.counts.clone()
        out = sampled(logits, rows, state, form)
        for line, row in enumerate(rows):
            token = int(out.tokens[line])
            raw = allowed(logits[line], state.masks[line] if row.masked else None)
            if not raw.isfinite().any():
                assert token == FAILED
                continue
            scores = biased(raw, state, line)
            scores = scores if row.penalties is None else penalised(scores, before[line], row.penalties)
            if row.temperature == 0:
                assert scores[token] >= scores.max() - 1e-5
            else:
                point = uniforms(np.array([row.seed], np.uint64), np.array([row.position]))[0]
                found = draw(
                    scores,
                    row.temperature,
                    (row.top_k if row.top_k < vocab else 0, row.top_p, row.min_p, row.typical_p),
                    point,
                )
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


@pytest.mark.full
def test_tokens_are_those_of_the_cpu_sampler() -> None:
    """The same rows and logits through the sampler of the CPU path: the same tokens, step after step, with counts that
    grow on both sides."""
    vocab, steps = 700, 6
    generator = torch.Generator().manual_seed(5)
    asked = [
        Row(0.0, 0, 1.0, 0.0, None, False, -1, 1, 0),
        Row(0.8, 0, 1.0, 0.0, None, False, -1, 2, 0),
        Row(1.0, 20, 0.9, 0.0, None, False, -1, 3, 0),
        Row(1.5, 0, 0.7, 0.01, (1.2, 0.3, 0.2), False, -1, 2**64 - 4, 0),
        Row(0.0, 0, 1.0, 0.0, (1.5, 0.5, 0.5), False, -1, 5, 0),
        Row(1.3, 0, 1.0, 0.0, None, False, -1, 6, 0, typical_p=0.4),
        Row(1.0, 50, 0.95, 0.001, None, False, -1, 7, 0, typical_p=0.7),
        Row(0.0, 0, 1.0, 0.0, None, False, -1, 8, 0, biases=300),
        Row(1.0, 0, 1.0, 0.0, (1.5, 0.5, 0.5), False, -1, 9, 0, biases=20),
    ]
    state = state_of(asked, vocab, generator)
    state.counts.zero_()
    own = Sampler(len(asked), vocab)
    for place, row in enumerate(asked):
        told = sorted(zip(state.bias_ids[place].tolist(), state.biases[place].tolist(), strict=True))[: row.biases]
        columns = array("I", [one for one, _ in told]), array("f", [bias for _, bias in told])
        state.bias_ids[place, : row.biases] = torch.tensor(columns[0], dtype=torch.int32)
        state.biases[place, : row.biases] = torch.tensor(columns[1])
        bias = LogitBias(*columns) if told else None
        own.admit(Admission(place, array("I", [7, 9]), 2, row.sampling, -1, (), logit_bias=bias))
        state.counts[place, [7, 9]] = 1
    for step in range(steps):
        logits = 3 * noise(generator, len(asked), vocab)
        rows = [replace(row, position=2 + step) for row in asked]
        wanted = own.sample(logits, list(range(len(asked))), np.full(len(asked), 2 + step)).token_ids
        assert sampled(logits, rows, state).tokens.tolist() == wanted


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_a_broken_row_fails_alone(broken: float) -> None:
    """A row with a logit that is no number, or infinite, gives FAILED; its neighbour is not touched."""
    rows = [Row(1.0, 3, 0.9, 0.0, None, False, 2, 1, 0), Row(1.0, 3, 0.9, 0.0, None, False, 2, 1, 0)]
    generator = torch.Generator().manual_seed(0)
    state = state_of(rows, 90, generator)
    logits = noise(generator, 1, 90).repeat(2, 1)
    healthy = sampled(logits, rows, state).tokens.tolist()
    assert healthy[0] == healthy[1] >= 0
    logits[0, 40] = broken
    out = sampled(logits, rows, state)
    assert out.tokens.tolist() == [FAILED, healthy[1]]
    assert out.top_ids[0].tolist() == [-1] * ALTERNATIVES
