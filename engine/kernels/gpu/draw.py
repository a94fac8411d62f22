"""Device functions of the sampler: the counter generator, the cut of a distribution, and its inversion.

``uniform`` gives the same bits as ``engine.rng`` for a seed and a position. A cut (top-k, top-p) is a least score; it
is found bit by bit in an order-preserving map of float32 to whole numbers, so that ties are kept or dropped together
as on the CPU, and no row is sorted.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.rng import MULTIPLIER_0, MULTIPLIER_1, ROUNDS, WEYL_0, WEYL_1

PHILOX_ROUNDS = tl.constexpr(ROUNDS)
PHILOX_A = tl.constexpr(int(MULTIPLIER_0))
PHILOX_B = tl.constexpr(int(MULTIPLIER_1))
KEY_A = tl.constexpr(int(WEYL_0))
KEY_B = tl.constexpr(int(WEYL_1))

JUST_BELOW_ONE = tl.constexpr(1 - 2.0**-52)
"""Keeps a point below a sum that was rounded."""

NO_TOKEN = tl.constexpr(0x7FFFFFFF)
"""Larger than any id."""


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
def ordered(x: tl.tensor) -> tl.tensor:
    """Whole numbers (uint32) in the order of float32 numbers; both zeros are one."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)
    return tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def scaled(
    scores: tl.tensor, start: tl.tensor, size: tl.tensor, peak: tl.tensor, heat: tl.tensor, BLOCK: tl.constexpr
) -> tl.tensor:
    """Scores from ``start`` on, less the largest, divided by the temperature; minus infinity behind the last."""
    token = start + tl.arange(0, BLOCK)
    score = tl.load(scores + token, mask=token < size, other=-float("inf"))
    return tl.div_rn(score - peak, heat)


@triton.jit
def mass_above(
    scores: tl.tensor,
    size: tl.tensor,
    peak: tl.tensor,
    heat: tl.tensor,
    floor: tl.tensor,
    COUNTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The unnormalised probability, or the number, of scores that ``floor`` (as ``ordered``) keeps; float64."""
    mass = tl.cast(0.0, tl.float64)
    for start in range(0, size, BLOCK):
        value = scaled(scores, start, size, peak, heat, BLOCK)
        kept = (ordered(value) >= floor) & (start + tl.arange(0, BLOCK) < size)
        one = tl.exp(value)
        if COUNTS:
            one = one * 0.0 + 1.0
        mass += tl.sum(tl.where(kept, one, 0.0), 0).to(tl.float64)
    return mass


@triton.jit
def greatest_floor(
    scores: tl.tensor,
    size: tl.tensor,
    peak: tl.tensor,
    heat: tl.tensor,
    least: tl.tensor,
    wanted: tl.tensor,
    COUNTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The greatest floor, not below ``least``, that keeps at least ``wanted``. What a floor keeps falls as it rises,
    roundings included: a sum of fewer numbers in the same order is never larger."""
    floor = least * 0
    for place in range(32):
        higher = floor | (tl.cast(0x80000000, tl.uint32) >> place)
        enough = mass_above(scores, size, peak, heat, tl.maximum(higher, least), COUNTS, BLOCK) >= wanted
        floor = tl.where(enough, higher, floor)
    return tl.maximum(floor, least)


@triton.jit
def kept_weights(
    scores: tl.tensor,
    start: tl.tensor,
    size: tl.tensor,
    peak: tl.tensor,
    heat: tl.tensor,
    floor: tl.tensor,
    least: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Unnormalised probabilities from ``start`` on, zeros for what is not kept."""
    value = scaled(scores, start, size, peak, heat, BLOCK)
    kept = (ordered(value) >= floor) & (value >= least) & (start + tl.arange(0, BLOCK) < size)
    return tl.where(kept, tl.exp(value), 0.0)


@triton.jit
def invert(
    scores: tl.tensor,
    size: tl.tensor,
    peak: tl.tensor,
    heat: tl.tensor,
    floor: tl.tensor,
    least: tl.tensor,
    point: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The first id at which the cumulative distribution of what is kept exceeds ``point``; two levels of sums."""
    whole = tl.cast(0.0, tl.float64)
    for start in range(0, size, BLOCK):
        whole += tl.sum(kept_weights(scores, start, size, peak, heat, floor, least, BLOCK), 0).to(tl.float64)
    target = point * whole
    total = tl.cast(0.0, tl.float64)
    before = tl.cast(0.0, tl.float64)
    begin = tl.cast(0, tl.int32)
    for start in range(0, size, BLOCK):
        total += tl.sum(kept_weights(scores, start, size, peak, heat, floor, least, BLOCK), 0).to(tl.float64)
        passed = total <= target
        begin = tl.where(passed, start + BLOCK, begin)
        before = tl.where(passed, total, before)
    weight = kept_weights(scores, begin, size, peak, heat, floor, least, BLOCK).to(tl.float64)
    inner = tl.cumsum(weight, 0)
    rest = tl.minimum(target - before, tl.max(inner, 0) * JUST_BELOW_ONE)
    # An id without weight is never the first whose sum exceeds a point.
    return begin + tl.sum((inner <= rest).to(tl.int32), 0)


@triton.jit
def _uniforms(seeds: tl.tensor, positions: tl.tensor, out: tl.tensor) -> None:
    place = tl.program_id(0)
    tl.store(out + place, uniform(tl.load(seeds + place), tl.load(positions + place)))


def uniforms(seeds: Tensor, positions: Tensor, out: Tensor) -> None:
    """What rows draw, for a look from outside: seeds (bits) and positions int64, ``out`` float64, all ``(N,)``."""
    if len(out):
        _uniforms[(len(out),)](seeds, positions, out)
