"""Chooses the next token of every row on the device: the order and formulas of ``docs/sampling.md``.

Three launches. ``_prepare`` (rows times stretches of the vocabulary): mask, biases, penalties, and the largest score of
each stretch. ``_choose`` (rows): the maximum, or a draw by the request's own counter generator under top-k, top-p,
min-p and typical-p; then the count of the chosen token. ``_report`` (rows): log-probabilities of rows that asked.

A row is computed by one order of roundings, whatever is beside it. Draws are the same bits as on the CPU; the token is
the same unless the point falls within rounding of the border between two tokens, because exponentials differ in their
last bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.backends.common.penalties import LARGEST
from engine.backends.common.rng import MULTIPLIER_0, MULTIPLIER_1, ROUNDS, WEYL_0, WEYL_1
from engine.backends.cuda.kernels.logprobs import NO_TOKEN, MaskedLine, masked, report
from engine.backends.cuda.kernels.triton_common import ceil_div, power_of_two
from engine.backends.cuda.runtime.operations import SamplingColumns
from engine.backends.cuda.runtime.rows import Field, number_field
from engine.core.scheduler.plan import FAILED
from isolation.ipc.logit_bias import MAX_LOGIT_BIASES

STRETCH = 1_024
"""Scores that are looked at together."""

LARGEST_SCORE = tl.constexpr(LARGEST)
NO_CHOICE = tl.constexpr(FAILED)

PHILOX_ROUNDS = tl.constexpr(ROUNDS)
PHILOX_A = tl.constexpr(int(MULTIPLIER_0))
PHILOX_B = tl.constexpr(int(MULTIPLIER_1))
KEY_A = tl.constexpr(int(WEYL_0))
KEY_B = tl.constexpr(int(WEYL_1))

JUST_BELOW_ONE = tl.constexpr(1 - 2.0**-52)
"""Keeps a point below a sum that was rounded."""

ROW_STATE = ("rows", "positions", "words")
"""Columns that lie one behind another in the words of all rows: each begins wherever the one before it ends, so no form
of a kernel may rest on where."""

PENALTY_LINE = tl.constexpr(int(Field.PENALTY_LINE))
MASK_LINE = tl.constexpr(int(Field.MASK_LINE))
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


@dataclass(frozen=True, slots=True)
class Chosen:
    """What a step gives, a line for each of its rows."""

    tokens: Tensor
    """int32; ``FAILED`` where the logits were not finite."""
    logprobs: Tensor
    """float32, of rows that asked."""
    top_ids: Tensor
    """int32 ``(rows, most alternatives)``, the first as many as asked, -1 behind and for what a mask forbids."""
    top_logprobs: Tensor
    """float32, the same shape."""
    scores: Tensor
    """float32 ``(rows, vocab)``: scratch."""
    peaks: Tensor
    """float32 ``(rows, stretches, 2)``: scratch; the largest raw score and the largest penalised one."""

    @classmethod
    def empty(cls, rows: int, vocab: int, alternatives: int, device: torch.device) -> Chosen:
        """Room for a bucket. Not zeroed: everything is written before it is read."""
        return cls(
            torch.empty(rows, dtype=torch.int32, device=device),
            torch.empty(rows, device=device),
            torch.empty(rows, alternatives, dtype=torch.int32, device=device),
            torch.empty(rows, alternatives, device=device),
            torch.empty(rows, vocab, device=device),
            torch.empty(rows, ceil_div(vocab, STRETCH), 2, device=device),
        )


class RowWords(NamedTuple):
    """Words of one row; ``lines`` words lie between two fields."""

    words: Tensor
    lines: int
    row: Tensor


class ScoreLine(NamedTuple):
    """Penalised scores of one row, their maximum, and the temperature that they are divided by."""

    scores: Tensor
    size: int
    """Ids of the vocabulary."""
    peak: Tensor
    temperature: Tensor


class Cut(NamedTuple):
    """Which scaled scores are kept."""

    floor: Tensor
    """Scores not below this, as ``ordered`` numbers them."""
    least: Tensor
    """Unnormalised probabilities not below this."""
    centre: Tensor
    reach: Tensor
    """Scores no further than this from ``centre``."""


@triton.jit
def integer(row: RowWords, field: tl.constexpr) -> tl.tensor:
    """A row's word of a field, int64."""
    return tl.load(row.words + field * row.lines + row.row)


@triton.jit
def number(row: RowWords, field: tl.constexpr) -> tl.tensor:
    """A row's word of a field whose bits are a float64."""
    return integer(row, field).to(tl.float64, bitcast=True)


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
def scaled(line: ScoreLine, start: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """Scores from ``start`` on, less the largest, divided by the temperature; minus infinity behind the last."""
    token = start + tl.arange(0, BLOCK)
    score = tl.load(line.scores + token, mask=token < line.size, other=-float("inf"))
    return tl.div_rn(score - line.peak, line.temperature)


@triton.jit
def mass_above(line: ScoreLine, floor: tl.tensor, COUNTS: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """The unnormalised probability, or the number, of scores that ``floor`` (as ``ordered``) keeps; float64."""
    mass = tl.cast(0.0, tl.float64)
    for start in range(0, line.size, BLOCK):
        value = scaled(line, start, BLOCK)
        kept = (ordered(value) >= floor) & (start + tl.arange(0, BLOCK) < line.size)
        one = tl.exp(value)
        if COUNTS:
            one = one * 0.0 + 1.0
        mass += tl.sum(tl.where(kept, one, 0.0), 0).to(tl.float64)
    return mass


@triton.jit
def greatest_floor(
    line: ScoreLine, least: tl.tensor, wanted: tl.tensor, COUNTS: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """The greatest floor, not below ``least``, that keeps at least ``wanted``. What a floor keeps falls as it rises,
    roundings included: a sum of fewer numbers in the same order is never larger."""
    floor = least * 0
    for place in range(32):
        higher = floor | (tl.cast(0x80000000, tl.uint32) >> place)
        enough = mass_above(line, tl.maximum(higher, least), COUNTS, BLOCK) >= wanted
        floor = tl.where(enough, higher, floor)
    return tl.maximum(floor, least)


@triton.jit
def kept_weights(line: ScoreLine, start: tl.tensor, cut: Cut, BLOCK: tl.constexpr) -> tuple[tl.tensor, ...]:
    """Scaled scores from ``start`` on, and their unnormalised probabilities, zeros for what the cut drops."""
    value = scaled(line, start, BLOCK)
    weight = tl.exp(value)
    kept = (ordered(value) >= cut.floor) & (weight >= cut.least) & (tl.abs(value - cut.centre) <= cut.reach)
    return value, tl.where(kept & (start + tl.arange(0, BLOCK) < line.size), weight, 0.0)


@triton.jit
def typical_set(line: ScoreLine, cut: Cut, share: tl.tensor, BLOCK: tl.constexpr) -> tuple[tl.tensor, ...]:
    """Mean score of what the cut keeps, and the least distance from it within which ``share`` of the probability lies.
    The distance is found bit by bit: floats that are not negative have the order of their bits."""
    whole = tl.cast(0.0, tl.float64)
    moment = tl.cast(0.0, tl.float64)
    for start in range(0, line.size, BLOCK):
        value, weight = kept_weights(line, start, cut, BLOCK)
        whole += tl.sum(weight, 0).to(tl.float64)
        moment += tl.sum(weight * tl.where(weight > 0, value, 0.0), 0).to(tl.float64)
    centre = (moment / whole).to(tl.float32)
    bits = tl.cast(0, tl.uint32)
    for place in range(31):
        higher = bits | (tl.cast(0x40000000, tl.uint32) >> place)
        mass = tl.cast(0.0, tl.float64)
        for start in range(0, line.size, BLOCK):
            value, weight = kept_weights(line, start, cut, BLOCK)
            nearer = tl.abs(value - centre) < higher.to(tl.float32, bitcast=True)
            mass += tl.sum(tl.where(nearer, weight, 0.0), 0).to(tl.float64)
        bits = tl.where(mass < share * whole, higher, bits)
    return centre, bits.to(tl.float32, bitcast=True)


@triton.jit
def invert(line: ScoreLine, cut: Cut, point: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """The first id at which the cumulative distribution of what is kept exceeds ``point``; two levels of sums."""
    whole = tl.cast(0.0, tl.float64)
    for start in range(0, line.size, BLOCK):
        _, weight = kept_weights(line, start, cut, BLOCK)
        whole += tl.sum(weight, 0).to(tl.float64)
    target = point * whole
    total = tl.cast(0.0, tl.float64)
    before = tl.cast(0.0, tl.float64)
    begin = tl.cast(0, tl.int32)
    for start in range(0, line.size, BLOCK):
        _, weight = kept_weights(line, start, cut, BLOCK)
        total += tl.sum(weight, 0).to(tl.float64)
        passed = total <= target
        begin = tl.where(passed, start + BLOCK, begin)
        before = tl.where(passed, total, before)
    _, weight = kept_weights(line, begin, cut, BLOCK)
    inner = tl.cumsum(weight.to(tl.float64), 0)
    rest = tl.minimum(target - before, tl.max(inner, 0) * JUST_BELOW_ONE)
    # An id without weight is never the first whose sum exceeds a point.
    return begin + tl.sum((inner <= rest).to(tl.int32), 0)


@triton.jit
def draw(line: ScoreLine, row: RowWords, position: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """The id that a row draws for a position."""
    floor = tl.cast(0, tl.uint32)
    most = integer(row, TOP_K)
    if most > 0:
        floor = greatest_floor(line, floor, most.to(tl.float64), True, BLOCK)
    share = number(row, TOP_P)
    if share < 1:
        whole = mass_above(line, floor, False, BLOCK)
        floor = greatest_floor(line, floor, share * whole, False, BLOCK)
    point = uniform(integer(row, SEED), position)
    least = number(row, MIN_P).to(tl.float32)
    centre, reach = tl.cast(0.0, tl.float32), tl.cast(float("inf"), tl.float32)
    typical = number(row, TYPICAL_P)
    if typical < 1:
        centre, reach = typical_set(line, Cut(floor, least, centre, reach), typical, BLOCK)
    token = invert(line, Cut(floor, least, centre, reach), point, BLOCK)
    return tl.minimum(token, line.size - 1).to(tl.int32)


@triton.jit
def greedy(line: ScoreLine, peaks: tl.tensor, exists: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """The first id that has the largest score, by the largest scores of stretches."""
    stretch = tl.arange(0, peaks.shape[0])
    first = tl.min(tl.where(exists & (peaks == line.peak), stretch, peaks.shape[0] - 1), 0)
    place = first * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(line.scores + place, mask=place < line.size, other=-float("inf"))
    return tl.min(tl.where((score == line.peak) & (place < line.size), place, NO_TOKEN), 0).to(tl.int32)


@triton.jit(do_not_specialize=("mask_width", "lines"), do_not_specialize_on_alignment=ROW_STATE)
def _prepare(
    logits: tl.tensor,
    logits_row: tl.tensor,
    rows: tl.tensor,
    words: tl.tensor,
    lines: tl.tensor,
    masks: tl.tensor,
    mask_width: tl.tensor,
    counts: tl.tensor,
    bias_ids: tl.tensor,
    biases: tl.tensor,
    scores: tl.tensor,
    peaks: tl.tensor,
    size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    line = tl.program_id(0).to(tl.int64)
    row = RowWords(words, lines, tl.load(rows + line))
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    raw = masked(MaskedLine(logits + line * logits_row, size, masks, integer(row, MASK_LINE), mask_width), token)
    score = raw
    for entry in range(integer(row, BIASES).to(tl.int32)):
        own = row.row.to(tl.int64) * BIAS_ROOM + entry
        biased = score + tl.load(biases + own)
        score = tl.where(token == tl.load(bias_ids + own), biased, score)
    place = integer(row, PENALTY_LINE)
    if place >= 0:
        factor = number(row, REPETITION).to(tl.float32)
        once = number(row, PRESENCE).to(tl.float32)
        each = number(row, FREQUENCY).to(tl.float32)
        seen = tl.load(counts + place.to(tl.int64) * size + token, mask=token < size, other=0)
        changed = tl.where(score > 0, tl.div_rn(score, factor + score * 0.0), score * factor)
        changed -= each * (seen - 1).to(tl.float32) + once * (seen > 1).to(tl.float32)
        # By comparison, so that what is no number stays none.
        changed = tl.where(changed > LARGEST_SCORE, LARGEST_SCORE, changed)
        score = tl.where(seen > 0, changed, score)
    tl.store(scores + line * size + token, score, mask=token < size)
    broken = tl.sum((raw != raw).to(tl.int32), 0) > 0
    out = peaks + (line * tl.num_programs(1) + tl.program_id(1)) * 2
    tl.store(out, tl.where(broken, float("nan"), tl.max(tl.where(raw == raw, raw, -float("inf")), 0)))
    tl.store(out + 1, tl.max(tl.where(score == score, score, -float("inf")), 0))


@triton.jit(do_not_specialize=("lines",), do_not_specialize_on_alignment=ROW_STATE)
def _choose(
    scores: tl.tensor,
    peaks: tl.tensor,
    rows: tl.tensor,
    positions: tl.tensor,
    words: tl.tensor,
    lines: tl.tensor,
    counts: tl.tensor,
    tokens: tl.tensor,
    size: tl.tensor,
    num_stretches: tl.tensor,
    STRETCHES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    line = tl.program_id(0).to(tl.int64)
    row = RowWords(words, lines, tl.load(rows + line))
    stretch = tl.arange(0, STRETCHES)
    exists = stretch < num_stretches
    place = peaks + (line * num_stretches + stretch) * 2
    raw_peaks = tl.load(place, mask=exists, other=-float("inf"))
    score_peaks = tl.load(place + 1, mask=exists, other=-float("inf"))
    broken = tl.sum((raw_peaks != raw_peaks).to(tl.int32), 0) > 0
    raw_peak = tl.max(tl.where(raw_peaks == raw_peaks, raw_peaks, -float("inf")), 0)
    token = tl.cast(NO_CHOICE, tl.int32)
    if (broken == 0) & (raw_peak > -float("inf")) & (raw_peak < float("inf")):
        temperature = number(row, TEMPERATURE).to(tl.float32)
        own = ScoreLine(scores + line * size, size, tl.max(score_peaks, 0), temperature)
        if temperature > 0:
            token = draw(own, row, tl.load(positions + line), BLOCK)
        else:
            token = greedy(own, score_peaks, exists, BLOCK)
        counted = integer(row, PENALTY_LINE)
        if counted >= 0:
            count = counts + counted.to(tl.int64) * size + token
            tl.store(count, tl.maximum(tl.load(count), 1) + 1)
    tl.store(tokens + line, token)


def sample(logits: Tensor, rows: Tensor, positions: Tensor, columns: SamplingColumns, out: Chosen) -> None:
    """Choose a token for each line of logits.

    Args:
        logits: ``(lines, vocab)``, any float dtype; lines may be further apart than that.
        rows: int32 or int64 ``(lines,)``: the row of each line in ``columns``.
        positions: int64 ``(lines,)``: the position that the new token will have.
        columns: numbers of all rows; counts of chosen tokens are noted there.
        out: of the bucket.
    """
    lines, size = logits.shape
    if not lines:
        return
    stretches = ceil_div(size, STRETCH)
    _prepare[(lines, stretches)](
        logits,
        logits.stride(0),
        rows,
        columns.words,
        columns.words.shape[1],
        columns.masks,
        columns.masks.shape[1],
        columns.counts,
        columns.bias_ids,
        columns.biases,
        out.scores,
        out.peaks,
        size,
        BLOCK=STRETCH,
    )
    _choose[(lines,)](
        out.scores,
        out.peaks,
        rows,
        positions,
        columns.words,
        columns.words.shape[1],
        columns.counts,
        out.tokens,
        size,
        stretches,
        STRETCHES=power_of_two(stretches),
        BLOCK=STRETCH,
    )
    asked = columns.words[Field.LOGPROBS], columns.words[Field.MASK_LINE], columns.masks
    report(logits, rows, asked, out.tokens, (out.logprobs, out.top_ids, out.top_logprobs))
