"""Bits of ggml's blocks: halves of bytes, fields of bytes, half-precision numbers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Blocks = NDArray[np.uint8]
"""Bytes of shape ``(N, size)``."""

Floats = NDArray[np.float32]


def half(data: Blocks) -> Floats:
    """Numbers of half precision, widened; shape ``(N, 2 k)`` to ``(N, k)``."""
    return np.ascontiguousarray(data).view("<f2").astype(np.float32)


def nibbles(data: Blocks) -> NDArray[np.uint8]:
    """All lower halves of the bytes, then all upper ones; shape ``(N, k)`` to ``(N, 2 k)``."""
    return np.concatenate((data & np.uint8(15), data >> np.uint8(4)), axis=1)


def fields(data: Blocks, bits: int, run: int) -> NDArray[np.uint8]:
    """Fields of ``bits`` bits: of each run of bytes all lowest ones, then all second, and so on.

    Shape ``(N, k)`` to ``(N, k * 8 / bits)``.
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(1, 1, -1, 1)
    parts = (data.reshape(len(data), -1, 1, run) >> shifts) & np.uint8((1 << bits) - 1)
    return parts.reshape(len(data), -1)
