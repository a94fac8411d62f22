"""The sampler's passes in few instructions: over logits of rows without masks, biases and penalties, and over lists.

They do what ``describe``, ``bracket``, ``shorten`` and ``search`` do. What a row asks for is read once, and nothing is
asked again for each score: a pass over logits is bound by instructions, and so is one over a list of thousands. Weights
are powers of two, in one instruction, and zero below ``2**-126``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.backends.cuda.kernels.logprobs import MaskedLine, logits_of
from engine.backends.cuda.kernels.sampling_figures import (
    LISTED,
    MOMENT,
    MORE,
    MORE_WEIGHT,
    PEAK,
    RAW_PEAK,
    RAW_SUM,
    SUM,
)
from engine.backends.cuda.kernels.sampling_limit import LOGIT_SPAN, NEGLIGIBLE
from engine.backends.cuda.kernels.sampling_lists import (
    BY_COUNT,
    HALVES,
    LONG,
    MOST_STEPS,
    VERY_LONG,
    List,
    figure,
    halfway,
    halved,
    more_of,
)
from engine.backends.cuda.kernels.sampling_row import (
    LARGEST_SCORE,
    LOGPROBS,
    TYPICAL_P,
    RowWords,
    integer,
    is_cut,
    largest,
    number,
    scale_of,
    temperature_of,
)
from engine.backends.cuda.kernels.triton_common import EMULATED, LOG2_E

POWER = tl.constexpr("ex2.approx.ftz.f32 $0, $1;")

LIST_IF = tl.constexpr(
    "{ .reg .pred p; .reg .b64 a; setp.ge.f32 p, $3, $4; mad.wide.u32 a, $2, 4, $1; @p st.global.f32 [a], $3;"
    " mov.b32 $0, 0; }"
)
"""A score stored at a place of a list if it is no less than a limit."""

MOVE_IF = tl.constexpr(
    "{ .reg .pred p; .reg .b64 a; setp.ne.u32 p, $4, 0; mad.wide.u32 a, $2, 4, $1; @p st.global.f32 [a], $3;"
    " mov.b32 $0, 0; }"
)
"""A score stored at a place of a list if a condition holds."""

NARROW = tl.constexpr(0.08)
"""Part of the distance between a list's limit and the largest score between whose ends a floor need not be looked for
once more before a list of some ten thousand is shortened."""

MOST_ROUNDS = tl.constexpr(3)
"""Times that a list is shortened, at the most, and never again after a time that changed nothing: equal scores."""

MOST_SHIFT = tl.constexpr(60.0)
"""Powers of two by which a stretch's largest weight may differ from the sample's: sums stay far from both ends of
float32. A weight is off by 3e-6 of itself at the most, since its exponent has fewer digits behind the point. Beyond,
weights are computed again."""

LARGEST_SCALE = tl.constexpr(2.0**126)
"""Times ``LOG2_E`` it is a float32 number still."""


@triton.jit
def power(x: tl.tensor) -> tl.tensor:
    """Two to the power of these numbers."""
    if EMULATED:
        result = tl.exp2(x)
    else:
        result = tl.inline_asm_elementwise(POWER, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return result


@triton.jit
def in_powers(scale: tl.tensor) -> tl.tensor:
    """A factor of scores whose exponential is asked for, for ``power``."""
    return tl.minimum(scale, LARGEST_SCALE) * LOG2_E


@triton.jit
def _joined(
    a: tl.tensor, low: tl.tensor, high: tl.tensor, b: tl.tensor, lower: tl.tensor, higher: tl.tensor
) -> tuple[tl.tensor, ...]:
    return a + b, tl.minimum(low, lower), tl.maximum(high, higher)


@triton.jit
def total_and_ends(amount: tl.tensor, above: tl.tensor, below: tl.tensor) -> tuple[tl.tensor, ...]:
    """The sum of the first, the least of the second, and the largest of the third, at one time."""
    if EMULATED:
        total, least, most = tl.sum(amount), tl.min(above), tl.max(below)
    else:
        total, least, most = tl.reduce((amount, above, below), None, _joined)
    return total, least, most


@triton.jit
def _joined_with_peak(
    peak: tl.tensor, a: tl.tensor, b: tl.tensor, other: tl.tensor, c: tl.tensor, d: tl.tensor
) -> tuple[tl.tensor, ...]:
    return tl.maximum(peak, other, propagate_nan=tl.PropagateNan.ALL), a + c, b + d


@triton.jit
def peak_and_totals(score: tl.tensor, weight: tl.tensor, inside: tl.tensor) -> tuple[tl.tensor, ...]:
    """The largest score, not a number where one is none, and the sums of the others, at one time."""
    if EMULATED:
        peak, whole, count = largest(score), tl.sum(weight, 0), tl.sum(inside, 0)
    else:
        peak, whole, count = tl.reduce((score, weight, inside), 0, _joined_with_peak)
    return peak, whole, count


@triton.jit
def read_plain(
    line: MaskedLine,
    row: RowWords,
    out: tl.tensor,
    stretches: tl.tensor,
    target: tl.tensor,
    limit: tl.tensor,
    stretch: tl.tensor,
    step: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Figures, and parts of the list, of every ``step``-th stretch of a row whose scores are its logits."""
    told, temperature, cut = integer(row, LOGPROBS) >= 0, temperature_of(row), is_cut(row)
    drawn, typical = temperature > 0, number(row, TYPICAL_P) < 1
    scale = scale_of(tl.where(drawn, temperature, 1.0))
    unit = in_powers(scale)
    # No number and minus infinity are in no list.
    low = tl.maximum(tl.load(limit, mask=cut, other=float("inf")), -LARGEST_SCORE)
    reference = tl.load(limit + tl.num_programs(0), mask=cut, other=0.0)
    place = tl.arange(0, BLOCK)
    following = logits_of(line, stretch * BLOCK + place)
    for here in range(stretch, stretches, step):
        # The next stretch is on its way while this one is looked at.
        raw = following.to(tl.float32)
        following = logits_of(line, (here + step) * BLOCK + place)
        own = out + here
        if cut:
            # Weights are relative to the sample's largest score first, so that nothing waits for the stretch's own.
            inside = raw >= low
            peak, whole, count = peak_and_totals(raw, power((raw - reference) * unit), inside.to(tl.int32))
            shift = (peak - reference) * unit
            if (shift <= MOST_SHIFT) & (shift >= -MOST_SHIFT):
                whole *= power(-shift)
            else:
                whole = tl.sum(power((raw - tl.where(peak > -float("inf"), peak, 0.0)) * unit), 0)
            tl.store(own + SUM * stretches, whole)
            tl.store(own + LISTED * stretches, count.to(tl.float32))
            if typical:
                down = raw - tl.where(peak > -float("inf"), peak, 0.0)
                moment = tl.where(power(down * unit) > 0, power(down * unit) * (down * scale), 0.0)
                tl.store(own + MOMENT * stretches, tl.sum(moment, 0))
            _store_inside(target + here * BLOCK, raw, inside, low)
        else:
            peak = largest(raw)
        tl.store(own + RAW_PEAK * stretches, peak)
        tl.store(own + PEAK * stretches, peak)
        # A stretch may have no score.
        down = raw - tl.where(peak > -float("inf"), peak, 0.0)
        if told:
            tl.store(own + RAW_SUM * stretches, tl.sum(power(down * LOG2_E), 0))
        if drawn & (cut == 0):
            tl.store(own + SUM * stretches, tl.sum(power(down * unit), 0))


@triton.jit
def _store_inside(target: tl.tensor, score: tl.tensor, inside: tl.tensor, low: tl.tensor) -> None:
    """The scores that are inside, no less than ``low``, close together; nothing in this launch reads them."""
    place = tl.cumsum(inside.to(tl.int32), 0)
    if EMULATED:
        tl.store(target + place - 1, score, mask=inside)
    else:
        tl.inline_asm_elementwise(
            LIST_IF, "=r,l,r,f,f", [(target - 1).to(tl.int64), place, score, low], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def ends_of(list_: List, SPAN: tl.constexpr) -> tl.tensor:
    """How many scores each stretch has in the list."""
    return figure(list_, LISTED, SPAN).to(tl.int32)


@triton.jit
def near_scores(
    list_: List, ends: tl.tensor, start: tl.tensor, SPAN: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """Scores of all stretches, in each from place ``start`` on; minus infinity behind the last. Memory behind a list is
    read, several numbers at once, and not looked at; of stretches that do not exist the last one's."""
    stretch, place = tl.minimum(tl.arange(0, SPAN), list_.stretches - 1), start + tl.arange(0, PART)
    last = (list_.longest + PART - 1) // PART * PART
    near = tl.load(list_.scores + stretch[:, None] * BLOCK + place[None, :], mask=(place < last)[None, :], other=0.0)
    return tl.where(place[None, :] < ends[:, None], near, -float("inf"))


@triton.jit
def amounts(value: tl.tensor, counted: tl.tensor) -> tl.tensor:
    """What scaled scores add up to: their number, or their weights."""
    return tl.where(counted, 1.0, power(value * LOG2_E))


@triton.jit
def bracket_lean(
    list_: List,
    floor: tl.tensor,
    stage: tl.tensor,
    wanted: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    SPAN: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """As ``bracket``, for a cut that is a floor, and a list that may have an upper limit: one look as a rule, since the
    floor is close above a list's first limit."""
    more, ends, counted = more_of(list_, stage, SPAN), ends_of(list_, SPAN), stage == BY_COUNT
    scale = scale_of(list_.temperature)
    begin, end = low, high
    span = tl.where(counted, tl.cast(LOGIT_SPAN, tl.float32) / list_.temperature, -NEGLIGIBLE)
    bottom, top = tl.where(low > -float("inf"), low, -span), low * 0.0
    top = tl.minimum(tl.where(top == top, top, 0.0), high)
    number = tl.sum(ends, 0)
    narrow, looks = (top - bottom) * NARROW, tl.cast(0, tl.int32)
    most = 1 + (number > LONG).to(tl.int32) + (number > VERY_LONG).to(tl.int32)
    while (looks == 0) | ((looks < most) & ((top - bottom > narrow) | (looks + 1 < most))):
        looks += 1
        width = top - bottom
        first = (looks == 1) & (high == float("inf"))
        # What is below the floor of a stage before this one adds nothing.
        a = tl.maximum(bottom + tl.where(first, 0.05, 0.17) * width, floor)
        b = tl.maximum(bottom + tl.where(first, 0.10, 0.33) * width, floor)
        c = tl.maximum(bottom + tl.where(first, 0.15, 0.50) * width, floor)
        d = tl.maximum(bottom + tl.where(first, 0.21, 0.67) * width, floor)
        e = tl.maximum(bottom + tl.where(first, 0.40, 0.83) * width, floor)
        in_a, in_b = tl.zeros([SPAN, PART], tl.float32), tl.zeros([SPAN, PART], tl.float32)
        in_c, in_d, in_e = in_a, in_a, in_a
        following = near_scores(list_, ends, 0, SPAN, PART, BLOCK)
        for start in range(0, list_.longest, PART):
            value = (following - list_.peak) * scale
            following = near_scores(list_, ends, start + PART, SPAN, PART, BLOCK)
            amount = amounts(value, counted)
            in_a += tl.where(value >= a, amount, 0.0)
            in_b += tl.where(value >= b, amount, 0.0)
            in_c += tl.where(value >= c, amount, 0.0)
            in_d += tl.where(value >= d, amount, 0.0)
            in_e += tl.where(value >= e, amount, 0.0)
        begin, end, bottom, top = halved(begin, end, bottom, top, a, more + tl.sum(in_a).to(tl.float64) >= wanted)
        begin, end, bottom, top = halved(begin, end, bottom, top, b, more + tl.sum(in_b).to(tl.float64) >= wanted)
        begin, end, bottom, top = halved(begin, end, bottom, top, c, more + tl.sum(in_c).to(tl.float64) >= wanted)
        begin, end, bottom, top = halved(begin, end, bottom, top, d, more + tl.sum(in_d).to(tl.float64) >= wanted)
        begin, end, bottom, top = halved(begin, end, bottom, top, e, more + tl.sum(in_e).to(tl.float64) >= wanted)
    return begin, end


@triton.jit
def move(lines: tl.tensor, target: tl.tensor, score: tl.tensor, inside: tl.tensor, BLOCK: tl.constexpr) -> None:
    """Store what is inside at these places from ``lines`` on: each thread what it has."""
    if EMULATED:
        tl.store(lines + target, score, mask=inside)
    else:
        tl.inline_asm_elementwise(
            MOVE_IF,
            "=r,l,r,f,r",
            [lines.to(tl.int64), target, score, inside.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def shorten_lean(
    list_: List, low: tl.tensor, high: tl.tensor, SPAN: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """As ``shorten``."""
    stretch, ends = tl.arange(0, SPAN), ends_of(list_, SPAN)
    scale = scale_of(list_.temperature)
    count = tl.zeros([SPAN], tl.int32)
    higher, weight = tl.zeros([SPAN, PART], tl.float32), tl.zeros([SPAN, PART], tl.float32)
    following = near_scores(list_, ends, 0, SPAN, PART, BLOCK)
    for start in range(0, list_.longest, PART):
        score = following
        following = near_scores(list_, ends, start + PART, SPAN, PART, BLOCK)
        value = (score - list_.peak) * scale
        inside = (value >= low) & (value < high) & (score > -float("inf"))
        higher += tl.where(value >= high, 1.0, 0.0)
        weight += tl.where(value >= high, power(value * LOG2_E), 0.0)
        before = tl.cumsum(inside.to(tl.int32), 1)
        target = (stretch * BLOCK + count - 1)[:, None] + before
        count += tl.sum(inside.to(tl.int32), 1)
        # What is overwritten was read by then, by all threads: nothing moves to a higher place.
        tl.debug_barrier()
        move(list_.scores, target, score, inside, BLOCK)
    own, exists = list_.figures + stretch, stretch < list_.stretches
    above = figure(list_, MORE, SPAN) + tl.sum(higher, 1)
    weight_above = figure(list_, MORE_WEIGHT, SPAN) + tl.sum(weight, 1)
    tl.debug_barrier()
    tl.store(own + LISTED * list_.stretches, count.to(tl.float32), mask=exists)
    tl.store(own + MORE * list_.stretches, above, mask=exists)
    tl.store(own + MORE_WEIGHT * list_.stretches, weight_above, mask=exists)
    tl.debug_barrier()
    return tl.max(count, 0)


@triton.jit
def key_between(
    value: tl.tensor, amount: tl.tensor, low: tl.tensor, high: tl.tensor, wanted: tl.tensor, holds: tl.tensor
) -> tl.tensor:
    """The greatest of some scores that keeps at least ``wanted``, from ``low`` to ``high``, which are scores: below the
    first none is of use, above the second none suffices. ``low`` where ``holds`` is false."""
    infinity = tl.cast(float("inf"), tl.float32)
    step = tl.cast(0, tl.int32)
    while holds & (low < high) & (step < MOST_STEPS):
        step += 1
        middle = halfway(low, high)
        over = value >= middle
        inner, outer = tl.where(over, value, infinity), tl.where(over, -infinity, value)
        part, above, below = total_and_ends(tl.where(over, amount, 0.0), inner, outer)
        enough = part.to(tl.float64) >= wanted
        low, high = tl.where(enough, above, low), tl.where(enough, high, below)
    return low


@triton.jit
def search_lean(
    list_: List,
    floor: tl.tensor,
    stage: tl.tensor,
    wanted: tl.tensor,
    known: tl.tensor,
    SPAN: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """As ``search``, for a cut that is a floor and a list of which no stretch has more than ``WIDTH`` scores."""
    more, ends = more_of(list_, stage, SPAN), ends_of(list_, SPAN)
    score = near_scores(list_, ends, 0, SPAN, WIDTH, BLOCK)
    value = (score - list_.peak) * scale_of(list_.temperature)
    amount = amounts(value, stage == BY_COUNT)
    infinity = tl.cast(float("inf"), tl.float32)
    exists = (value > -infinity) & (value >= floor)
    amount, value = tl.where(exists, amount, 0.0), tl.where(exists, value, -infinity)
    part, low, high = total_and_ends(amount, tl.where(exists, value, infinity), value)
    wanted -= more
    holds = (known | ((wanted > 0) & (part.to(tl.float64) >= wanted))) & (high > -infinity)
    if holds:
        begin, end = low, high
        for _ in range(HALVES):
            middle = (begin + end) * 0.5
            enough = tl.sum(tl.where(value >= middle, amount, 0.0)).to(tl.float64) >= wanted
            begin, end = tl.where(enough, middle, begin), tl.where(enough, end, middle)
        inner, outer = tl.where(value >= begin, value, infinity), tl.where(value < end, value, -infinity)
        _unused, low, below = total_and_ends(amount, inner, outer)
        high = tl.where(end < high, below, high)
    return holds, key_between(value, amount, low, high, wanted, holds)
