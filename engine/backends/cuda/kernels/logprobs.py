"""Log-probabilities of chosen tokens and their alternatives, under the model's own distribution within the mask.

Alternatives go by falling logit, equal ones by rising id; each is one more pass over the row, which only rows that
asked pay for.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from engine.backends.common.sampler import LOWEST_LOGPROB

STRETCH = 1_024
"""Logits that are looked at together."""

NO_TOKEN = tl.constexpr(0x7FFFFFFF)
"""Larger than any id."""

LOWEST = tl.constexpr(LOWEST_LOGPROB)


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
def masked(line: MaskedLine, token: tl.tensor) -> tl.tensor:
    """Logits in float32, minus infinity for what the row's mask forbids and behind the vocabulary."""
    raw = tl.load(line.logits + token, mask=token < line.size, other=-float("inf")).to(tl.float32)
    known = (token < line.width * 32) & (line.mask >= 0)
    word = tl.load(line.words + line.mask.to(tl.int64) * line.width + token // 32, mask=known, other=0)
    return tl.where((line.mask < 0) | ((word >> (token % 32)) & 1 == 1), raw, -float("inf"))


@triton.jit
def _next_best(line: MaskedLine, last: tl.tensor, last_id: tl.tensor, BLOCK: tl.constexpr) -> tuple[tl.tensor, ...]:
    """First logit that comes after ``last`` (falling, equal ones by rising id), and its id."""
    best = tl.cast(-float("inf"), tl.float32)
    best_id = tl.cast(NO_TOKEN, tl.int32)
    for start in range(0, line.size, BLOCK):
        token = start + tl.arange(0, BLOCK)
        raw = masked(line, token)
        after = (raw < last) | ((raw == last) & (token > last_id))
        value = tl.where(after & (token < line.size), raw, -float("inf"))
        peak = tl.max(value, 0)
        found = tl.min(tl.where((value == peak) & after & (token < line.size), token, NO_TOKEN), 0)
        better = peak > best
        best = tl.where(better, peak, best)
        best_id = tl.where(better, found, best_id)
    return best, best_id


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
    tokens: tl.tensor,
    logprobs: tl.tensor,
    top_ids: tl.tensor,
    top_logprobs: tl.tensor,
    size: tl.tensor,
    alternatives: tl.tensor,
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
        peak, _ = _next_best(own, float("inf"), -1, BLOCK)
        whole = tl.cast(0.0, tl.float64)
        for start in range(0, size, BLOCK):
            whole += tl.sum(tl.exp(masked(own, start + tl.arange(0, BLOCK)) - peak), 0).to(tl.float64)
        log_whole = tl.log(whole).to(tl.float32)
        raw = tl.load(own.logits + chosen).to(tl.float32)
        tl.store(logprobs + line, tl.maximum(raw - peak - log_whole, LOWEST))
        last = tl.cast(float("inf"), tl.float32)
        last_id = tl.cast(-1, tl.int32)
        for place in range(tl.minimum(count, alternatives)):
            last, last_id = _next_best(own, last, last_id, BLOCK)
            if last > -float("inf"):
                tl.store(top_ids + line * alternatives + place, last_id)
                tl.store(top_logprobs + line * alternatives + place, tl.maximum(last - peak - log_whole, LOWEST))


def report(
    logits: Tensor,
    rows: Tensor,
    asked: tuple[Tensor, Tensor, Tensor],
    tokens: Tensor,
    out: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Log-probabilities of a step's tokens.

    Args:
        logits: ``(lines, vocab)``, any float dtype; lines may be further apart than that.
        rows: int32 ``(lines,)``: the row of each line.
        asked: by row how many alternatives (int32, -1: nothing), and its line of the masks (-1 for none); the masks.
        tokens: int32 ``(lines,)``: what was chosen; nothing is reported of negative ones.
        out: log-probabilities float32 ``(lines,)``; ids int32 and log-probabilities float32 of alternatives,
            ``(lines, most)``, -1 and ``LOWEST_LOGPROB`` behind those that were asked for and that a mask allows.
    """
    lines, size = logits.shape
    wanted, mask_line, masks = asked
    _report[(lines,)](
        logits,
        logits.stride(0),
        rows,
        wanted,
        mask_line,
        masks,
        masks.shape[1],
        tokens,
        *out,
        size,
        out[1].shape[1],
        BLOCK=STRETCH,
    )
