"""Weights of 8-bit floating point numbers (E4M3) with a scale for each output, and the products with them.

A number of a matrix is ``stored * scale[output]``. Many rows are rounded as well, each with a scale of its own, and
multiplied in 8 bits; few rows, whose product waits for the matrix alone, are multiplied as they are. E4M3 has four bits
of exponent, three of fraction, no infinity, and 448 as its largest number (OCP 8-bit floating point specification 1.0).
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
"""Largest number of E4M3. What is larger is saturated or no number, by torch's version: nothing larger is converted."""

LEAST = 2.0**-100
"""A row's largest number is taken as this at least: its inverse is finite, and a row of zeros stays one."""

FEW = 16
"""Rows up to which they are multiplied as they are; as many as a tensor core's operand has at the least."""

ALIGNED = 16
"""Both extents of a matrix that torch multiplies in 8 bits are multiples of it."""


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 numbers of the shape of ``x`` ``(N, K)`` and a scale a row, float32 ``(N, 1)``: ``x ~ numbers * scale``.

    Rounded to nearest even. A row that holds a number which is not finite gets the scale NaN: whatever is computed from
    it is NaN, and nothing else is.
    """
    wide = x.float()
    largest = wide.abs().amax(1, keepdim=True)
    bounded = largest.clamp(min=LEAST)
    numbers = (wide * (LARGEST / bounded)).nan_to_num_(0.0).clamp_(-LARGEST, LARGEST).to(E4M3)
    return numbers, torch.where(largest.isfinite(), bounded / LARGEST, torch.nan)


def multiply_rounded(
    numbers: Tensor, row_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Multiply rounded rows by a matrix.

    Args:
        numbers: E4M3 ``(N, K)``.
        row_scale: float32 ``(N, 1)``.
        weight: E4M3 ``(outputs, K)``.
        scale: float32 ``(outputs,)``.
        bias: of ``dtype``, ``(outputs,)``.
        dtype: of the result.
    """
    if multiplies_rounded(weight) and dtype == torch.bfloat16:
        # Sums of 8-bit products in the tensor core's own precision lose bits that a float32 register keeps: 0.1 % of
        # the result, a hundredth of what rounding to 8 bits costs.
        result: Tensor = torch._scaled_mm(
            numbers,
            weight.t(),
            scale_a=row_scale,
            scale_b=scale.unsqueeze(0),
            bias=bias,
            out_dtype=dtype,
            use_fast_accum=True,
        )
        return result
    y = numbers.float() @ weight.float().t()
    return _closed(y.mul_(row_scale), scale, bias, dtype)


def multiply_few(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply rows that are not rounded; arguments as above."""
    return _closed(x.float() @ weight.float().t(), scale, bias, x.dtype)


def multiply(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply rows, by their number in one way or the other."""
    if len(x) <= FEW:
        return multiply_few(x, weight, scale, bias)
    numbers, row_scale = round_rows(x)
    return multiply_rounded(numbers, row_scale, weight, scale, bias, x.dtype)


def multiplies_rounded(weight: Tensor) -> bool:
    """Whether torch multiplies by this matrix in 8 bits; else the same is computed in float32."""
    aligned = weight.shape[0] % ALIGNED == 0 and weight.shape[1] % ALIGNED == 0
    return aligned and weight.device.type != "cpu"


def _closed(y: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    y = y.mul_(scale)
    if bias is not None:
        y += bias
    return y.to(dtype)
