"""Lists of a row's scores, and what all searches in them share: figures beside a list, and the order of numbers.

``engine.backends.cuda.kernels.sampling_cut`` says what a list is."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from engine.backends.cuda.kernels.sampling_figures import MORE, MORE_WEIGHT
from engine.backends.cuda.kernels.triton_common import EMULATED

BY_COUNT = tl.constexpr(0)
BY_WEIGHT = tl.constexpr(1)
BY_DISTANCE = tl.constexpr(2)
"""Stages of a cut: top-k, top-p, typical-p."""

STORE_IF = tl.constexpr("{ .reg .pred p; setp.ne.u32 p, $3, 0; @p st.global.b32 [$1], $2; mov.b32 $0, 0; }")
"""A store of 32 bits where a condition holds."""

HALVES = tl.constexpr(10)
"""Steps of a search that halve the distance, before those that end at a key."""

LONG, VERY_LONG = tl.constexpr(6_144.0), tl.constexpr(49_152.0)
"""Scores of a list from which on it is looked at once and twice more before it is shortened."""

MOST_STEPS = tl.constexpr(40)
"""Steps of a search: 32 suffice; a bound, so that no rounding makes one endless."""


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
def figure(list_: List, column: tl.constexpr, SPAN: tl.constexpr) -> tl.tensor:
    """A figure of all stretches; 0 behind them."""
    stretch = tl.arange(0, SPAN)
    return tl.load(list_.figures + column * list_.stretches + stretch, mask=stretch < list_.stretches, other=0.0)


@triton.jit
def more_of(list_: List, stage: tl.tensor, SPAN: tl.constexpr) -> tl.tensor:
    """Number or weight of what lies above the list; float64."""
    weight = figure(list_, MORE_WEIGHT, SPAN).to(tl.float64)
    return tl.sum(tl.where(stage == BY_COUNT, figure(list_, MORE, SPAN).to(tl.float64), weight), 0)


@triton.jit
def halved(
    begin: tl.tensor, end: tl.tensor, bottom: tl.tensor, top: tl.tensor, mark: tl.tensor, enough: tl.tensor
) -> tuple[tl.tensor, ...]:
    """What is left of a stretch of scores, and of its finite part, when it is known what a mark keeps."""
    begin, bottom = tl.where(enough, tl.maximum(begin, mark), begin), tl.where(enough, tl.maximum(bottom, mark), bottom)
    end, top = tl.where(enough, end, tl.minimum(end, mark)), tl.where(enough, top, tl.minimum(top, mark))
    return begin, end, bottom, top


@triton.jit
def list_part(target: tl.tensor, score: tl.tensor, inside: tl.tensor, SCATTERED: tl.constexpr) -> tl.tensor:
    """Store the scores that are inside, close together; gives their number. ``SCATTERED``: each thread stores what it
    has, and nothing in this launch reads it; Triton would first pass addresses, scores and conditions to other threads,
    through shared memory, which takes longer than all else."""
    place = tl.cumsum(inside.to(tl.int32), 0) - 1
    if SCATTERED and not EMULATED:
        tl.inline_asm_elementwise(
            STORE_IF,
            "=r,l,r,r",
            [(target + place).to(tl.int64), score.to(tl.int32, bitcast=True), inside.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(target + place, score, mask=inside)
    return tl.sum(inside.to(tl.int32), 0)
