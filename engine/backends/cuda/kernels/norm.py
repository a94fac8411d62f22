"""Root mean square norm with the residual stream's addition in front of it (Zhang and Sennrich, arXiv 1910.07467)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.backends.cuda.kernels.triton_common import narrow, power_of_two


@triton.jit
def _norm(
    x: tl.tensor,
    residual: tl.tensor,
    gain: tl.tensor,
    out: tl.tensor,
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
    if residual is not None:
        # Rounded as the stream is stored: what is normalised is what the next layer adds to.
        stream = residual.dtype.element_ty
        added = value + tl.load(residual + row * SIZE + number, mask=live, other=0.0).to(tl.float32)
        added = narrow(added, stream)
        tl.store(residual + row * SIZE + number, added, mask=live)
        value = added.to(tl.float32)
    mean = tl.sum(value * value, 0) / SIZE
    scale = tl.load(gain + number, mask=live, other=0.0).to(tl.float32) + OFFSET
    normed = value * (1.0 / tl.sqrt_rn(mean + eps)) * scale
    tl.store(out + row * SIZE + number, narrow(normed, out.dtype.element_ty), mask=live)


def rms_norm(
    x: Tensor, residual: Tensor | None, gain: Tensor, out: Tensor, *, eps: float, offset: bool = False
) -> None:
    """Normalise rows.

    Args:
        x: ``(N, size)``; rows may be further apart than that.
        residual: ``(N, size)``, contiguous: ``x`` is added to it in place, and the sum is normalised; None: ``x`` is.
        gain: ``(size,)``.
        out: ``(N, size)``, contiguous; may be ``x`` where there is no residual.
        eps: added to the mean of squares.
        offset: the gain is published less one.
    """
    rows, size = x.shape
    if rows:
        _norm[(rows,)](
            x,
            residual,
            gain,
            out,
            eps,
            x.stride(0),
            SIZE=size,
            WIDTH=power_of_two(size),
            OFFSET=float(offset),
            num_warps=8 if size > 4_096 else 4,
        )
