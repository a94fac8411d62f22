"""The floor of rows that ask for top-k or for top-p alone, which most do: each score of a list is looked at twice.

A long list is shortened once, to a window around the floor, and the search has that in registers. The window's place is
an estimate: how much weight a top-p drops is known as soon as the row's whole weight is, and many small weights make it
up, so some of a list's scores, and a sample of what lies below the list, tell where their sum reaches it. Sums over the
list show then whether the floor is in the window. Where it is not, or the window is long, ``cut_row`` goes on.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from engine.backends.cuda.kernels.logprobs import MaskedLine
from engine.backends.cuda.kernels.sampling_cut import cut_row, figures_whole, list_all
from engine.backends.cuda.kernels.sampling_figures import LISTED, MORE, MORE_WEIGHT
from engine.backends.cuda.kernels.sampling_lean import (
    amounts,
    ends_of,
    key_between,
    move,
    near_scores,
    power,
    total_and_ends,
)
from engine.backends.cuda.kernels.sampling_lists import List
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
    scale_of,
)
from engine.backends.cuda.kernels.triton_common import EMULATED, LOG2_E

MARGIN = tl.constexpr(0.08)
"""Part of a dropped weight by which a window is wider than the estimate, on either side: four deviations of 128,256
normal scores under a top-p of 0.9."""

SINGLE = tl.constexpr(1.0 / 512.0)
"""Part of a dropped weight that one score may be in an estimate at the most: 512 of these are known to a 22nd."""

LOWEST = tl.constexpr(-40.0)
"""Scaled scores under which an estimate looks for nothing."""

LEAST_WEIGHT = tl.constexpr(1e-30)
"""What is less has no logarithm worth taking."""

LOOKS = tl.constexpr(5)
"""Steps of an estimate: each leaves a quarter of the distance at the best."""

QUARTERS = tl.constexpr(5)
"""Steps of a search that divide the distance by four, before those that end at a key."""


class Sketched(NamedTuple):
    """Where a row's limit, its sample's largest score and the weight below lie: so many numbers apart."""

    limit: Tensor
    lines: int


@triton.jit
def _three(a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor, e: tl.tensor, f: tl.tensor) -> tuple[tl.tensor, ...]:
    return a + d, b + e, c + f


@triton.jit
def three_sums(one: tl.tensor, other: tl.tensor, last: tl.tensor) -> tuple[tl.tensor, ...]:
    """Sums of all numbers of three, at one time."""
    if EMULATED:
        first, second, third = tl.sum(one), tl.sum(other), tl.sum(last)
    else:
        first, second, third = tl.reduce((one, other, last), None, _three)
    return first, second, third


@triton.jit
def window_of(
    list_: List,
    ends: tl.tensor,
    low: tl.tensor,
    rest: tl.tensor,
    dropped: tl.tensor,
    SPAN: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Two scaled scores between which the floor should lie: below it a list has the weight ``rest``, and its row
    ``dropped``. From the first ``PART`` scores of each stretch, each as often as the stretch has more. A score that is
    much of that by itself says nothing about others: a window that would end there has no end."""
    scale = scale_of(list_.temperature)
    value = (near_scores(list_, ends, 0, SPAN, PART, BLOCK) - list_.peak) * scale
    times = ends.to(tl.float32) / tl.minimum(tl.maximum(ends, 1), PART).to(tl.float32)
    bottom = tl.maximum(low, tl.cast(LOWEST, tl.float32))
    single = tl.log(tl.maximum(dropped, LEAST_WEIGHT) * SINGLE / tl.maximum(tl.max(times, 0), 1.0))
    ceiling = tl.minimum(tl.maximum(single, bottom), 0.0)
    weight = tl.where(value < ceiling, power(value * LOG2_E), 0.0) * times[:, None]
    least, most = rest - dropped * MARGIN, rest + dropped * MARGIN
    begin, end = bottom, ceiling
    for _ in range(LOOKS):
        quarter = (end - begin) * 0.25
        a, b, c = begin + quarter, begin + 2 * quarter, begin + 3 * quarter
        under_a, under_b, under_c = three_sums(
            tl.where(value < a, weight, 0.0), tl.where(value < b, weight, 0.0), tl.where(value < c, weight, 0.0)
        )
        next_begin = tl.where(under_c <= least, c, tl.where(under_b <= least, b, tl.where(under_a <= least, a, begin)))
        end = tl.where(under_a >= most, a, tl.where(under_b >= most, b, tl.where(under_c >= most, c, end)))
        begin = next_begin
    infinity = tl.cast(float("inf"), tl.float32)
    return tl.where(begin > bottom, begin, low), tl.where(end < ceiling, end, infinity)


@triton.jit
def narrowed(
    list_: List,
    ends: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    SPAN: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Keep of a list only scaled scores from ``low`` to below ``high``, in place. Gives how many each stretch has, and
    the weight that each has above."""
    stretch, scale = tl.arange(0, SPAN), scale_of(list_.temperature)
    count, above = tl.zeros([SPAN], tl.int32), tl.zeros([SPAN, PART], tl.float32)
    following = near_scores(list_, ends, 0, SPAN, PART, BLOCK)
    for start in range(0, list_.longest, PART):
        score = following
        following = near_scores(list_, ends, start + PART, SPAN, PART, BLOCK)
        value = (score - list_.peak) * scale
        inside = (value >= low) & (value < high) & (score > -float("inf"))
        above += tl.where(value >= high, power(value * LOG2_E), 0.0)
        target = (stretch * BLOCK + count - 1)[:, None] + tl.cumsum(inside.to(tl.int32), 1)
        count += tl.sum(inside.to(tl.int32), 1)
        # What is overwritten was read by then, by all threads: nothing moves to a higher place.
        tl.debug_barrier()
        move(list_.scores, target, score, inside, BLOCK)
    # All threads read what each has stored.
    tl.debug_barrier()
    return count, tl.sum(above, 1)


@triton.jit
def search_here(
    list_: List,
    ends: tl.tensor,
    more: tl.tensor,
    wanted: tl.tensor,
    counted: tl.tensor,
    SPAN: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Whether a list of which no stretch has more than ``WIDTH`` scores holds the greatest floor that keeps at least
    ``wanted``, that floor, which is a score, and the weight that it keeps of each stretch. ``more`` is kept above."""
    infinity = tl.cast(float("inf"), tl.float32)
    value = near_scores(list_, ends, 0, SPAN, WIDTH, BLOCK)
    value = (value - list_.peak) * scale_of(list_.temperature)
    exists = value > -infinity
    amount = tl.where(exists, amounts(value, counted), 0.0)
    part, low, high = total_and_ends(amount, tl.where(exists, value, infinity), value)
    wanted -= more
    holds = (wanted > 0) & (part.to(tl.float64) >= wanted) & (high > -infinity)
    if holds:
        begin, end = low, high
        for _ in range(QUARTERS):
            quarter = (end - begin) * 0.25
            a, b, c = begin + quarter, begin + 2 * quarter, begin + 3 * quarter
            in_a, in_b, in_c = three_sums(
                tl.where(value >= a, amount, 0.0), tl.where(value >= b, amount, 0.0), tl.where(value >= c, amount, 0.0)
            )
            by_a, by_b, by_c = (
                in_a.to(tl.float64) >= wanted,
                in_b.to(tl.float64) >= wanted,
                in_c.to(tl.float64) >= wanted,
            )
            next_begin = tl.where(by_c, c, tl.where(by_b, b, tl.where(by_a, a, begin)))
            end = tl.where(by_c, end, tl.where(by_b, c, tl.where(by_a, b, a)))
            begin = next_begin
        inner, outer = tl.where(value >= begin, value, infinity), tl.where(value < end, value, -infinity)
        _unused, low, below = total_and_ends(amount, inner, outer)
        high = tl.where(end < high, below, high)
    low = key_between(value, amount, low, high, wanted, holds)
    kept = tl.where(exists & (value >= low), power(value * LOG2_E), 0.0)
    return holds, low, tl.sum(kept, 1).to(tl.float64)


@triton.jit
def cut_by_floor(
    list_: List,
    whole: tl.tensor,
    low: tl.tensor,
    below: tl.tensor,
    most: tl.tensor,
    share: tl.tensor,
    SPAN: tl.constexpr,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """The floor of a top-k of ``most`` (1 or more) or else a top-p of ``share``, and the weight that it keeps in each
    stretch (float64).

    Gives first whether it was found. Where it was not, the longest stretch of the list and its limits follow, with
    figures that are true of it, for ``cut_row``; the list is spoilt where the longest is -1.

    Args:
        whole: weight of all of the row.
        low: lower limit of the list, scaled.
        below: weight below it, as a sample tells.
    """
    infinity = tl.cast(float("inf"), tl.float32)
    counted = most > 0
    wanted = tl.where(counted, most.to(tl.float64), share * whole)
    ends, longest, high = ends_of(list_, SPAN), list_.longest, infinity
    above, floor, found = tl.zeros([SPAN], tl.float32), -infinity, counted & (longest < 0)
    parts, spoilt = tl.zeros([SPAN], tl.float64), found
    dropped = (whole - wanted).to(tl.float32)
    if (longest > WIDTH) & (counted == 0) & (dropped > below):
        low, high = window_of(list_, ends, low, dropped - below, dropped, SPAN, WIDTH, BLOCK)
        ends, above = narrowed(list_, ends, low, high, SPAN, PART, BLOCK)
        longest = tl.max(ends, 0)
        # ``cut_row`` takes an upper limit as shown by sums. Where the window lies below the floor it is not, whatever a
        # search in it would find.
        spoilt = (longest <= WIDTH) | (tl.sum(above.to(tl.float64), 0) >= wanted)
        if spoilt == 0:
            own, exists = list_.figures + tl.arange(0, SPAN), tl.arange(0, SPAN) < list_.stretches
            tl.store(own + LISTED * list_.stretches, ends.to(tl.float32), mask=exists)
            tl.store(own + MORE_WEIGHT * list_.stretches, above, mask=exists)
            tl.debug_barrier()
    if longest <= WIDTH:
        own_list = List(list_.scores, list_.figures, list_.stretches, longest, list_.peak, list_.temperature)
        more = tl.sum(above.to(tl.float64), 0)
        holds, key, kept = search_here(own_list, ends, more, wanted, counted, SPAN, WIDTH, BLOCK)
        found = holds & ((key > low) | (low == -infinity))
        floor = tl.where(found, key, floor)
        parts = kept + above.to(tl.float64)
    return found, floor, parts, tl.where(spoilt, -1, longest), low, high


@triton.jit
def cut_of(
    list_: List,
    line: MaskedLine,
    row: RowWords,
    wishes: Wishes,
    sketched: Sketched,
    SPAN: tl.constexpr,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
    LEAN: tl.constexpr,
    FLOOR: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """As ``cut_row``, by the shorter way where a floor alone is asked for."""
    infinity = tl.cast(float("inf"), tl.float32)
    low = over_temperature(tl.load(sketched.limit), list_.peak, list_.temperature)
    high, longest = infinity, list_.longest
    floor, reach = -infinity, infinity
    parts, found = tl.zeros([SPAN], tl.float64), longest < 0
    least, centre = tl.cast(0.0, tl.float32), tl.cast(0.0, tl.float32)
    # Nothing lies above a first list, which has no upper limit.
    above, exists = list_.figures + tl.arange(0, SPAN), tl.arange(0, SPAN) < list_.stretches
    tl.store(above + MORE * list_.stretches, tl.zeros([SPAN], tl.float32), mask=exists)
    tl.store(above + MORE_WEIGHT * list_.stretches, tl.zeros([SPAN], tl.float32), mask=exists)
    tl.debug_barrier()
    if FLOOR:
        most, share = integer(row, TOP_K), number(row, TOP_P)
        single = ((most > 0) != (share < 1)) & (number(row, TYPICAL_P) >= 1) & (number(row, MIN_P) == 0)
        down = over_temperature(tl.load(sketched.limit + sketched.lines), list_.peak, list_.temperature)
        below = tl.load(sketched.limit + 2 * sketched.lines) * tl.exp(down)
        if single:
            whole, _ = figures_whole(list_, SPAN)
            found, floor, parts, longest, low, high = cut_by_floor(
                list_, tl.sum(whole, 0), low, below, most, share, SPAN, WIDTH, PART, BLOCK
            )
            if (found == 0) & (longest < 0):
                longest, low, high = list_all(list_, line, row, wishes, BLOCK), -infinity, infinity
    if found == 0:
        own = List(list_.scores, list_.figures, list_.stretches, longest, list_.peak, list_.temperature)
        floor, least, centre, reach, parts = cut_row(own, line, row, wishes, low, high, SPAN, WIDTH, PART, BLOCK, LEAN)
    return floor, least, centre, reach, parts
