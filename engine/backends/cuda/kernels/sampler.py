"""Chooses the next token of every row on the device: the order and formulas of ``docs/sampling.md``.

Four launches. ``_sketch`` (rows): a sample of the scores of rows that draw under a cut, and a limit above which
everything that is kept lies, as far as the sample tells. ``_prepare`` (rows times programs) reads all logits once: the
figures of each stretch, and the list of its scores above the limit. ``_choose`` (rows): the maximum, or a draw by the
request's own counter generator, from figures and list; then the count of the chosen token. ``_report`` (rows):
log-probabilities of rows that asked.

So a row is read once, and a few scores of it several times; where a limit was wrong, once more
(``engine.backends.cuda.kernels.sampling_cut``). A row is computed by one order of roundings, whatever is beside it.
Draws are the same bits as on the CPU; the token is the same unless the point falls within rounding of the border
between two tokens, because exponentials differ in their last bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.backends.cuda.kernels.logprobs import NO_TOKEN, MaskedLine, logits_of, report
from engine.backends.cuda.kernels.sampling_cut import Cut, figures_whole, weights_of
from engine.backends.cuda.kernels.sampling_figures import FIGURES, LISTED, MOMENT, PEAK, RAW_PEAK, RAW_SUM, SUM
from engine.backends.cuda.kernels.sampling_floor import Sketched, cut_of
from engine.backends.cuda.kernels.sampling_lean import read_plain
from engine.backends.cuda.kernels.sampling_limit import SAMPLE_PIECE, SAMPLE_PIECES, suggested_limit
from engine.backends.cuda.kernels.sampling_lists import List, figure, list_part
from engine.backends.cuda.kernels.sampling_row import (
    LARGEST_SCORE,
    LOGPROBS,
    MASK_LINE,
    PENALTY_LINE,
    SEED,
    TYPICAL_P,
    RowWords,
    Wishes,
    integer,
    is_changed,
    is_cut,
    largest,
    number,
    over_temperature,
    scores_of,
    temperature_of,
    uniform,
)
from engine.backends.cuda.kernels.triton_common import Threads, ceil_div, power_of_two
from engine.backends.cuda.runtime.operations import SamplingColumns
from engine.backends.cuda.runtime.rows import Field
from engine.core.scheduler.plan import FAILED

STRETCH = 2_048
"""Scores that are looked at together."""

TOGETHER = 4_096
"""Scores of a list that one program holds in registers, as key and weight."""

PASSING = 2_048
"""Scores of a longer list that one program looks at together."""

LEAST_WIDTH = 16
"""Scores of one stretch among them, in the widest vocabulary."""

STEADY = Threads(4, 1)
"""Threads of a program that reads one stretch."""

WIDE = Threads(8, 1)
"""Threads of a program that looks at one row."""

WIDE_REGISTERS = 128
"""Registers of one of these threads, at the most: two programs are on a processor at once, so that 256 rows are looked
at together on a GPU of 132 processors."""


@dataclass(frozen=True, slots=True)
class SamplerForm:
    """How a choice of tokens is computed; what is chosen is the same but for roundings."""

    reading: Threads = STEADY
    """Threads of a program that reads stretches."""
    registers: int = 80
    """Registers of one of these threads, at the most: so many programs are on a processor at once that memory is never
    waited for; some addresses are computed again for it."""
    programs: int = 4_096
    """Programs that read logits at the least, if there are so many stretches: some for each place that a GPU has for
    them. A program of several stretches fetches one while it looks at the one before."""
    lean_reading: bool = False
    """Whether rows whose scores are their logits are read by ``read_plain``."""
    lean_lists: bool = False
    """Whether lists are searched by the functions of ``sampling_lean``."""
    lean_sample: bool = False
    """Whether samples are looked at in fewer steps."""
    lean_floor: bool = False
    """Whether a top-k or top-p alone is searched for by ``cut_by_floor``."""
    looking: Threads = WIDE
    """Threads of a program that looks at one row."""
    looking_registers: int = WIDE_REGISTERS
    """Registers of one of these threads, at the most."""
    together: int = TOGETHER
    """Scores of a list that such a program holds in registers, as key and weight; a longer list is shortened first."""
    passing: int = PASSING
    """Scores of a longer list that it looks at together."""


PLAIN_FORM = SamplerForm()

LEAN_FORM = SamplerForm(lean_reading=True, lean_lists=True, lean_sample=True, lean_floor=True)
"""Few instructions everywhere: an H200 takes 95 us for a top-p of 256 rows in bfloat16; before the shorter way to a
floor, 126."""

NO_CHOICE = tl.constexpr(FAILED)

ROW_STATE = ("rows", "positions", "words")
"""Columns that lie one behind another in the words of all rows: each begins wherever the one before it ends, so no form
of a kernel may rest on where."""


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
    """float32 ``(rows, stretches, STRETCH)``: scratch; lists of scores, of rows that draw under a cut."""
    figures: Tensor
    """float32 ``(rows, FIGURES, stretches)``: scratch."""
    limits: Tensor
    """float32 ``(3, rows)``: scratch; lower limits of the lists, largest scores of the samples, and the weight below
    the limits relative to these."""

    @classmethod
    def empty(cls, rows: int, vocab: int, alternatives: int, device: torch.device) -> Chosen:
        """Room for a bucket."""
        stretches = ceil_div(vocab, STRETCH)
        return cls(
            torch.empty(rows, dtype=torch.int32, device=device),
            torch.empty(rows, device=device),
            torch.empty(rows, alternatives, dtype=torch.int32, device=device),
            torch.empty(rows, alternatives, device=device),
            torch.empty(rows, stretches, STRETCH, device=device),
            torch.empty(rows, FIGURES.value, stretches, device=device),
            torch.empty(3, rows, device=device),
        )


@triton.jit(do_not_specialize=("mask_width", "lines"), do_not_specialize_on_alignment=ROW_STATE)
def _sketch(
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
    limits: tl.tensor,
    size: tl.tensor,
    stride: tl.tensor,
    LEAN: tl.constexpr,
) -> None:
    line = tl.program_id(0).to(tl.int64)
    row = RowWords(words, lines, tl.load(rows + line))
    if is_cut(row):
        own = MaskedLine(logits + line * logits_row, size, masks, integer(row, MASK_LINE), mask_width)
        wishes = Wishes(counts, bias_ids, biases)
        limit, peak, below = suggested_limit(own, row, wishes, stride, temperature_of(row), LEAN)
        place, lines_here = limits + line, tl.num_programs(0)
        tl.store(place, limit)
        tl.store(place + lines_here, peak)
        tl.store(place + 2 * lines_here, below)


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
    limits: tl.tensor,
    scores: tl.tensor,
    figures: tl.tensor,
    size: tl.tensor,
    stretches: tl.tensor,
    BLOCK: tl.constexpr,
    LEAN: tl.constexpr,
) -> None:
    line, stretch, step = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    row = RowWords(words, lines, tl.load(rows + line))
    own = MaskedLine(logits + line * logits_row, size, masks, integer(row, MASK_LINE), mask_width)
    wishes = Wishes(counts, bias_ids, biases)
    out = figures + line * stretches * FIGURES
    target = scores + line * stretches * BLOCK
    changed = is_changed(row) | (own.mask >= 0)
    if LEAN:
        if changed:
            read_any(own, row, wishes, out, stretches, target, limits + line, stretch, step, BLOCK)
        else:
            read_plain(own, row, out, stretches, target, limits + line, stretch, step, BLOCK)
    else:
        read_any(own, row, wishes, out, stretches, target, limits + line, stretch, step, BLOCK)


@triton.jit
def read_any(
    line: MaskedLine,
    row: RowWords,
    wishes: Wishes,
    out: tl.tensor,
    stretches: tl.tensor,
    target: tl.tensor,
    limit: tl.tensor,
    stretch: tl.tensor,
    step: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Figures, and parts of the list, of every ``step``-th stretch of a row."""
    place = tl.arange(0, BLOCK)
    following = logits_of(line, stretch * BLOCK + place)
    for here in range(stretch, stretches, step):
        # The next stretch is on its way while this one is looked at.
        given, first = following, here * BLOCK
        following = logits_of(line, (here + step) * BLOCK + place)
        raw, score = scores_of(line, row, wishes, first + place, given, first, first + BLOCK)
        describe(row, raw, score, out + here, stretches, target + first, limit)


@triton.jit
def describe(
    row: RowWords,
    raw: tl.tensor,
    score: tl.tensor,
    out: tl.tensor,
    stretches: tl.tensor,
    target: tl.tensor,
    limit: tl.tensor,
) -> None:
    """Store the figures of a stretch, as far as its row asks for them, and its part of the row's list."""
    raw_peak = largest(raw)
    tl.store(out + RAW_PEAK * stretches, raw_peak)
    if integer(row, LOGPROBS) >= 0:
        # A stretch that a mask forbids has no largest logit, and no sum.
        weight = tl.exp(raw - tl.where(raw_peak > -float("inf"), raw_peak, 0.0))
        tl.store(out + RAW_SUM * stretches, tl.sum(weight, 0))
    peak = raw_peak
    if is_changed(row):
        peak = largest(score)
    tl.store(out + PEAK * stretches, peak)
    temperature = temperature_of(row)
    if temperature > 0:
        value = over_temperature(score, tl.where(peak > -float("inf"), peak, 0.0), temperature)
        weight = tl.exp(value)
        tl.store(out + SUM * stretches, tl.sum(weight, 0))
        if is_cut(row):
            if number(row, TYPICAL_P) < 1:
                tl.store(out + MOMENT * stretches, tl.sum(tl.where(weight > 0, weight * value, 0.0), 0))
            else:
                tl.store(out + MOMENT * stretches, 0.0)
            # No number and minus infinity are in no list.
            listed = list_part(target, score, score >= tl.maximum(tl.load(limit), -LARGEST_SCORE), True)
            tl.store(out + LISTED * stretches, listed.to(tl.float32))


@triton.jit
def settle(
    line: MaskedLine,
    row: RowWords,
    wishes: Wishes,
    list_: List,
    cut: Cut,
    parts: tl.tensor,
    point: tl.tensor,
    greedy: tl.tensor,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The first id at which the cumulative distribution exceeds ``point``, from the weights that are kept in each
    stretch; or the first that has the largest score. Either looks into one stretch only."""
    stretch = tl.arange(0, SPAN)
    sums = tl.cumsum(parts, 0)
    target = point * tl.max(sums, 0)
    # What has no weight is never drawn, however sums are rounded.
    first = tl.min(tl.where((sums > target) & (parts > 0), stretch, SPAN), 0)
    first = tl.minimum(first, tl.max(tl.where(parts > 0, stretch, 0), 0))
    rest = target - tl.sum(tl.where(stretch == first - 1, sums, 0.0), 0)
    if greedy:
        peaks = tl.where(stretch < list_.stretches, figure(list_, PEAK, SPAN), -float("inf"))
        first = tl.min(tl.where(peaks == list_.peak, stretch, list_.stretches - 1), 0)
    begin = first * BLOCK
    token = begin + tl.arange(0, BLOCK)
    _, score = scores_of(line, row, wishes, token, logits_of(line, token), begin, begin + BLOCK)
    if greedy:
        found = tl.min(tl.where(score == tl.max(score, 0), token, NO_TOKEN), 0)
    else:
        value = over_temperature(score, list_.peak, list_.temperature)
        weight = weights_of(value, score > -float("inf"), cut)
        passed = (tl.cumsum(weight.to(tl.float64), 0) > rest) & (weight > 0)
        found = tl.min(tl.where(passed, token, NO_TOKEN), 0)
        found = tl.minimum(found, tl.max(tl.where(weight > 0, token, begin), 0))
    return tl.minimum(found, line.size - 1).to(tl.int32)


@triton.jit(do_not_specialize=("mask_width", "lines"), do_not_specialize_on_alignment=ROW_STATE)
def _choose(
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
    limits: tl.tensor,
    scores: tl.tensor,
    figures: tl.tensor,
    positions: tl.tensor,
    tokens: tl.tensor,
    size: tl.tensor,
    stretches: tl.tensor,
    SPAN: tl.constexpr,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
    LEAN: tl.constexpr,
    FLOOR: tl.constexpr,
) -> None:
    line = tl.program_id(0).to(tl.int64)
    row = RowWords(words, lines, tl.load(rows + line))
    own = MaskedLine(logits + line * logits_row, size, masks, integer(row, MASK_LINE), mask_width)
    wishes = Wishes(counts, bias_ids, biases)
    place, exists = figures + line * stretches * FIGURES, tl.arange(0, SPAN) < stretches
    raw_peaks = tl.load(place + RAW_PEAK * stretches + tl.arange(0, SPAN), mask=exists, other=-float("inf"))
    peaks = tl.load(place + PEAK * stretches + tl.arange(0, SPAN), mask=exists, other=-float("inf"))
    broken = tl.sum((raw_peaks != raw_peaks).to(tl.int32), 0) > 0
    raw_peak = tl.max(tl.where(raw_peaks == raw_peaks, raw_peaks, -float("inf")), 0)
    token = tl.cast(NO_CHOICE, tl.int32)
    if (broken == 0) & (raw_peak > -float("inf")) & (raw_peak < float("inf")):
        told = temperature_of(row)
        temperature = tl.where(told > 0, told, 1.0)
        floor, reach = tl.cast(-float("inf"), tl.float32), tl.cast(float("inf"), tl.float32)
        least, centre, longest = tl.cast(0.0, tl.float32), tl.cast(0.0, tl.float32), tl.cast(0, tl.int32)
        parts = tl.zeros([SPAN], tl.float64)
        list_ = List(scores + line * stretches * BLOCK, place, stretches, longest, tl.max(peaks, 0), temperature)
        if is_cut(row):
            longest = tl.max(figure(list_, LISTED, SPAN), 0).to(tl.int32)
            list_ = List(list_.scores, place, stretches, longest, list_.peak, temperature)
            told_of = Sketched(limits + line, tl.num_programs(0))
            floor, least, centre, reach, parts = cut_of(
                list_, own, row, wishes, told_of, SPAN, WIDTH, PART, BLOCK, LEAN, FLOOR
            )
        elif told > 0:
            parts, _ = figures_whole(list_, SPAN)
        cut, point = Cut(floor, least, centre, reach), uniform(integer(row, SEED), tl.load(positions + line))
        token = settle(own, row, wishes, list_, cut, parts, point, told <= 0, SPAN, BLOCK)
        counted = integer(row, PENALTY_LINE)
        if counted >= 0:
            count = counts + counted * size + token
            tl.store(count, tl.maximum(tl.load(count), 1) + 1)
    tl.store(tokens + line, token)


def sample(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    columns: SamplingColumns,
    out: Chosen,
    form: SamplerForm = PLAIN_FORM,
) -> None:
    """Choose a token for each line of logits.

    Args:
        logits: ``(lines, vocab)``, any float dtype; lines may be further apart than that.
        rows: int32 or int64 ``(lines,)``: the row of each line in ``columns``.
        positions: int64 ``(lines,)``: the position that the new token will have.
        columns: numbers of all rows; counts of chosen tokens are noted there.
        out: of the bucket.
        form: how it is computed.
    """
    lines, size = logits.shape
    if not lines:
        return
    _, stretches, block = out.scores.shape
    words, masks = columns.words, columns.masks
    span = power_of_two(stretches)
    pieces, piece = SAMPLE_PIECES.value, SAMPLE_PIECE.value
    stride = max(piece, size // pieces // 16 * 16)
    line = (logits, logits.stride(0), rows, words, words.shape[1], masks, masks.shape[1])
    wide = {"maxnreg": form.looking_registers, **form.looking.options}
    source = (*line, columns.counts, columns.bias_ids, columns.biases, out.limits)
    _sketch[(lines,)](*source, size, stride, LEAN=form.lean_sample, **wide)
    _prepare[(lines, min(stretches, ceil_div(form.programs, lines)))](
        *source,
        out.scores,
        out.figures,
        size,
        stretches,
        BLOCK=block,
        LEAN=form.lean_reading,
        maxnreg=form.registers,
        **form.reading.options,
    )
    _choose[(lines,)](
        *source,
        out.scores,
        out.figures,
        positions,
        out.tokens,
        size,
        stretches,
        SPAN=span,
        WIDTH=min(block, max(form.together // span, LEAST_WIDTH)),
        PART=min(block, max(form.passing // span, LEAST_WIDTH)),
        BLOCK=block,
        LEAN=form.lean_lists,
        FLOOR=form.lean_floor,
        **wide,
    )
    asked = words[Field.LOGPROBS], words[Field.MASK_LINE], masks
    report(logits, rows, asked, (out.figures, block), out.tokens, (out.logprobs, out.top_ids, out.top_logprobs))
