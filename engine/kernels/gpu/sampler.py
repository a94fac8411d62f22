"""Chooses the next token of every row on the device: the order and formulas of ``docs/sampling.md``.

Three launches. ``_prepare`` (rows times stretches of the vocabulary): mask, penalties, and the largest score of each
stretch. ``_choose`` (rows): the maximum, or a draw by the request's own counter generator under top-k, top-p and min-p;
then the stop test and the count of the chosen token. ``_report`` (rows): log-probabilities of rows that asked.

A row is computed by one order of roundings, whatever is beside it. Draws are the same bits as on the CPU; the token is
the same unless the point falls within rounding of the border between two tokens, because exponentials differ in their
last bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.gpu.dialect import ceil_div, power_of_two
from engine.kernels.gpu.draw import NO_TOKEN, greatest_floor, invert, mass_above, uniform
from engine.kernels.gpu.logprobs import masked, report
from engine.penalties import LARGEST
from engine.scheduler.plan import FAILED

STRETCH = 1_024
"""Scores that are looked at together."""

LARGEST_SCORE = tl.constexpr(LARGEST)
NO_CHOICE = tl.constexpr(FAILED)

ROW_STATE = (
    "rows", "positions", "temperature", "top_k", "top_p", "log_min_p", "seed", "limit", "stop_ids", "mask_line",
    "penalty_line", "repetition", "presence", "frequency",
)  # fmt: skip
"""Columns that lie one behind another in the words of all rows: each begins wherever the one before it ends, so no form
of a kernel may rest on where."""


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The sampling numbers of all rows, on the device; a step names its rows by their places here."""

    temperature: Tensor
    """float32, or float64 that is rounded to it; 0: the maximum."""
    top_k: Tensor
    """int32 or int64; 0 for no limit."""
    top_p: Tensor
    """float64 in (0, 1]."""
    log_min_p: Tensor
    """As ``temperature``: the logarithm of min-p; minus infinity for none."""
    seed: Tensor
    """int64, the bits of the unsigned seed."""
    limit: Tensor
    """int64: tokens of prompt and output at which the output ends."""
    stop_ids: Tensor
    """int32 or int64 ``(rows, width)``, padded with -1."""
    logprobs: Tensor
    """int32 or int64: -1 none, 0 the chosen token's, n with n alternatives."""
    penalty_line: Tensor
    """int32 or int64: the row's line of ``counts``, -1 for none."""
    mask_line: Tensor
    """int32 or int64: the row's line of ``masks`` in this step, -1 for none."""
    repetition: Tensor
    """As ``temperature``, and so are the next two."""
    presence: Tensor
    frequency: Tensor
    counts: Tensor
    """int32 ``(lines, vocab)``: 0 for an id that did not occur, else 1 and its occurrences in the output."""
    masks: Tensor
    """int32 ``(lines, words)``: bit ``i % 32`` of word ``i // 32`` allows token ``i``; further ids are forbidden."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """What a step gives, a line for each of its rows."""

    tokens: Tensor
    """int32; ``FAILED`` where the logits were not finite."""
    done: Tensor
    """int32: 1 where the output ends with this token."""
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
        """Room for a bucket."""
        return cls(
            torch.zeros(rows, dtype=torch.int32, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
            torch.zeros(rows, device=device),
            torch.zeros(rows, alternatives, dtype=torch.int32, device=device),
            torch.zeros(rows, alternatives, device=device),
            torch.zeros(rows, vocab, device=device),
            torch.zeros(rows, ceil_div(vocab, STRETCH), 2, device=device),
        )


@triton.jit(do_not_specialize=("mask_width",), do_not_specialize_on_alignment=ROW_STATE)
def _prepare(
    logits: tl.tensor,
    logits_row: tl.tensor,
    rows: tl.tensor,
    mask_line: tl.tensor,
    masks: tl.tensor,
    mask_width: tl.tensor,
    penalty_line: tl.tensor,
    repetition: tl.tensor,
    presence: tl.tensor,
    frequency: tl.tensor,
    counts: tl.tensor,
    scores: tl.tensor,
    peaks: tl.tensor,
    size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    line = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + line)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    raw = masked(logits + line * logits_row, token, size, masks, tl.load(mask_line + row), mask_width)
    score = raw
    place = tl.load(penalty_line + row)
    if place >= 0:
        factor = tl.load(repetition + row).to(tl.float32)
        once = tl.load(presence + row).to(tl.float32)
        each = tl.load(frequency + row).to(tl.float32)
        seen = tl.load(counts + place.to(tl.int64) * size + token, mask=token < size, other=0)
        changed = tl.where(raw > 0, tl.div_rn(raw, factor + raw * 0.0), raw * factor)
        changed -= each * (seen - 1).to(tl.float32) + once * (seen > 1).to(tl.float32)
        # By comparison, so that what is no number stays none.
        changed = tl.where(changed > LARGEST_SCORE, LARGEST_SCORE, changed)
        score = tl.where(seen > 0, changed, raw)
    tl.store(scores + line * size + token, score, mask=token < size)
    broken = tl.sum((raw != raw).to(tl.int32), 0) > 0
    out = peaks + (line * tl.num_programs(1) + tl.program_id(1)) * 2
    tl.store(out, tl.where(broken, float("nan"), tl.max(tl.where(raw == raw, raw, -float("inf")), 0)))
    tl.store(out + 1, tl.max(tl.where(score == score, score, -float("inf")), 0))


@triton.jit(do_not_specialize_on_alignment=ROW_STATE)
def _choose(
    scores: tl.tensor,
    peaks: tl.tensor,
    rows: tl.tensor,
    positions: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    log_min_p: tl.tensor,
    seed: tl.tensor,
    limit: tl.tensor,
    stop_ids: tl.tensor,
    penalty_line: tl.tensor,
    counts: tl.tensor,
    tokens: tl.tensor,
    done: tl.tensor,
    size: tl.tensor,
    num_stretches: tl.tensor,
    stop_width: tl.tensor,
    STRETCHES: tl.constexpr,
    STOPS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    line = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + line)
    position = tl.load(positions + line)
    scores += line * size
    stretch = tl.arange(0, STRETCHES)
    exists = stretch < num_stretches
    raw_peaks = tl.load(peaks + (line * num_stretches + stretch) * 2, mask=exists, other=-float("inf"))
    score_peaks = tl.load(peaks + (line * num_stretches + stretch) * 2 + 1, mask=exists, other=-float("inf"))
    broken = tl.sum((raw_peaks != raw_peaks).to(tl.int32), 0) > 0
    raw_peak = tl.max(tl.where(raw_peaks == raw_peaks, raw_peaks, -float("inf")), 0)
    peak = tl.max(score_peaks, 0)
    token = tl.cast(NO_CHOICE, tl.int32)
    if (broken == 0) & (raw_peak > -float("inf")) & (raw_peak < float("inf")):
        heat = tl.load(temperature + row).to(tl.float32)
        if heat > 0:
            floor = tl.cast(0, tl.uint32)
            most = tl.load(top_k + row)
            if most > 0:
                floor = greatest_floor(scores, size, peak, heat, floor, most.to(tl.float64), True, BLOCK)
            share = tl.load(top_p + row)
            if share < 1:
                whole = mass_above(scores, size, peak, heat, floor, False, BLOCK)
                floor = greatest_floor(scores, size, peak, heat, floor, share * whole, False, BLOCK)
            point = uniform(tl.load(seed + row), position)
            least = tl.load(log_min_p + row).to(tl.float32)
            token = invert(scores, size, peak, heat, floor, least, point, BLOCK)
            token = tl.minimum(token, size - 1).to(tl.int32)
        else:
            first = tl.min(tl.where(exists & (score_peaks == peak), stretch, STRETCHES - 1), 0)
            place = first * BLOCK + tl.arange(0, BLOCK)
            score = tl.load(scores + place, mask=place < size, other=-float("inf"))
            token = tl.min(tl.where((score == peak) & (place < size), place, NO_TOKEN), 0).to(tl.int32)
        counted = tl.load(penalty_line + row)
        if counted >= 0:
            count = counts + counted.to(tl.int64) * size + token
            tl.store(count, tl.maximum(tl.load(count), 1) + 1)
    stop = tl.arange(0, STOPS)
    known = tl.load(stop_ids + row.to(tl.int64) * stop_width + stop, mask=stop < stop_width, other=-1)
    stopped = tl.sum(((known == token) & (known >= 0)).to(tl.int32), 0) > 0
    ends = stopped | (position + 1 >= tl.load(limit + row)) | (token < 0)
    tl.store(tokens + line, token)
    tl.store(done + line, ends.to(tl.int32))


def sample(logits: Tensor, rows: Tensor, positions: Tensor, state: SamplingRows, out: Chosen) -> None:
    """Choose a token for each line of logits.

    Args:
        logits: ``(lines, vocab)``, any float dtype; lines may be further apart than that.
        rows: int32 or int64 ``(lines,)``: the row of each line in ``state``.
        positions: int64 ``(lines,)``: the position that the new token will have.
        state: numbers of all rows; counts of chosen tokens are noted there.
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
        state.mask_line,
        state.masks,
        state.masks.shape[1],
        state.penalty_line,
        state.repetition,
        state.presence,
        state.frequency,
        state.counts,
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
        state.temperature,
        state.top_k,
        state.top_p,
        state.log_min_p,
        state.seed,
        state.limit,
        state.stop_ids,
        state.penalty_line,
        state.counts,
        out.tokens,
        out.done,
        size,
        stretches,
        state.stop_ids.shape[1],
        STRETCHES=power_of_two(stretches),
        STOPS=power_of_two(state.stop_ids.shape[1]),
        BLOCK=STRETCH,
    )
    asked = state.logprobs, state.mask_line, state.masks
    report(logits, rows, asked, out.tokens, (out.logprobs, out.top_ids, out.top_logprobs))
