"""How often the sampler looks at a row's scores, and that nothing depends on it: lists, limits and samples on the
device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import triton.language as tl
from _pytest.mark import ParameterSet
from torch import Tensor
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction

from engine.backends.common.rng import uniforms
from engine.backends.cuda.kernels.sampler import LEAN_FORM, PLAIN_FORM, STRETCH, Chosen, SamplerForm, sample
from engine.backends.cuda.kernels.triton_common import EMULATED
from tests.engine.backends.cuda.kernels.sampling_reference import draw, logprobs
from tests.engine.backends.cuda.kernels.support import PLACE, noise
from tests.engine.backends.cuda.kernels.test_gpu_sampler import ALTERNATIVES, SURE, Row, sampled, state_of
from tests.native import ON_CARD

pytestmark = pytest.mark.usefixtures("place")

Shape = Callable[[torch.Generator], Tensor]
"""Draws the scores of a row."""

VOCAB = 20_000
"""More than a sample has, so that limits come from a part of the row; no multiple of a stretch."""

PLAIN = Row(1.0, 0, 1.0, 0.0, None, False, -1, 11, 5)


def row_of(top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, typical_p: float = 1.0, seed: int = 11) -> Row:
    """A row that draws under these cuts."""
    return Row(1.0, top_k, top_p, min_p, None, False, -1, seed, 5, typical_p=typical_p)


def spread(generator: torch.Generator) -> Tensor:
    """Scores of which a few thousand share the probability."""
    return 3 * noise(generator, VOCAB)


def flat(generator: torch.Generator) -> Tensor:
    """Scores of which most ids have a part."""
    return 0.7 * noise(generator, VOCAB)


def spiky(generator: torch.Generator) -> Tensor:
    """Two ids, which no sample meets, have nearly everything."""
    scores = noise(generator, VOCAB)
    scores[777], scores[-1] = 14.0, 13.0
    return scores


def falling(generator: torch.Generator) -> Tensor:
    """Scores sorted by id: all that counts lies in the first stretches, and a sample says little."""
    return spread(generator).sort(descending=True).values


def even(generator: torch.Generator) -> Tensor:
    """Equal scores."""
    return torch.full((VOCAB,), float(noise(generator, 1)), device=PLACE)


def shaped(*short: Shape, full: tuple[Shape, ...]) -> list[ParameterSet]:
    """Parameters of a test: shapes that `make test` has, and those that need the full count under the interpreter."""
    mark = [] if ON_CARD else [pytest.mark.full]
    return [pytest.param(one, id=one.__name__, marks=mark if one in full else []) for one in (*short, *full)]


SOME = [
    pytest.param(PLAIN_FORM, id="plain"),
    pytest.param(LEAN_FORM, id="lean", marks=[] if ON_CARD else pytest.mark.full),
]
"""Forms of the sampler's kernels; under the interpreter the second takes a minute more."""

CUTS = (
    row_of(top_k=50),
    row_of(top_p=0.9, seed=12),
    row_of(top_k=50, top_p=0.9, seed=13),
    row_of(min_p=0.05, seed=14),
    row_of(top_k=8_000, top_p=0.7, seed=15),
    row_of(typical_p=0.9, seed=16),
)


@pytest.mark.parametrize("form", SOME)
@pytest.mark.parametrize("shape", shaped(spread, full=(spiky, falling, flat, even)))
def test_cuts_are_exact_whatever_a_sample_says(shape: Shape, form: SamplerForm) -> None:
    """Top-k, top-p, min-p and typical-p over scores that a sample describes well, badly or not at all: the token of
    the specification."""
    generator = torch.Generator().manual_seed(3)
    logits = shape(generator).repeat(len(CUTS), 1)
    out = sampled(logits, list(CUTS), state_of(list(CUTS), VOCAB, generator), form)
    for line, row in enumerate(CUTS):
        point = uniforms(np.array([row.seed], np.uint64), np.array([row.position]))[0]
        found = draw(logits[line].double(), row.temperature, (row.top_k, row.top_p, row.min_p, row.typical_p), point)
        assert int(out.tokens[line]) == found.token or found.margin < SURE


def hot(generator: torch.Generator) -> Tensor:
    """Scores that a temperature has made nearly even, of few values."""
    return (spread(generator) / 5).bfloat16().float()


LONG_CUTS = (
    row_of(top_p=0.5, seed=21),
    row_of(top_p=0.99, seed=22),
    row_of(top_k=9_000, seed=23),
    row_of(top_k=9_000, top_p=0.99, seed=24),
    row_of(top_p=0.9, min_p=0.001, seed=25),
    Row(5.0, 0, 0.95, 0.0, None, False, -1, 26, 5),
    Row(0.02, 0, 0.9, 0.0, None, False, -1, 27, 5),
    Row(0.02, 12_000, 1.0, 0.0, None, False, -1, 28, 5),
)


@pytest.mark.parametrize("form", SOME)
@pytest.mark.parametrize("shape", shaped(spread, full=(hot, flat, spiky, falling, even)))
def test_long_lists_are_shortened_around_the_floor(shape: Shape, form: SamplerForm) -> None:
    """Cuts that keep thousands of ids, at high and low temperatures, with and without a stage behind: the token of the
    specification, for several draws."""
    generator = torch.Generator().manual_seed(8)
    logits = shape(generator).repeat(len(LONG_CUTS), 1)
    out = sampled(logits, list(LONG_CUTS), state_of(list(LONG_CUTS), VOCAB, generator), form)
    for line, row in enumerate(LONG_CUTS):
        point = uniforms(np.array([row.seed], np.uint64), np.array([row.position]))[0]
        found = draw(logits[line].double(), row.temperature, (row.top_k, row.top_p, row.min_p, row.typical_p), point)
        assert int(out.tokens[line]) == found.token or found.margin < SURE


@pytest.mark.parametrize("form", SOME)
def test_a_row_has_its_bits_in_any_batch(form: SamplerForm) -> None:
    """Figures, list and token of a row are equal bits alone and beside others, where fewer programs read it."""
    generator = torch.Generator().manual_seed(4)
    rows = [PLAIN, *CUTS[:3]]
    logits = torch.stack([spread(generator) for _ in rows])
    state = state_of(rows, VOCAB, generator)
    together = sampled(logits, rows, state, form)
    for line, row in enumerate(rows):
        alone = Chosen.empty(1, VOCAB, ALTERNATIVES, PLACE)
        alone.scores.fill_(torch.nan)
        alone.figures.fill_(torch.nan)
        lines = torch.tensor([line], dtype=torch.int32, device=PLACE)
        positions = torch.tensor([row.position], device=PLACE)
        sample(logits[line : line + 1], lines, positions, state, alone, form)
        assert torch.equal(alone.tokens, together.tokens[line : line + 1])
        for one, other in ((alone.scores, together.scores), (alone.figures, together.figures)):
            assert torch.equal(one[0].view(torch.int32), other[line].view(torch.int32))


@contextmanager
def counting(*memories: Tensor) -> Iterator[list[int]]:
    """Numbers that kernels load from these tensors, counted under the interpreter: one count."""
    counted = [0]
    spans = [(one.data_ptr(), one.data_ptr() + one.numel() * one.element_size()) for one in memories]
    builder = interpreter.InterpreterBuilder
    load = builder.create_masked_load

    def create(self: object, ptrs: object, mask: object, *given: object) -> object:
        live = ptrs.data[mask.data.astype(bool)]
        counted[0] += sum(int(((live >= begin) & (live < end)).sum()) for begin, end in spans)
        return load(self, ptrs, mask, *given)

    builder.create_masked_load = create
    try:
        yield counted
    finally:
        builder.create_masked_load = load


@InterpretedFunction
def reads(memory: tl.tensor, size: tl.tensor, times: tl.tensor, BLOCK: tl.constexpr) -> None:
    """Read everything as often as asked."""
    for _ in range(times):
        for start in range(0, size, BLOCK):
            place = start + tl.arange(0, BLOCK)
            tl.load(memory + place, mask=place < size, other=0.0)


def passes(shape: Callable[[torch.Generator], Tensor], row: Row, form: SamplerForm = PLAIN_FORM) -> float:
    """How often each score of one row was loaded, from logits and from lists, in the mean."""
    generator = torch.Generator().manual_seed(6)
    logits = shape(generator).unsqueeze(0)
    state = state_of([row], VOCAB, generator)
    out = Chosen.empty(1, VOCAB, ALTERNATIVES, PLACE)
    with counting(logits, out.scores) as counted:
        sample(logits, torch.zeros(1, dtype=torch.int32), torch.tensor([row.position]), state, out, form)
    return counted[0] / VOCAB


@pytest.mark.full
@pytest.mark.skipif(not EMULATED.value, reason="loads are counted under the interpreter")
def test_few_passes_over_the_scores() -> None:
    """The maximum and a plain draw look at each score once and into one stretch again; top-k, top-p and min-p stay
    below six passes whether few ids are kept or most. Control: five readings are counted as five."""
    memory = torch.zeros(VOCAB)
    with counting(memory) as counted:
        reads[(1,)](memory, VOCAB, 5, BLOCK=1_024)
    assert counted[0] == 5 * VOCAB
    one = 1 + STRETCH / VOCAB
    assert passes(spread, Row(0.0, 0, 1.0, 0.0, None, False, -1, 1, 0)) <= one
    assert passes(spread, PLAIN) <= one
    # The sample of a small vocabulary is a large part of it: here 0.41 of a pass, and 0.06 of Llama 3's.
    for shape in (spread, flat, spiky):
        for row in CUTS[:4]:
            assert passes(shape, row) <= 6, (shape, row)
    assert passes(spread, CUTS[0]) <= 2.5
    for shape in (spread, flat, spiky):
        assert passes(shape, CUTS[1], LEAN_FORM) <= 6, shape
    # With log-probabilities one stretch more for each alternative, and the chosen token's logit.
    told = Row(0.0, 0, 1.0, 0.0, None, False, ALTERNATIVES, 1, 0)
    assert passes(spread, told) <= 1 + ((1 + ALTERNATIVES) * STRETCH + 1) / VOCAB


@pytest.mark.skipif(not EMULATED.value, reason="loads are counted under the interpreter")
def test_a_chance_score_of_a_sample_does_not_shorten_a_list() -> None:
    """A few scores have most of the probability, and the sample meets one of them: what it says of the whole is far too
    much, and a list by that share would lack the floor. Still the row is read once."""
    one = row_of(top_p=0.9)
    generator = torch.Generator().manual_seed(9)
    logits = spread(generator)
    # Ids of the sample: in Llama 3's vocabulary it has one in sixteen, here two in five.
    logits[[3, 1_400]] = 13.0
    state = state_of([one], VOCAB, generator)
    out = Chosen.empty(1, VOCAB, ALTERNATIVES, PLACE)
    given = torch.zeros(1, dtype=torch.int32), torch.tensor([one.position]), state, out
    with counting(logits) as counted:
        sample(logits.unsqueeze(0), *given)
    assert counted[0] <= 1.6 * VOCAB


def test_alternatives_go_by_falling_logit_and_rising_id() -> None:
    """Logits with few values, so that equal ones lie in one stretch and in several: the order of a stable sort."""
    generator = torch.Generator().manual_seed(7)
    vocab = 2 * STRETCH + 700
    rows = [Row(0.0, 0, 1.0, 0.0, None, False, ALTERNATIVES, 1, 0)] * 4
    logits = torch.randint(0, 4, (4, vocab), generator=generator).float().to(PLACE)
    logits[1] = 0.0
    logits[1, [5, 2_100, 4_500]] = 1.0
    logits[2, 4_000:] = 9.0
    logits[3] = -torch.inf
    logits[3, [9, 4_100]] = 2.0
    out = sampled(logits, rows, state_of(rows, vocab, generator))
    for line in range(len(rows)):
        own = logprobs(logits[line].double())
        values, ids = own.sort(descending=True, stable=True)
        count = min(ALTERNATIVES, int(own.isfinite().sum()))
        assert out.top_ids[line].tolist() == ids[:count].tolist() + [-1] * (ALTERNATIVES - count)
        torch.testing.assert_close(out.top_logprobs[line, :count].double(), values[:count], rtol=0, atol=1e-4)
