"""Which scores top-k, top-p, min-p and typical-p keep, by looking at few of a row's scores more than once.

A *list* of a row has its scores within two limits, each stretch's at the beginning of the stretch's place, in the order
of ids; beside it are number and weight of what lies above the upper limit. A cut is searched for in the list: its
floor is the same for any list that holds it, because it is exact or the list is told to be too short. The first list
has what lies above a limit that a sample of the row suggested (``suggested_limit``), before its largest score was
known. A long one is shortened in place to what lies around the floor (``bracket``, ``shorten``), so that the search has
all of it in registers. Where the first one was too short, all scores are listed.

Sums are taken in float32 within a stretch or a look at a list, and in float64 over these, in one order.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from engine.backends.cuda.kernels.logprobs import MaskedLine, logits_of
from engine.backends.cuda.kernels.sampling_figures import LISTED, MOMENT, MORE, MORE_WEIGHT, PEAK, SUM
from engine.backends.cuda.kernels.sampling_lean import MOST_ROUNDS, bracket_lean, search_lean, shorten_lean
from engine.backends.cuda.kernels.sampling_limit import LOGIT_SPAN, NEGLIGIBLE
from engine.backends.cuda.kernels.sampling_lists import (
    BY_COUNT,
    BY_DISTANCE,
    BY_WEIGHT,
    HALVES,
    LONG,
    MOST_STEPS,
    VERY_LONG,
    List,
    figure,
    halfway,
    halved,
    list_part,
    more_of,
)
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


class Cut(NamedTuple):
    """Which scaled scores are kept."""

    floor: Tensor
    """Scores not below this."""
    least: Tensor
    """Weights not below this."""
    centre: Tensor
    reach: Tensor
    """Scores no further than this from ``centre``."""


@triton.jit
def weights_of(value: tl.tensor, exists: tl.tensor, cut: Cut) -> tl.tensor:
    """Unnormalised probabilities of scaled scores, zeros for what the cut drops."""
    weight = tl.exp(value)
    kept = (value >= cut.floor) & (weight >= cut.least) & (tl.abs(value - cut.centre) <= cut.reach)
    return tl.where(exists & kept, weight, 0.0)


@triton.jit
def listed(list_: List, start: tl.tensor, SPAN: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """Scaled scores of all stretches in the list, in each from place ``start`` on; minus infinity behind the last."""
    stretch = tl.arange(0, SPAN)
    place = start + tl.arange(0, WIDTH)
    exists = place[None, :] < figure(list_, LISTED, SPAN).to(tl.int32)[:, None]
    return over_temperature(places(list_, stretch, place, exists, BLOCK), list_.peak, list_.temperature)


@triton.jit
def places(list_: List, stretch: tl.tensor, place: tl.tensor, exists: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """Scores in these places of a list, minus infinity where nothing is: memory behind a list is read, several numbers
    at once, and not looked at."""
    whole = (stretch < list_.stretches)[:, None] & (place < BLOCK)[None, :]
    score = tl.load(list_.scores + stretch[:, None] * BLOCK + place[None, :], mask=whole, other=-float("inf"))
    return tl.where(exists, score, -float("inf"))


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
    known: tl.tensor,
    SPAN: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Whether the list holds the greatest floor that keeps at least ``wanted``, and that floor, which is a key. What a
    floor keeps falls as it rises, roundings included: a sum of fewer numbers in the same order is never larger.
    ``known``: the list was shortened around the floor, by sums in another order; roundings do not put that in question.
    """
    more = more_of(list_, stage, SPAN)
    value = listed(list_, 0, SPAN, WIDTH, BLOCK)
    key, amount = keyed(value, cut, stage)
    part = tl.sum(amount).to(tl.float64)
    low = tl.min(tl.where(key > -float("inf"), key, float("inf")))
    high = tl.max(key)
    for start in range(WIDTH, list_.longest, WIDTH):
        further, further_amount = keyed(listed(list_, start, SPAN, WIDTH, BLOCK), cut, stage)
        part += tl.sum(further_amount).to(tl.float64)
        low = tl.minimum(low, tl.min(tl.where(further > -float("inf"), further, float("inf"))))
        high = tl.maximum(high, tl.max(further))
    holds = (known | ((more < wanted) & (more + part >= wanted))) & (high > -float("inf"))
    if holds & (list_.longest <= WIDTH):
        # Everything is at hand: first by halves of the distance, which needs one sum each.
        begin, end = low, high
        for _ in range(HALVES):
            middle = (begin + end) * 0.5
            enough = more + tl.sum(tl.where(key >= middle, amount, 0.0)).to(tl.float64) >= wanted
            begin = tl.where(enough, middle, begin)
            end = tl.where(enough, end, middle)
        low = tl.min(tl.where(key >= begin, key, float("inf")))
        high = tl.where(end < high, tl.max(tl.where(key < end, key, -float("inf"))), high)
    # Below ``low`` no floor is of use and above ``high`` none suffices; both are keys.
    step = tl.cast(0, tl.int32)
    while holds & (low < high) & (step < MOST_STEPS):
        step += 1
        middle = halfway(low, high)
        part = tl.sum(tl.where(key >= middle, amount, 0.0)).to(tl.float64)
        above = tl.min(tl.where(key >= middle, key, float("inf")))
        below = tl.max(tl.where(key < middle, key, -float("inf")))
        for start in range(WIDTH, list_.longest, WIDTH):
            further, further_amount = keyed(listed(list_, start, SPAN, WIDTH, BLOCK), cut, stage)
            part += tl.sum(tl.where(further >= middle, further_amount, 0.0)).to(tl.float64)
            above = tl.minimum(above, tl.min(tl.where(further >= middle, further, float("inf"))))
            below = tl.maximum(below, tl.max(tl.where(further < middle, further, -float("inf"))))
        enough = more + part >= wanted
        low = tl.where(enough, above, low)
        high = tl.where(enough, high, below)
    return holds, low


@triton.jit
def bracket(
    list_: List,
    cut: Cut,
    stage: tl.tensor,
    wanted: tl.tensor,
    low: tl.tensor,
    SPAN: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Two scaled scores between which the floor lies that is sought by count or weight, if the list holds it: the
    first keeps enough or is ``low``, the second keeps too little. Five marks are looked at in a pass, close together
    at the lower end, near which a list's limit puts the floor."""
    more = more_of(list_, stage, SPAN)
    begin, end = low, tl.cast(float("inf"), tl.float32)
    span = tl.where(stage == BY_COUNT, tl.cast(LOGIT_SPAN, tl.float32) / list_.temperature, -NEGLIGIBLE)
    bottom, top = tl.where(low > -float("inf"), low, -span), low * 0.0
    top = tl.where(top == top, top, 0.0)
    number = tl.sum(figure(list_, LISTED, SPAN), 0)
    for _ in range(1 + (number > LONG).to(tl.int32) + (number > VERY_LONG).to(tl.int32)):
        width = top - bottom
        a, b, c = bottom + 0.03 * width, bottom + 0.11 * width, bottom + 0.25 * width
        d, e = bottom + 0.44 * width, bottom + 0.69 * width
        in_a, in_b = tl.zeros([SPAN, PART], tl.float32), tl.zeros([SPAN, PART], tl.float32)
        in_c, in_d, in_e = in_a, in_a, in_a
        for start in range(0, list_.longest, PART):
            key, amount = keyed(listed(list_, start, SPAN, PART, BLOCK), cut, stage)
            in_a += tl.where(key >= a, amount, 0.0)
            in_b += tl.where(key >= b, amount, 0.0)
            in_c += tl.where(key >= c, amount, 0.0)
            in_d += tl.where(key >= d, amount, 0.0)
            in_e += tl.where(key >= e, amount, 0.0)
        begin, end, bottom, top = halved(begin, end, bottom, top, a, more + tl.sum(in_a).to(tl.float64) >= wanted)
        begin, end, bottom, top = halved(begin, end, bottom, top, b, more + tl.sum(in_b).to(tl.float64) >= wanted)
        begin, end, bottom, top = halved(begin, end, bottom, top, c, more + tl.sum(in_c).to(tl.float64) >= wanted)
        begin, end, bottom, top = halved(begin, end, bottom, top, d, more + tl.sum(in_d).to(tl.float64) >= wanted)
        begin, end, bottom, top = halved(begin, end, bottom, top, e, more + tl.sum(in_e).to(tl.float64) >= wanted)
    return begin, end


@triton.jit
def shorten(
    list_: List, low: tl.tensor, high: tl.tensor, SPAN: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """Keep of a list only scaled scores from ``low`` to below ``high``, in place; gives its longest stretch."""
    stretch = tl.arange(0, SPAN)
    lines = list_.scores + stretch[:, None] * BLOCK
    ends = figure(list_, LISTED, SPAN).to(tl.int32)
    count = tl.zeros([SPAN], tl.int32)
    higher, weight = tl.zeros([SPAN, PART], tl.float32), tl.zeros([SPAN, PART], tl.float32)
    for start in range(0, list_.longest, PART):
        place = start + tl.arange(0, PART)
        score = places(list_, stretch, place, place[None, :] < ends[:, None], BLOCK)
        value = over_temperature(score, list_.peak, list_.temperature)
        inside = (value >= low) & (value < high) & (score > -float("inf"))
        higher += (value >= high).to(tl.float32)
        weight += tl.where(value >= high, tl.exp(value), 0.0)
        target = count[:, None] + tl.cumsum(inside.to(tl.int32), 1) - 1
        count += tl.sum(inside.to(tl.int32), 1)
        # What is overwritten was read by then, by all threads: nothing moves to a higher place.
        tl.debug_barrier()
        tl.store(lines + target, score, mask=inside)
    exists = stretch < list_.stretches
    own = list_.figures + stretch
    above = figure(list_, MORE, SPAN) + tl.sum(higher, 1)
    weight_above = figure(list_, MORE_WEIGHT, SPAN) + tl.sum(weight, 1)
    tl.debug_barrier()
    tl.store(own + LISTED * list_.stretches, count.to(tl.float32), mask=exists)
    tl.store(own + MORE * list_.stretches, above, mask=exists)
    tl.store(own + MORE_WEIGHT * list_.stretches, weight_above, mask=exists)
    tl.debug_barrier()
    return tl.max(count, 0)


@triton.jit
def list_all(list_: List, line: MaskedLine, row: RowWords, wishes: Wishes, BLOCK: tl.constexpr) -> tl.tensor:
    """List all of the row's scores, in one pass; gives the longest stretch of the list."""
    longest = tl.cast(0, tl.int32)
    place = tl.arange(0, BLOCK)
    # The list before is read to its end.
    tl.debug_barrier()
    for stretch in range(list_.stretches):
        first = stretch * BLOCK
        token = first + place
        _, score = scores_of(line, row, wishes, token, logits_of(line, token), first, first + BLOCK)
        count = list_part(list_.scores + first, score, score > -float("inf"), False)
        longest = tl.maximum(longest, count)
        own = list_.figures + stretch
        tl.store(own + LISTED * list_.stretches, count.to(tl.float32))
        tl.store(own + MORE * list_.stretches, 0.0)
        tl.store(own + MORE_WEIGHT * list_.stretches, 0.0)
    # All threads read what each has stored.
    tl.debug_barrier()
    return longest


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
def near_floor(
    list_: List,
    cut: Cut,
    stage: tl.tensor,
    wanted: tl.tensor,
    last: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    SPAN: tl.constexpr,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
    LEAN: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Shorten the list where it is long and the cut has no stage behind this one, which would need it as it is. Gives
    its longest stretch, its upper limit, and whether sums have shown on which sides of the floor its limits lie."""
    longest, sides = list_.longest, list_.longest < 0
    if last & (longest > WIDTH):
        if LEAN:
            begin, end, rounds, before = low, high, tl.cast(0, tl.int32), longest + 1
            while (longest > WIDTH) & (longest < before) & (rounds < MOST_ROUNDS):
                rounds, before = rounds + 1, longest
                own = List(list_.scores, list_.figures, list_.stretches, longest, list_.peak, list_.temperature)
                begin, end = bracket_lean(own, cut.floor, stage, wanted, begin, end, SPAN, PART, BLOCK)
                longest = shorten_lean(own, begin, end, SPAN, PART, BLOCK)
        else:
            begin, end = bracket(list_, cut, stage, wanted, low, SPAN, PART, BLOCK)
            longest = shorten(list_, begin, end, SPAN, PART, BLOCK)
        high, sides = tl.minimum(high, end), begin > low
    return longest, high, sides


@triton.jit
def floor_of(
    list_: List,
    cut: Cut,
    stage: tl.tensor,
    wanted: tl.tensor,
    sides: tl.tensor,
    SPAN: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    LEAN: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """As ``search``."""
    if LEAN:
        # Before the last stages a cut is its floor.
        if (stage != BY_DISTANCE) & (list_.longest <= WIDTH):
            holds, key = search_lean(list_, cut.floor, stage, wanted, sides, SPAN, WIDTH, BLOCK)
        else:
            holds, key = search(list_, cut, stage, wanted, sides, SPAN, WIDTH, BLOCK)
    else:
        holds, key = search(list_, cut, stage, wanted, sides, SPAN, WIDTH, BLOCK)
    return holds, key


@triton.jit
def cut_row(
    list_: List,
    line: MaskedLine,
    row: RowWords,
    wishes: Wishes,
    low: tl.tensor,
    high: tl.tensor,
    SPAN: tl.constexpr,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
    LEAN: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """The row's cut, and the weight that it keeps in each stretch (float64); a list has limits ``low`` and ``high``."""
    infinity, least, centre = tl.cast(float("inf"), tl.float32), tl.cast(0.0, tl.float32), tl.cast(0.0, tl.float32)
    floor, reach, parts = -infinity, infinity, tl.zeros([SPAN], tl.float64)
    longest, wanted, smallest = list_.longest, tl.cast(0.0, tl.float64), number(row, MIN_P)
    most, share, typical = integer(row, TOP_K).to(tl.float64), number(row, TOP_P), number(row, TYPICAL_P)
    for turn in range(4):
        stage = longest * 0 + turn
        active = ((stage == BY_COUNT) & (most > 0)) | ((stage == BY_WEIGHT) & (share < 1)) | (stage == 3)
        done = (active | ((stage == BY_DISTANCE) & (typical < 1))) == 0
        if stage == BY_DISTANCE:
            least = smallest.to(tl.float32)
        last = ((stage == BY_WEIGHT) | ((stage == BY_COUNT) & (share >= 1))) & (typical >= 1) & (smallest == 0)
        for attempt in range(2):
            if done == 0:
                if attempt > 0:
                    longest, low, high = list_all(list_, line, row, wishes, BLOCK), -infinity, infinity
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
                    longest, high, sides = near_floor(
                        own, cut, stage, wanted, last, low, high, SPAN, WIDTH, PART, BLOCK, LEAN
                    )
                    own = List(list_.scores, list_.figures, list_.stretches, longest, list_.peak, list_.temperature)
                    holds, key = floor_of(own, cut, stage, wanted, sides, SPAN, WIDTH, BLOCK, LEAN)
                    if stage == BY_DISTANCE:
                        known = exact | ((floor == -infinity) & (least == 0))
                        sure = holds & known & (high == infinity) & (exact | (centre - low > -key))
                        reach = tl.where(sure, -key, reach)
                    else:
                        sure = holds & ((key > low) | (low == -infinity))
                        floor = tl.where(sure, key, floor)
                    done = sure | ((low == -infinity) & (high == infinity))
    return floor, least, centre, reach, parts
