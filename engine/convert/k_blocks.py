"""ggml's blocks of 256 numbers ("K" types): groups of 16 or 32 with small scales under one half-precision scale.

``engine.convert.ggml`` names the sources of layouts and roundings.
"""

from __future__ import annotations

import numpy as np

from engine.convert.bits import Blocks, Floats, fields, half

NUMBERS = 256


def q2_k(blocks: Blocks) -> Floats:
    """Decode 2-bit blocks: 16 groups, scale and minimum of 4 bits each."""
    small, numbers = blocks[:, :16], fields(blocks[:, 16:80], 2, 32)
    scale = half(blocks[:, 80:82]) * (small & 15).astype(np.float32)
    least = half(blocks[:, 82:84]) * (small >> 4).astype(np.float32)
    return _grouped(numbers.astype(np.float32), scale, least)


def q3_k(blocks: Blocks) -> Floats:
    """Decode 3-bit blocks, the highest bit separate and inverted: 16 groups, scales of 6 bits."""
    high = fields(blocks[:, :32], 1, 32) ^ np.uint8(1)
    low = fields(blocks[:, 32:96], 2, 32)
    packed = blocks[:, 96:108]
    small = fields(packed[:, :8], 4, 8) | (fields(packed[:, 8:], 2, 4) << np.uint8(4))
    scale = half(blocks[:, 108:110]) * (small.astype(np.float32) - 32)
    return _grouped(low.astype(np.float32) - (high << np.uint8(2)), scale)


def q4_k(blocks: Blocks) -> Floats:
    """Decode 4-bit blocks: 8 groups, scale and minimum of 6 bits each."""
    return _grouped(fields(blocks[:, 16:144], 4, 32).astype(np.float32), *_six_bits(blocks))


def q5_k(blocks: Blocks) -> Floats:
    """Decode 5-bit blocks, the highest bit separate; otherwise like 4 bits."""
    high = fields(blocks[:, 16:48], 1, 32) << np.uint8(4)
    return _grouped((fields(blocks[:, 48:176], 4, 32) | high).astype(np.float32), *_six_bits(blocks))


def q6_k(blocks: Blocks) -> Floats:
    """Decode 6-bit blocks, the two highest bits separate: 16 groups, scales of 8 bits."""
    low, high = fields(blocks[:, :128], 4, 64), fields(blocks[:, 128:192], 2, 32)
    scale = half(blocks[:, 208:210]) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return _grouped((low | (high << np.uint8(4))).astype(np.float32) - 32, scale)


def _six_bits(blocks: Blocks) -> tuple[Floats, Floats]:
    """Decode scales and minima of eight groups: 6 bits each in 12 bytes, under two half-precision numbers."""
    packed = blocks[:, 4:16]
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = np.concatenate((first & 63, (third & 15) | (first >> 2 & 48)), axis=1)
    least = np.concatenate((second & 63, (third >> 4) | (second >> 2 & 48)), axis=1)
    return half(blocks[:, :2]) * scale.astype(np.float32), half(blocks[:, 2:4]) * least.astype(np.float32)


def _grouped(numbers: Floats, scale: Floats, least: Floats | None = None) -> Floats:
    """Compute ``scale * number - least`` with a scale and a minimum for each group."""
    result = scale[:, :, None] * numbers.reshape(len(numbers), scale.shape[1], -1)
    if least is not None:
        result -= least[:, :, None]
    return result.reshape(len(numbers), NUMBERS)
