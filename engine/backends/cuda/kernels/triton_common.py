"""Functions that the Triton kernels share: products, roundings, loads of tiles, and the reach of a token.

The kernels are Triton programs (Tillet et al., MAPL 2019). They run on a GPU, and on a CPU under Triton's interpreter
(``TRITON_INTERPRET=1``, which has to be set before this package is imported). The interpreter keeps bfloat16 as bare
bits: it would multiply the bits, and cut instead of rounding. ``dot`` and ``narrow`` do there what a GPU does.

In kernels, lower case names are values, addresses, or named tuples of these; upper case ones are fixed when a kernel is
compiled: numbers, or frozen dataclasses.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

EMULATED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether kernels run under the interpreter."""

LOG2_E = tl.constexpr(1.4426950408889634)
"""Scores are kept as powers of two, the exponential that GPUs have."""

LEAST_DOT = 16
"""Least extent of a product's operands on a GPU."""


class Threads(NamedTuple):
    """Number of threads that run a kernel, and number of tiles that it has under way."""

    warps: int = 4
    stages: int = 2

    @property
    def options(self) -> dict[str, int]:
        """Options of a launch, as Triton names them."""
        return {"num_warps": self.warps, "num_stages": self.stages}


PLAIN_LAUNCH = Threads()


def power_of_two(number: int, least: int = 1) -> int:
    """The least power of two that is neither below ``number`` nor below ``least``."""
    return max(least, 1 << max(number - 1, 0).bit_length())


def ceil_div(number: int, divisor: int) -> int:
    """The quotient, rounded up."""
    return -(-number // divisor)


@triton.jit
def first_seen(position: tl.tensor, REACH: tl.constexpr) -> tl.tensor:
    """The first position that the token at ``position`` attends to under a ``Reach``."""
    if REACH.kind == "window":
        first = tl.maximum(position - REACH.size + 1, 0)
    elif REACH.kind == "chunk":
        first = position // REACH.size * REACH.size
    else:
        first = position * 0
    return first


@triton.jit
def load_lines(
    address: tl.tensor, live: tl.tensor, start: tl.tensor, WIDTH: tl.constexpr, size: tl.tensor
) -> tl.tensor:
    """Numbers ``start .. start + WIDTH`` of the lines at these addresses; zeros from ``size`` on and for lines that
    are not live."""
    number = start + tl.arange(0, WIDTH)
    return tl.load(address[:, None] + number[None, :], mask=live[:, None] & (number[None, :] < size), other=0.0)


@triton.jit
def store_lines(address: tl.tensor, live: tl.tensor, start: tl.tensor, values: tl.tensor, size: tl.tensor) -> None:
    """Round values and store them as numbers from ``start`` on of the lines at these addresses; nothing from ``size``
    on, and nothing to lines that are not live."""
    number = start + tl.arange(0, values.shape[1])
    rounded = narrow(values, address.dtype.element_ty)
    tl.store(address[:, None] + number[None, :], rounded, mask=live[:, None] & (number[None, :] < size))


@triton.jit
def dot(a: tl.tensor, b: tl.tensor, total: tl.tensor) -> tl.tensor:
    """``total + a b`` in float32."""
    if EMULATED:
        total += tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        total = tl.dot(a, b, total, input_precision="ieee")
    return total


@triton.jit
def fused(a: tl.tensor, b: tl.tensor, c: tl.tensor) -> tl.tensor:
    """``a b + c`` in float32, rounded once on a GPU whatever stands beside it, which would decide a compiler."""
    if EMULATED:
        result = a * b + c
    else:
        result = tl.fma(a, b, c)
    return result


@triton.jit
def narrow(x: tl.tensor, TYPE: tl.constexpr) -> tl.tensor:
    """Float32 numbers in another type, to nearest even."""
    if EMULATED and TYPE == tl.bfloat16:  # noqa: SIM300 - the constant is TYPE
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)
    return x.to(TYPE)


@triton.jit
def narrow_e4m3(x: tl.tensor) -> tl.tensor:
    """Float32 numbers of at most 448 as E4M3, to nearest even; the interpreter would round halves up, and lose what
    carries into the exponent."""
    if EMULATED:
        exponent = (x.to(tl.uint32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        step = tl.maximum(exponent, 0.015625) * 0.125
        # Numbers of this size have no fraction.
        x = ((x / step + 12582912.0) - 12582912.0) * step
    return x.to(tl.float8e4nv)


@triton.jit
def tanh(x: tl.tensor) -> tl.tensor:
    """The hyperbolic tangent in float32, to about 1e-7; exact at the ends."""
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def sigmoid(x: tl.tensor) -> tl.tensor:
    """The logistic function in float32."""
    return 1.0 / (1.0 + tl.exp(-x))
