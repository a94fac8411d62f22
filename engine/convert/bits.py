"""Bit fields of ggml's blocks: nibbles, smaller fields, half-precision numbers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Blocks = NDArray[np.uint8]
"""Bytes of shape ``(N, size)``."""

Floats = NDArray[np.float32]


def half(data: Blocks) -> Floats:
    """Convert half-precision numbers to float32; shape ``(N, 2 k)`` to ``(N, k)``."""
    return np.ascontiguousarray(data).view("<f2").astype(np.float32)


def nibbles(data: Blocks) -> NDArray[np.uint8]:
    """Unpack nibbles, all lower ones of the bytes before all upper ones; shape ``(N, k)`` to ``(N, 2 k)``."""
    return np.concatenate((data & np.uint8(15), data >> np.uint8(4)), axis=1)


def fields(data: Blocks, bits: int, run: int) -> NDArray[np.uint8]:
    """Unpack fields of ``bits`` bits: for each run of bytes all lowest fields, then all second ones, and so on.

    Shape ``(N, k)`` to ``(N, k * 8 / bits)``.
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(1, 1, -1, 1)
    parts = (data.reshape(len(data), -1, 1, run) >> shifts) & np.uint8((1 << bits) - 1)
    return parts.reshape(len(data), -1)
