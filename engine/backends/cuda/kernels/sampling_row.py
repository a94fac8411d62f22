"""What one row asks of its choice, and its scores: mask, biases and penalties of ``docs/sampling.md`` on a device.

Scores are computed from logits wherever they are looked at, and kept nowhere: logits are half as large as scores would
be, and rows without a wish read nothing else.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from engine.backends.common.penalties import LARGEST
from engine.backends.common.rng import MULTIPLIER_0, MULTIPLIER_1, ROUNDS, WEYL_0, WEYL_1
from engine.backends.cuda.kernels.logprobs import MaskedLine, masked
from engine.backends.cuda.kernels.triton_common import EMULATED
from engine.backends.cuda.runtime.rows import Field, number_field
from isolation.ipc.logit_bias import MAX_LOGIT_BIASES

LARGEST_SCORE = tl.constexpr(LARGEST)

LEAST_INVERSE = tl.constexpr(2.0**-126)
"""Least normal number of float32."""

PHILOX_ROUNDS = tl.constexpr(ROUNDS)
PHILOX_A = tl.constexpr(int(MULTIPLIER_0))
PHILOX_B = tl.constexpr(int(MULTIPLIER_1))
KEY_A = tl.constexpr(int(WEYL_0))
KEY_B = tl.constexpr(int(WEYL_1))

PENALTY_LINE = tl.constexpr(int(Field.PENALTY_LINE))
MASK_LINE = tl.constexpr(int(Field.MASK_LINE))
LOGPROBS = tl.constexpr(int(Field.LOGPROBS))
BIASES = tl.constexpr(int(Field.BIASES))
BIAS_ROOM = tl.constexpr(MAX_LOGIT_BIASES)
TEMPERATURE = tl.constexpr(number_field("temperature"))
TOP_K = tl.constexpr(number_field("top_k"))
TOP_P = tl.constexpr(number_field("top_p"))
MIN_P = tl.constexpr(number_field("min_p"))
TYPICAL_P = tl.constexpr(number_field("typical_p"))
REPETITION = tl.constexpr(number_field("repetition_penalty"))
PRESENCE = tl.constexpr(number_field("presence_penalty"))
FREQUENCY = tl.constexpr(number_field("frequency_penalty"))
SEED = tl.constexpr(number_field("seed"))


class RowWords(NamedTuple):
    """Words of one row; ``lines`` words lie between two fields."""

    words: Tensor
    lines: int
    row: Tensor


class Wishes(NamedTuple):
    """What changes the scores of rows, of all rows together; see ``SamplingColumns``."""

    counts: Tensor
    bias_ids: Tensor
    biases: Tensor


@triton.jit
def integer(row: RowWords, field: tl.constexpr) -> tl.tensor:
    """A row's word of a field, int64."""
    return tl.load(row.words + field * row.lines + row.row)


@triton.jit
def number(row: RowWords, field: tl.constexpr) -> tl.tensor:
    """A row's word of a field whose bits are a float64."""
    return integer(row, field).to(tl.float64, bitcast=True)


@triton.jit
def temperature_of(row: RowWords) -> tl.tensor:
    """The row's temperature in float32; 0 for the largest score."""
    return number(row, TEMPERATURE).to(tl.float32)


@triton.jit
def is_cut(row: RowWords) -> tl.tensor:
    """Whether the row draws under top-k, top-p, min-p or typical-p."""
    shares = (number(row, TOP_P) < 1) | (number(row, MIN_P) > 0) | (number(row, TYPICAL_P) < 1)
    return (temperature_of(row) > 0) & (shares | (integer(row, TOP_K) > 0))


@triton.jit
def is_changed(row: RowWords) -> tl.tensor:
    """Whether some score of the row may differ from its logit within the mask."""
    return (integer(row, BIASES) > 0) | (integer(row, PENALTY_LINE) >= 0)


@triton.jit
def uniform(seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    """A float64 in [0, 1) for int64 bits of a seed and a position: Philox4x32-10."""
    zero = (seed * 0).to(tl.uint32)
    c0, c1, c2, c3 = position.to(tl.uint32), (position >> 32).to(tl.uint32), zero, zero
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(PHILOX_ROUNDS):
        a, b = c0, c2
        c0 = tl.umulhi(b, zero + PHILOX_B) ^ c1 ^ k0
        c1 = b * (zero + PHILOX_B)
        c2 = tl.umulhi(a, zero + PHILOX_A) ^ c3 ^ k1
        c3 = a * (zero + PHILOX_A)
        k0 += zero + KEY_A
        k1 += zero + KEY_B
    bits = ((c1.to(tl.uint64) << 32) | c0.to(tl.uint64)) >> 12
    return bits.to(tl.float64) * 2.0**-52


@triton.jit
def scores_of(
    line: MaskedLine,
    row: RowWords,
    wishes: Wishes,
    token: tl.tensor,
    logits: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
) -> tuple[tl.tensor, ...]:
    """Logits within the mask of these ids, and their scores; biases count for ids from ``first`` to before ``last``."""
    raw = masked(line, token, logits)
    score = raw
    for entry in range(integer(row, BIASES).to(tl.int32)):
        own = row.row.to(tl.int64) * BIAS_ROOM + entry
        told = tl.load(wishes.bias_ids + own)
        if (told >= first) & (told < last):
            score = tl.where(token == told, score + tl.load(wishes.biases + own), score)
    place = integer(row, PENALTY_LINE)
    if place >= 0:
        factor = number(row, REPETITION).to(tl.float32)
        once = number(row, PRESENCE).to(tl.float32)
        each = number(row, FREQUENCY).to(tl.float32)
        seen = tl.load(wishes.counts + place * line.size + token, mask=token < line.size, other=0)
        changed = tl.where(score > 0, tl.div_rn(score, factor + score * 0.0), score * factor)
        changed -= each * (seen - 1).to(tl.float32) + once * (seen > 1).to(tl.float32)
        # By comparison, so that what is no number stays none.
        changed = tl.where(changed > LARGEST_SCORE, LARGEST_SCORE, changed)
        score = tl.where(seen > 0, changed, score)
    return raw, score


@triton.jit
def scale_of(temperature: tl.tensor) -> tl.tensor:
    """The temperature's reciprocal, finite and no denormal: minus infinity times zero would be no number."""
    return tl.minimum(tl.maximum(tl.div_rn(temperature * 0.0 + 1.0, temperature), LEAST_INVERSE), LARGEST_SCORE)


@triton.jit
def over_temperature(score: tl.tensor, peak: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """Scores less the largest, times the temperature's reciprocal: a division costs a dozen times as much."""
    return (score - peak) * scale_of(temperature)


@triton.jit
def _no_less(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest(x: tl.tensor) -> tl.tensor:
    """The largest of these numbers; not a number where one of them is none. One instruction a number on a GPU."""
    if EMULATED:
        peak = tl.max(tl.where(x == x, x, -float("inf")), 0)
        peak = tl.where(tl.sum((x != x).to(tl.int32), 0) > 0, float("nan"), peak)
    else:
        peak = tl.reduce(x, 0, _no_less)
    return peak
