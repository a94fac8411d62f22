"""Which scores top-k, top-p, min-p and typical-p keep, by looking at few of a row's scores more than once.

A *list* of a row has its scores within two limits, each stretch's at the beginning of the stretch's place, in the order
of ids; beside it are number and weight of what lies above the upper limit. A cut is searched for in the list: its
floor is the same for any list that holds it, because it is exact or the list is told to be too short. Then the next
list is made. The first has limits that a sample of the row suggested (``suggested_limit``), before its largest score
was known; the second has those that a sample suggests for many kept ids (``around``); the third has everything.

Sums are taken in float32 within a stretch and in float64 over stretches, in one order.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from engine.backends.cuda.kernels.logprobs import MaskedLine, logits_of
from engine.backends.cuda.kernels.sampling_figures import LISTED, MOMENT, MORE, MORE_WEIGHT, PEAK, SUM
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

BY_COUNT = tl.constexpr(0)
BY_WEIGHT = tl.constexpr(1)
BY_DISTANCE = tl.constexpr(2)
"""Stages of a cut: top-k, top-p, typical-p."""

NEGLIGIBLE = tl.constexpr(-28.0)
"""A score so far below the largest, after the temperature, has less than 1e-12 of its weight."""

LOGIT_SPAN = tl.constexpr(40.0)
"""Scores so far below a sample's largest are of no use in a list."""

LEAST_SAMPLED = tl.constexpr(256.0)
"""Ids of a sample, at the least, above a limit: one likely id that a sample met by chance says little about a row, and
so few in a list cost nothing."""

SAMPLE_PIECES = tl.constexpr(64)
SAMPLE_PIECE = tl.constexpr(128)
"""A sample of a row: so many pieces of so many ids, evenly spread."""

MOST_STEPS = tl.constexpr(40)
"""Steps of a search: 32 suffice; a bound, so that no rounding makes one endless."""


class Cut(NamedTuple):
    """Which scaled scores are kept."""

    floor: Tensor
    """Scores not below this."""
    least: Tensor
    """Weights not below this."""
    centre: Tensor
    reach: Tensor
    """Scores no further than this from ``centre``."""


class List(NamedTuple):
    """The list of one row, and what its scores are compared with."""

    scores: Tensor
    figures: Tensor
    stretches: int
    longest: Tensor
    """Scores of the stretch that has most in the list."""
    peak: Tensor
    temperature: Tensor


@triton.jit
def ordered(x: tl.tensor) -> tl.tensor:
    """Whole numbers (uint32) in the order of float32 numbers; both zeros are one."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)
    return tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def halfway(low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """The float32 number in the middle of all that lie above ``low`` and not above ``high``."""
    begin = ordered(low)
    place = begin + (ordered(high) - begin + 1) // 2
    return tl.where(place >= 0x80000000, place ^ 0x80000000, place ^ 0xFFFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def weights_of(value: tl.tensor, exists: tl.tensor, cut: Cut) -> tl.tensor:
    """Unnormalised probabilities of scaled scores, zeros for what the cut drops."""
    weight = tl.exp(value)
    kept = (value >= cut.floor) & (weight >= cut.least) & (tl.abs(value - cut.centre) <= cut.reach)
    return tl.where(exists & kept, weight, 0.0)


@triton.jit
def figure(list_: List, column: tl.constexpr, SPAN: tl.constexpr) -> tl.tensor:
    """A figure of all stretches; 0 behind them."""
    stretch = tl.arange(0, SPAN)
    return tl.load(list_.figures + column * list_.stretches + stretch, mask=stretch < list_.stretches, other=0.0)


@triton.jit
def listed(list_: List, start: tl.tensor, SPAN: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """Scaled scores of all stretches in the list, in each from place ``start`` on; minus infinity behind the last."""
    stretch = tl.arange(0, SPAN)
    place = start + tl.arange(0, WIDTH)
    exists = place[None, :] < figure(list_, LISTED, SPAN).to(tl.int32)[:, None]
    score = tl.load(list_.scores + stretch[:, None] * BLOCK + place[None, :], mask=exists, other=-float("inf"))
    return over_temperature(score, list_.peak, list_.temperature)


@triton.jit
def keyed(value: tl.tensor, cut: Cut, stage: tl.tensor) -> tuple[tl.tensor, ...]:
    """What a stage searches by (larger is kept rather), and what it adds up; of what the cut drops, nothing."""
    weight = weights_of(value, value > -float("inf"), cut)
    exists = (value > -float("inf")) & (value >= cut.floor)
    key = tl.where(stage == BY_DISTANCE, -tl.abs(value - cut.centre), value)
    key = tl.where(exists & ((stage != BY_DISTANCE) | (weight > 0)), key, -float("inf"))
    return key, tl.where((stage == BY_COUNT) & exists, 1.0, weight)


@triton.jit
def kept_in_list(
    list_: List, cut: Cut, SPAN: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
) -> tuple[tl.tensor, ...]:
    """Weight, and sum of weights times scaled scores, of what the cut keeps of the list, by stretch; float64. What lies
    above the list is kept and is in the weight."""
    part = tl.zeros([SPAN], tl.float32)
    moment = tl.zeros([SPAN], tl.float32)
    for start in range(0, list_.longest, WIDTH):
        value = listed(list_, start, SPAN, WIDTH, BLOCK)
        weight = weights_of(value, value > -float("inf"), cut)
        part += tl.sum(weight, 1)
        moment += tl.sum(weight * tl.where(weight > 0, value, 0.0), 1)
    return part.to(tl.float64) + figure(list_, MORE_WEIGHT, SPAN).to(tl.float64), moment.to(tl.float64)


@triton.jit
def search(
    list_: List,
    cut: Cut,
    stage: tl.tensor,
    wanted: tl.tensor,
    SPAN: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Whether the list holds the greatest floor that keeps at least ``wanted``, and that floor, which is a key. What a
    floor keeps falls as it rises, roundings included: a sum of fewer numbers in the same order is never larger."""
    more = figure(list_, MORE_WEIGHT, SPAN).to(tl.float64)
    more = tl.sum(tl.where(stage == BY_COUNT, figure(list_, MORE, SPAN).to(tl.float64), more), 0)
    value = listed(list_, 0, SPAN, WIDTH, BLOCK)
    key, amount = keyed(value, cut, stage)
    part = tl.sum(amount, 1)
    low = tl.min(tl.min(tl.where(key > -float("inf"), key, float("inf")), 1), 0)
    high = tl.max(tl.max(key, 1), 0)
    for start in range(WIDTH, list_.longest, WIDTH):
        further, further_amount = keyed(listed(list_, start, SPAN, WIDTH, BLOCK), cut, stage)
        part += tl.sum(further_amount, 1)
        low = tl.minimum(low, tl.min(tl.min(tl.where(further > -float("inf"), further, float("inf")), 1), 0))
        high = tl.maximum(high, tl.max(tl.max(further, 1), 0))
    holds = (more < wanted) & (more + tl.sum(part.to(tl.float64), 0) >= wanted) & (high > -float("inf"))
    # Below ``low`` no floor is of use and above ``high`` none suffices; both are keys.
    step = tl.cast(0, tl.int32)
    while holds & (low < high) & (step < MOST_STEPS):
        step += 1
        middle = halfway(low, high)
        part = tl.sum(tl.where(key >= middle, amount, 0.0), 1)
        above = tl.min(tl.where(key >= middle, key, float("inf")), 1)
        below = tl.max(tl.where(key < middle, key, -float("inf")), 1)
        for start in range(WIDTH, list_.longest, WIDTH):
            further, further_amount = keyed(listed(list_, start, SPAN, WIDTH, BLOCK), cut, stage)
            part += tl.sum(tl.where(further >= middle, further_amount, 0.0), 1)
            above = tl.minimum(above, tl.min(tl.where(further >= middle, further, float("inf")), 1))
            below = tl.maximum(below, tl.max(tl.where(further < middle, further, -float("inf")), 1))
        enough = more + tl.sum(part.to(tl.float64), 0) >= wanted
        low = tl.where(enough, tl.min(above, 0), low)
        high = tl.where(enough, high, tl.max(below, 0))
    return holds, low


@triton.jit
def make_list(
    list_: List, line: MaskedLine, row: RowWords, wishes: Wishes, low: tl.tensor, high: tl.tensor, BLOCK: tl.constexpr
) -> tl.tensor:
    """List the row's scores from ``low`` to below ``high``, in one pass; gives the longest stretch of the list."""
    longest = tl.cast(0, tl.int32)
    place = tl.arange(0, BLOCK)
    # The list before is read to its end.
    tl.debug_barrier()
    for stretch in range(list_.stretches):
        first = stretch * BLOCK
        token = first + place
        _, score = scores_of(line, row, wishes, token, logits_of(line, token), first, first + BLOCK)
        weight = tl.exp(over_temperature(score, list_.peak, list_.temperature))
        higher = score >= high
        count = list_part(list_.scores + first, score, low, high)
        longest = tl.maximum(longest, count)
        own = list_.figures + stretch
        tl.store(own + LISTED * list_.stretches, count.to(tl.float32))
        tl.store(own + MORE * list_.stretches, tl.sum(higher.to(tl.float32), 0))
        tl.store(own + MORE_WEIGHT * list_.stretches, tl.sum(tl.where(higher, weight, 0.0), 0))
    # All threads read what each has stored.
    tl.debug_barrier()
    return longest


@triton.jit
def list_part(target: tl.tensor, score: tl.tensor, low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """Store the scores from ``low`` to below ``high``, close together; gives their number."""
    inside = (score >= low) & (score < high) & (score > -float("inf"))
    place = tl.cumsum(inside.to(tl.int32), 0) - 1
    tl.store(target + place, score, mask=inside)
    return tl.sum(inside.to(tl.int32), 0)


@triton.jit
def sampled(
    line: MaskedLine, row: RowWords, wishes: Wishes, stride: tl.tensor, temperature: tl.tensor
) -> tuple[tl.tensor, ...]:
    """Scaled scores of a sample, less the largest of them, which is given too."""
    place = tl.arange(0, SAMPLE_PIECE)
    token = (tl.arange(0, SAMPLE_PIECES) * stride)[:, None] + place[None, :]
    _, score = scores_of(line, row, wishes, token, logits_of(line, token), 0, line.size)
    peak = tl.max(tl.max(score, 1), 0)
    # A sample without a score: whatever comes of it, the row has few.
    peak = tl.where(peak > -float("inf"), peak, 0.0)
    return over_temperature(score, peak, temperature), peak


@triton.jit
def level(
    value: tl.tensor,
    weight: tl.tensor,
    lowest: tl.tensor,
    mass: tl.tensor,
    count: tl.tensor,
    most: tl.tensor,
    STEPS: tl.constexpr,
) -> tl.tensor:
    """About the greatest level above which a sample has ``mass`` and ``count``, or else ``most``; of scaled scores, and
    ``lowest`` where there is none."""
    low, high = lowest, lowest * 0.0
    for _ in range(STEPS):
        middle = (low + high) * 0.5
        above = value >= middle
        number_above = tl.sum(tl.sum(above.to(tl.float32), 1), 0)
        mass_above = tl.sum(tl.sum(tl.where(above, weight, 0.0), 1), 0)
        enough = ((mass_above >= mass) & (number_above >= count)) | (number_above >= most)
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low


@triton.jit
def lowest_level(value: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """The least scaled score of a sample that a level is looked for at."""
    least = tl.min(tl.min(tl.where(value > -float("inf"), value, 0.0), 1), 0)
    span = tl.cast(LOGIT_SPAN, tl.float32) / temperature
    return tl.maximum(least, tl.minimum(-span, NEGLIGIBLE))


@triton.jit
def suggested_limit(
    line: MaskedLine, row: RowWords, wishes: Wishes, stride: tl.tensor, temperature: tl.tensor
) -> tl.tensor:
    """A score above which everything that the row's cut keeps lies, if a sample tells the truth and that is at most
    some eighth of the row."""
    value, peak = sampled(line, row, wishes, stride, temperature)
    weight = tl.exp(value)
    size = tl.sum(tl.sum((value > -float("inf")).to(tl.float32), 1), 0)
    whole = tl.sum(tl.sum(weight, 1), 0)
    most = integer(row, TOP_K).to(tl.float32)
    share, typical = number(row, TOP_P).to(tl.float32), number(row, TYPICAL_P).to(tl.float32)
    least = number(row, MIN_P).to(tl.float32)
    mass, count = whole * 0.0, tl.cast(LEAST_SAMPLED, tl.float32)
    only_least = (most == 0) & (share >= 1) & (least > 0)
    if most > 0:
        part = most * (SAMPLE_PIECES * SAMPLE_PIECE) / tl.maximum(line.size, SAMPLE_PIECES * SAMPLE_PIECE)
        count = tl.maximum(part * 1.25 + 4 * tl.sqrt(part) + 8, LEAST_SAMPLED)
    elif share < 1:
        mass = whole * (0.75 * share + 0.25)
    elif only_least:
        count = tl.cast(float("inf"), tl.float32)
    else:
        mass = whole * (0.125 * typical + 0.875)
    lowest = lowest_level(value, temperature)
    limit = level(value, weight, lowest, mass, count, tl.maximum(size / 8, LEAST_SAMPLED), 10)
    if only_least:
        # The row's largest score is no smaller than the sample's.
        limit = tl.maximum(tl.log(least) - 0.001, limit)
    return tl.where((size < 1_024) | (limit <= lowest), -float("inf"), peak + limit * temperature)


@triton.jit
def around(
    line: MaskedLine,
    row: RowWords,
    wishes: Wishes,
    stage: tl.tensor,
    share: tl.tensor,
    stride: tl.tensor,
    temperature: tl.tensor,
) -> tuple[tl.tensor, ...]:
    """Two scores between which the floor of a cut lies that keeps many ids, if a sample tells the truth: six of its
    standard errors to each side. ``share``: how many ids, or which share of the weight."""
    value, peak = sampled(line, row, wishes, stride, temperature)
    exists = value > -float("inf")
    weight = tl.where(stage == BY_COUNT, exists.to(tl.float32), tl.exp(value))
    whole = tl.sum(tl.sum(weight, 1), 0)
    if stage == BY_COUNT:
        ids = tl.maximum(line.size, SAMPLE_PIECES * SAMPLE_PIECE) / (SAMPLE_PIECES * SAMPLE_PIECE) * whole
        share = tl.minimum(share / ids, 1.0)
    evenness = whole * whole / tl.maximum(tl.sum(tl.sum(weight * weight, 1), 0), 1e-30)
    error = 6 * tl.sqrt(share * (1 - share) / tl.maximum(evenness, 1.0)) + 1e-3
    never = tl.cast(float("inf"), tl.float32)
    one = tl.cast(1.0, tl.float32)
    lowest = tl.where(stage == BY_COUNT, lowest_level(value, temperature), NEGLIGIBLE)
    low = level(value, weight, lowest, whole * tl.minimum(share + error, 1.0), one, never, 14)
    high = level(value, weight, lowest, whole * tl.maximum(share - error, 0.0), one, never, 14)
    low = tl.where((share + error >= 1) | (low <= lowest), -float("inf"), peak + low * temperature)
    return low, tl.where(share <= error, float("inf"), peak + high * temperature)


@triton.jit
def figures_whole(list_: List, SPAN: tl.constexpr) -> tuple[tl.tensor, ...]:
    """Weight, and sum of weights times scaled scores, of all scores, by stretch; float64."""
    down = over_temperature(figure(list_, PEAK, SPAN), list_.peak, list_.temperature)
    scale = tl.where(tl.arange(0, SPAN) < list_.stretches, tl.exp(down), 0.0)
    down = tl.where(scale > 0, down, 0.0).to(tl.float64)
    part = figure(list_, SUM, SPAN).to(tl.float64)
    moment = figure(list_, MOMENT, SPAN).to(tl.float64) + part * down
    return part * scale.to(tl.float64), moment * scale.to(tl.float64)


@triton.jit
def is_exact(cut: Cut, low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """Whether what the cut keeps is what it keeps of a list with these limits, and all that lies above the list."""
    below = (low == -float("inf")) | (cut.floor > low) | (cut.least > tl.exp(low)) | (cut.centre - low > cut.reach)
    above = (high == float("inf")) | ((cut.least <= tl.exp(low)) & (cut.reach == float("inf")))
    return below & above


@triton.jit
def next_list(
    list_: List,
    line: MaskedLine,
    row: RowWords,
    wishes: Wishes,
    stage: tl.tensor,
    wanted: tl.tensor,
    near: tl.tensor,
    stride: tl.tensor,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Another list, in place of one that was too short: of scores near the floor that is sought, or of all. Gives its
    longest stretch, and its limits as scaled scores."""
    begin, end = tl.cast(-float("inf"), tl.float32), tl.cast(float("inf"), tl.float32)
    if near:
        every, _moments = figures_whole(list_, SPAN)
        part = tl.where(stage == BY_COUNT, wanted, wanted / tl.sum(every, 0)).to(tl.float32)
        begin, end = around(line, row, wishes, stage, part, stride, list_.temperature)
    longest = make_list(list_, line, row, wishes, begin, end, BLOCK)
    low = over_temperature(begin, list_.peak, list_.temperature)
    return longest, low, over_temperature(end, list_.peak, list_.temperature)


@triton.jit
def cut_row(
    list_: List,
    line: MaskedLine,
    row: RowWords,
    wishes: Wishes,
    low: tl.tensor,
    stride: tl.tensor,
    SPAN: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """The row's cut, and the weight that it keeps in each stretch (float64). ``low``: lower limit of the list, scaled.

    The last stage searches for nothing, and makes a list that all that is kept can be added up by."""
    infinity = tl.cast(float("inf"), tl.float32)
    floor, reach, high = -infinity, infinity, infinity
    least, centre = tl.cast(0.0, tl.float32), tl.cast(0.0, tl.float32)
    longest, wanted = list_.longest, tl.cast(0.0, tl.float64)
    parts = tl.zeros([SPAN], tl.float64)
    most, share, typical = integer(row, TOP_K).to(tl.float64), number(row, TOP_P), number(row, TYPICAL_P)
    for turn in range(4):
        stage = longest * 0 + turn
        active = ((stage == BY_COUNT) & (most > 0)) | ((stage == BY_WEIGHT) & (share < 1)) | (stage == 3)
        done = (active | ((stage == BY_DISTANCE) & (typical < 1))) == 0
        if stage == BY_DISTANCE:
            least = number(row, MIN_P).to(tl.float32)
        for attempt in range(3):
            if done == 0:
                if attempt > 0:
                    near = (attempt == 1) & (stage < BY_DISTANCE)
                    longest, low, high = next_list(list_, line, row, wishes, stage, wanted, near, stride, SPAN, BLOCK)
                own = List(list_.scores, list_.figures, list_.stretches, longest, list_.peak, list_.temperature)
                cut = Cut(floor, least, centre, reach)
                exact = is_exact(cut, low, high)
                kept, moments = figures_whole(own, SPAN)
                if exact & (stage > BY_COUNT):
                    kept, moments = kept_in_list(own, cut, SPAN, WIDTH, BLOCK)
                if stage == 3:
                    parts, done = kept, exact
                else:
                    if stage == BY_COUNT:
                        wanted = most
                    elif stage == BY_DISTANCE:
                        wanted = typical * tl.sum(kept, 0)
                        centre = (tl.sum(moments, 0) / tl.sum(kept, 0)).to(tl.float32)
                    elif attempt == 0:
                        wanted = share * tl.sum(kept, 0)
                    cut = Cut(floor, least, centre, reach)
                    holds, key = search(own, cut, stage, wanted, SPAN, WIDTH, BLOCK)
                    if stage == BY_DISTANCE:
                        known = exact | ((floor == -infinity) & (least == 0))
                        sure = holds & known & (high == infinity) & (exact | (centre - low > -key))
                        reach = tl.where(sure, -key, reach)
                    else:
                        sure = holds & ((key > low) | (low == -infinity))
                        floor = tl.where(sure, key, floor)
                    done = sure | ((low == -infinity) & (high == infinity))
    return floor, least, centre, reach, parts
