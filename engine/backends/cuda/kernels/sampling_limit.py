"""A limit above which what a row's cut keeps lies, from a sample of the row, before its logits are read."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.backends.cuda.kernels.logprobs import MaskedLine, logits_of
from engine.backends.cuda.kernels.sampling_row import (
    MIN_P,
    TOP_K,
    TOP_P,
    TYPICAL_P,
    RowWords,
    Wishes,
    integer,
    number,
    over_temperature,
    scores_of,
)

NEGLIGIBLE = tl.constexpr(-28.0)
"""A score so far below the largest, after the temperature, has less than 1e-12 of its weight."""

LOGIT_SPAN = tl.constexpr(40.0)
"""Scores so far below a sample's largest are of no use in a list."""

LEAST_SAMPLED = tl.constexpr(64.0)
"""Ids of a sample, at the least, above a limit for top-k: so few in a list cost nothing."""

CHANCE = tl.constexpr(16.0)
"""Ids of a sample, the largest, that it may have met by chance."""

CERTAIN = tl.constexpr(0.85)
"""Part of what a cut may drop that is left out of a list: with what ``CHANCE`` adds, none of 1,290 drawn rows of eight
shapes had a list that was too short. A limit at the sample's own share was too high for one row in seven."""

STEPS = tl.constexpr(10)
"""Steps in which a level is looked for."""

FEW_STEPS, FEWER_STEPS = tl.constexpr(8), tl.constexpr(6)
"""Steps where few instructions are to be taken, the second of the level of ``CHANCE``: both levels come out lower, by a
tenth and by half a power of e at the most, so a list is no shorter for it and some hundreds of ids longer."""

SAMPLE_PIECES = tl.constexpr(64)
SAMPLE_PIECE = tl.constexpr(128)
"""A sample of a row: so many pieces of so many ids, evenly spread."""


@triton.jit
def sampled(
    line: MaskedLine, row: RowWords, wishes: Wishes, stride: tl.tensor, temperature: tl.tensor
) -> tuple[tl.tensor, ...]:
    """Scaled scores of a sample, less the largest of them, which is given too."""
    place = tl.arange(0, SAMPLE_PIECE)
    token = (tl.arange(0, SAMPLE_PIECES) * stride)[:, None] + place[None, :]
    _, score = scores_of(line, row, wishes, token, logits_of(line, token), 0, line.size)
    peak = tl.max(score)
    # A sample without a score: whatever comes of it, the row has few.
    peak = tl.where(peak > -float("inf"), peak, 0.0)
    return over_temperature(score, peak, temperature), peak


@triton.jit
def level(value: tl.tensor, amount: tl.tensor, lowest: tl.tensor, below: tl.tensor, STEPS: tl.constexpr) -> tl.tensor:
    """About the greatest level under which a sample has no more than ``below``; of scaled scores, and ``lowest`` where
    there is none. What is small is added up, which a chance score far above the others does not change."""
    low, high = lowest, lowest * 0.0
    for _ in range(STEPS):
        middle = (low + high) * 0.5
        fits = tl.sum(tl.where(value < middle, amount, 0.0)) <= below
        low = tl.where(fits, middle, low)
        high = tl.where(fits, high, middle)
    return low


@triton.jit
def lowest_level(value: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """The least scaled score of a sample that a level is looked for at."""
    least = tl.min(tl.where(value > -float("inf"), value, 0.0))
    span = tl.cast(LOGIT_SPAN, tl.float32) / temperature
    return tl.maximum(least, tl.minimum(-span, NEGLIGIBLE))


@triton.jit
def suggested_limit(
    line: MaskedLine, row: RowWords, wishes: Wishes, stride: tl.tensor, temperature: tl.tensor, LEAN: tl.constexpr
) -> tuple[tl.tensor, ...]:
    """A score above which everything that the row's cut keeps lies, if a sample tells the truth; the sample's largest
    score; and the weight of all that lies below the first, relative to the second.

    What a cut by weight drops is many small weights, which a sample knows well, and a share of the whole, which it does
    not: a few scores may have most of it. So the whole is taken as what it is at least: the sample's ``CHANCE`` largest
    weights once each, the others as often as the row is larger than the sample."""
    value, peak = sampled(line, row, wishes, stride, temperature)
    weight = tl.exp(value)
    exists = (value > -float("inf")).to(tl.float32)
    size = tl.sum(exists)
    times = tl.maximum(line.size, SAMPLE_PIECES * SAMPLE_PIECE).to(tl.float32) / (SAMPLE_PIECES * SAMPLE_PIECE)
    most = integer(row, TOP_K).to(tl.float32)
    share, typical = number(row, TOP_P).to(tl.float32), number(row, TYPICAL_P).to(tl.float32)
    least = number(row, MIN_P).to(tl.float32)
    STEPS_HERE: tl.constexpr = FEW_STEPS if LEAN else STEPS
    CHANCE_STEPS: tl.constexpr = FEWER_STEPS if LEAN else STEPS
    lowest = lowest_level(value, temperature)
    if most > 0:
        part = most / times
        count = tl.maximum(part * 1.25 + 4 * tl.sqrt(part) + 8, LEAST_SAMPLED)
        limit = level(value, exists, lowest, size - count, STEPS_HERE)
    elif (share >= 1) & (least > 0):
        # The row's largest score is no smaller than the sample's.
        limit = tl.maximum(tl.log(least) - 0.001, lowest)
    else:
        dropped = tl.where(share < 1, 1 - share, 0.125 * (1 - typical))
        chance = level(value, exists, lowest, size - CHANCE, CHANCE_STEPS)
        others = tl.sum(tl.where(value < chance, weight, 0.0))
        whole = others + tl.sum(tl.where(value < chance, 0.0, weight)) / times
        limit = tl.minimum(level(value, weight, lowest, dropped * CERTAIN * whole, STEPS_HERE), chance)
    below = tl.sum(tl.where(value < limit, weight, 0.0)) * times
    known = (size >= 1_024) & (limit > lowest)
    return tl.where(known, peak + limit * temperature, -float("inf")), peak, tl.where(known, below, 0.0)
