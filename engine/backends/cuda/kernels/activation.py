"""What stands between the two maps of a gated MLP: SwiGLU, GeGLU (Shazeer, arXiv 2002.05202), gpt-oss' clamped gate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import triton
import triton.language as tl
from torch import Tensor

from engine.backends.cuda.kernels.triton_common import ceil_div, narrow, sigmoid, tanh

AT_ONCE = 1_024
"""Numbers of a row that one program computes."""

SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)
CUBE = tl.constexpr(0.044715)
"""Coefficient of the approximation of GELU by a hyperbolic tangent (Hendrycks and Gimpel, arXiv 1606.08415)."""

KINDS = {"silu": 0, "gelu": 1, "clamped": 2}


@dataclass(frozen=True, slots=True)
class Gate:
    """Which gate: ``silu`` and ``gelu`` of rows that hold all gates, then all inputs; ``clamped`` of neighbours."""

    kind: Literal["silu", "gelu", "clamped"] = "silu"
    alpha: float = 1.702
    """Factor of the gate inside the sigmoid of ``clamped``."""
    limit: float = 7.0
    """Bound of ``clamped``: gates are clamped from above, inputs on both sides."""


@triton.jit
def gated(gate: tl.tensor, up: tl.tensor, alpha: tl.tensor, limit: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """One gated number, float32."""
    if KIND == 0:
        result = gate * sigmoid(gate) * up
    elif KIND == 1:
        # Constants second: the interpreter keeps a product that begins with one as a constant.
        curve = (gate + gate * CUBE * gate * gate) * SQRT_2_OVER_PI
        result = 0.5 * gate * (1.0 + tanh(curve)) * up
    else:
        # Comparisons, so that what is no number stays none.
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        result = (up + 1.0) * gate * sigmoid(gate * alpha)
    return result


@triton.jit
def _activate(
    x: tl.tensor,
    out: tl.tensor,
    alpha: tl.tensor,
    limit: tl.tensor,
    x_row: tl.tensor,
    inner: tl.tensor,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    live = number < inner
    if KIND == 2:
        first, second = 2 * number, 2 * number + 1
    else:
        first, second = number, inner + number
    gate = tl.load(x + row * x_row + first, mask=live, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_row + second, mask=live, other=0.0).to(tl.float32)
    result = gated(gate, up, alpha, limit, KIND)
    tl.store(out + row * inner + number, narrow(result, out.dtype.element_ty), mask=live)


def activate(x: Tensor, gate: Gate, out: Tensor) -> None:
    """Apply to rows ``(N, 2 I)``, which may be further apart than that; ``out`` is ``(N, I)``, contiguous."""
    rows, inner = out.shape
    if rows:
        _activate[(rows, ceil_div(inner, AT_ONCE))](
            x, out, gate.alpha, gate.limit, x.stride(0), inner, KIND=KINDS[gate.kind], WIDTH=AT_ONCE
        )
