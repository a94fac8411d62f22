"""Rows rounded to 8 bits with a scale each, behind their norm where there is one, in one pass.

What ``engine.model.layers.scaled.round_rows`` computes, with the norm of ``norm`` in front: a program has a whole row
in registers, so its largest number is known without a second look at memory.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.backends.cuda.kernels.triton_common import narrow, narrow_e4m3, power_of_two
from engine.model.layers.scaled import LARGEST, LEAST

HIGHEST = tl.constexpr(LARGEST)
LOWEST = tl.constexpr(LEAST)
INFINITY = tl.constexpr(float("inf"))

WIDE_ROW = 8_192
"""Numbers of a row from which on sixteen warps share it: thirty-two or fewer for each thread up to 16,384."""


@triton.jit
def _round(
    x: tl.tensor,
    gain: tl.tensor,
    out: tl.tensor,
    scales: tl.tensor,
    eps: tl.tensor,
    x_row: tl.tensor,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    OFFSET: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, WIDTH)
    live = number < SIZE
    value = tl.load(x + row * x_row + number, mask=live, other=0.0).to(tl.float32)
    if gain is not None:
        mean = tl.sum(value * value, 0) / SIZE
        factor = tl.load(gain + number, mask=live, other=0.0).to(tl.float32) + OFFSET
        # Rounded as the norm alone leaves it.
        value = narrow(value * (1.0 / tl.sqrt_rn(mean + eps)) * factor, x.dtype.element_ty).to(tl.float32)
    # A maximum drops what is no number, and a sum of zeros does not.
    size = tl.abs(value)
    broken = tl.sum(tl.where(size < INFINITY, 0, 1), 0)
    bounded = tl.maximum(tl.max(tl.where(size < INFINITY, size, 0.0), 0), LOWEST)
    inverse = tl.div_rn(tl.full([1], HIGHEST, tl.float32), bounded + tl.zeros([1], tl.float32))
    scaled = tl.where(size < INFINITY, value * inverse, 0.0)
    scaled = tl.minimum(tl.maximum(scaled, -HIGHEST), HIGHEST)
    tl.store(out + row * SIZE + number, narrow_e4m3(scaled), mask=live)
    scale = tl.div_rn(bounded + tl.zeros([1], tl.float32), tl.full([1], HIGHEST, tl.float32))
    scale = tl.where(broken == 0, scale, float("nan"))
    tl.store(scales + row + tl.arange(0, 1), scale)


def round_rows(
    x: Tensor, out: Tensor, scales: Tensor, *, gain: Tensor | None = None, eps: float = 0.0, offset: bool = False
) -> None:
    """Round rows.

    Args:
        x: ``(N, size)``; rows may be further apart than that.
        out: E4M3 ``(N, size)``, contiguous.
        scales: float32 ``(N, 1)``, contiguous.
        gain: of the norm in front; None: rows are taken as they are.
        eps: added to the mean of squares.
        offset: the gain is published less one.
    """
    rows, size = x.shape
    if rows:
        _round[(rows,)](
            x,
            gain,
            out,
            scales,
            eps,
            x.stride(0),
            SIZE=size,
            WIDTH=power_of_two(size),
            OFFSET=float(offset),
            num_warps=16 if size > WIDE_ROW else 8 if size > WIDE_ROW // 2 else 4,
        )
