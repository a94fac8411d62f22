"""Log-probabilities of chosen tokens and their alternatives, under the model's own distribution within the mask.

The sum of all exponentials, and the largest logit of each stretch, come from the sampler's one pass over a row.
Alternatives go by falling logit, equal ones by rising id; for each only the stretch is read that has the best of what
is left.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from engine.backends.common.sampler import LOWEST_LOGPROB
from engine.backends.cuda.kernels.sampling_figures import FIGURES, RAW_PEAK, RAW_SUM
from engine.backends.cuda.kernels.triton_common import Threads, power_of_two

NO_TOKEN = tl.constexpr(0x7FFFFFFF)
"""Larger than any id."""

LOWEST = tl.constexpr(LOWEST_LOGPROB)

THREADS = Threads(4, 1)
"""Threads of a program that looks at one row."""


class MaskedLine(NamedTuple):
    """Logits of one line, and the mask that its row chooses under."""

    logits: Tensor
    size: int
    """Ids of the vocabulary."""
    words: Tensor
    """Masks of all rows."""
    mask: Tensor
    """Index of the row's mask in ``words``; negative for none."""
    width: int
    """Words of a mask."""


@triton.jit
def logits_of(line: MaskedLine, token: tl.tensor) -> tl.tensor:
    """Logits as they lie, minus infinity behind the vocabulary."""
    return tl.load(line.logits + token, mask=token < line.size, other=-float("inf"))


@triton.jit
def masked(line: MaskedLine, token: tl.tensor, logits: tl.tensor) -> tl.tensor:
    """These ids' logits in float32, minus infinity for what the row's mask forbids."""
    raw = logits.to(tl.float32)
    if line.mask >= 0:
        known = token < line.width * 32
        word = tl.load(line.words + line.mask.to(tl.int64) * line.width + token // 32, mask=known, other=0)
        raw = tl.where((word >> (token % 32)) & 1 == 1, raw, -float("inf"))
    return raw


@triton.jit
def _first_after(raw: tl.tensor, token: tl.tensor, last: tl.tensor, last_id: tl.tensor) -> tuple[tl.tensor, ...]:
    """First logit that comes after ``last`` (falling, equal ones by rising id), and its id; minus infinity where there
    is none."""
    after = (raw < last) | ((raw == last) & (token > last_id))
    peak = tl.max(tl.where(after, raw, -float("inf")), 0)
    return peak, tl.min(tl.where((raw == peak) & after, token, NO_TOKEN), 0)


@triton.jit
def _alternatives(
    line: MaskedLine,
    peaks: tl.tensor,
    peak: tl.tensor,
    log_whole: tl.tensor,
    count: tl.tensor,
    top_ids: tl.tensor,
    top_logprobs: tl.tensor,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Store the best ids of a row, as many as it asked for, and their log-probabilities. ``peaks``: largest logit of
    each stretch; ``peak``: of all; ``log_whole``: logarithm of the sum of all exponentials, less that of ``peak``."""
    stretch = tl.arange(0, SPAN)
    # By stretch what was taken from it last. Of equal logits the one in the first stretch has the least id.
    last = tl.full([SPAN], float("inf"), tl.float32)
    last_id = tl.full([SPAN], -1, tl.int32)
    for place in range(count):
        best = tl.max(peaks, 0)
        if best > -float("inf"):
            here = stretch == tl.min(tl.where(peaks == best, stretch, SPAN - 1), 0)
            token = tl.sum(tl.where(here, stretch, 0), 0) * BLOCK + tl.arange(0, BLOCK)
            raw = masked(line, token, logits_of(line, token))
            before = tl.max(tl.where(here, last, -float("inf")), 0)
            value, found = _first_after(raw, token, before, tl.max(tl.where(here, last_id, -1), 0))
            tl.store(top_ids + place, found)
            tl.store(top_logprobs + place, tl.maximum(value - peak - log_whole, LOWEST))
            following, _id = _first_after(raw, token, value, found)
            last, last_id = tl.where(here, value, last), tl.where(here, found, last_id)
            peaks = tl.where(here, following, peaks)


@triton.jit(
    do_not_specialize=("mask_width", "alternatives"), do_not_specialize_on_alignment=("rows", "wanted", "mask_line")
)
def _report(
    logits: tl.tensor,
    logits_row: tl.tensor,
    rows: tl.tensor,
    wanted: tl.tensor,
    mask_line: tl.tensor,
    masks: tl.tensor,
    mask_width: tl.tensor,
    figures: tl.tensor,
    tokens: tl.tensor,
    logprobs: tl.tensor,
    top_ids: tl.tensor,
    top_logprobs: tl.tensor,
    size: tl.tensor,
    stretches: tl.tensor,
    alternatives: tl.tensor,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    line = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + line)
    # Of one type with what it is compared with, whatever the column has: a loop's variable has only one.
    count = tl.load(wanted + row).to(tl.int32)
    chosen = tl.load(tokens + line)
    for place in range(alternatives):
        tl.store(top_ids + line * alternatives + place, -1)
        tl.store(top_logprobs + line * alternatives + place, LOWEST)
    tl.store(logprobs + line, LOWEST)
    if (count >= 0) & (chosen >= 0):
        own = MaskedLine(logits + line * logits_row, size, masks, tl.load(mask_line + row), mask_width)
        stretch = tl.arange(0, SPAN)
        begin, exists = figures + line * stretches * FIGURES + stretch, stretch < stretches
        peaks = tl.load(begin + RAW_PEAK * stretches, mask=exists, other=-float("inf"))
        sums = tl.load(begin + RAW_SUM * stretches, mask=exists, other=0.0)
        peak = tl.max(peaks, 0)
        log_whole = tl.log(tl.sum((sums * tl.exp(peaks - peak)).to(tl.float64), 0)).to(tl.float32)
        raw = tl.load(own.logits + chosen).to(tl.float32)
        tl.store(logprobs + line, tl.maximum(raw - peak - log_whole, LOWEST))
        asked = tl.minimum(count, alternatives)
        ids, values = top_ids + line * alternatives, top_logprobs + line * alternatives
        _alternatives(own, peaks, peak, log_whole, asked, ids, values, SPAN, BLOCK)


def report(
    logits: Tensor,
    rows: Tensor,
    asked: tuple[Tensor, Tensor, Tensor],
    scratch: tuple[Tensor, int],
    tokens: Tensor,
    out: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Log-probabilities of a step's tokens.

    Args:
        logits: ``(lines, vocab)``, any float dtype; lines may be further apart than that.
        rows: int32 ``(lines,)``: the row of each line.
        asked: by row how many alternatives (int32, -1: nothing), and its line of the masks (-1 for none); the masks.
        scratch: figures ``(lines, FIGURES, stretches)`` of these logits, and ids of a stretch.
        tokens: int32 ``(lines,)``: what was chosen; nothing is reported of negative ones.
        out: log-probabilities float32 ``(lines,)``; ids int32 and log-probabilities float32 of alternatives,
            ``(lines, most)``, -1 and ``LOWEST_LOGPROB`` behind those that were asked for and that a mask allows.
    """
    lines, size = logits.shape
    wanted, mask_line, masks = asked
    figures, block = scratch
    _report[(lines,)](
        logits,
        logits.stride(0),
        rows,
        wanted,
        mask_line,
        masks,
        masks.shape[1],
        figures,
        tokens,
        *out,
        size,
        figures.shape[2],
        out[1].shape[1],
        SPAN=power_of_two(figures.shape[2]),
        BLOCK=block,
        **THREADS.options,
    )
