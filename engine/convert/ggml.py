"""ggml's number types: block layout of each, and decoding to float32.

Layouts are those of ggml-common.h; decoding rounds as ggml's own reference does (``dequantize_row_*``): products of
float32, in that order. Blocks of 256 numbers are in ``engine.convert.k_blocks``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.convert import k_blocks
from engine.convert.bits import Blocks, Floats, half, nibbles

CODEBOOK = np.array((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), np.float32)
"""Values of IQ4_NL's 4-bit codes."""

E2M1_TWICE = np.array((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), np.float32)
"""Values of MXFP4's codes, doubled, so its exponents are reduced by one."""


@dataclass(frozen=True, slots=True)
class BlockType:
    """A number type: each block holds ``numbers`` values in ``size`` bytes."""

    name: str
    numbers: int
    size: int
    decode: Callable[[Blocks], Floats]
    """uint8 of shape ``(N, size)`` to float32 of shape ``(N, numbers)``."""

    @property
    def plain(self) -> bool:
        """Whether each value is stored separately, without a block scale."""
        return self.numbers == 1


def _f32(blocks: Blocks) -> Floats:
    return np.ascontiguousarray(blocks).view("<f4").astype(np.float32)


def _bf16(blocks: Blocks) -> Floats:
    return (np.ascontiguousarray(blocks).view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q4_0(blocks: Blocks) -> Floats:
    return half(blocks[:, :2]) * (nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def _q4_1(blocks: Blocks) -> Floats:
    return half(blocks[:, :2]) * nibbles(blocks[:, 4:]).astype(np.float32) + half(blocks[:, 2:4])


def _fifth_bits(blocks: Blocks) -> NDArray[np.uint8]:
    return np.unpackbits(np.ascontiguousarray(blocks), axis=1, bitorder="little") << np.uint8(4)


def _q5_0(blocks: Blocks) -> Floats:
    numbers = nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return half(blocks[:, :2]) * (numbers.astype(np.float32) - 16)


def _q5_1(blocks: Blocks) -> Floats:
    numbers = nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return half(blocks[:, :2]) * numbers.astype(np.float32) + half(blocks[:, 2:4])


def _q8_0(blocks: Blocks) -> Floats:
    return half(blocks[:, :2]) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _iq4_nl(blocks: Blocks) -> Floats:
    return half(blocks[:, :2]) * CODEBOOK[nibbles(blocks[:, 2:])]


def _mxfp4(blocks: Blocks) -> Floats:
    # The exponent of a doubled number is 2 ** (e - 128), below the smallest normal one for e of 0 and 1.
    scale = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128).astype(np.float32)
    return scale * E2M1_TWICE[nibbles(blocks[:, 1:])]


TYPES = {
    0: BlockType("F32", 1, 4, _f32),
    1: BlockType("F16", 1, 2, half),
    2: BlockType("Q4_0", 32, 18, _q4_0),
    3: BlockType("Q4_1", 32, 20, _q4_1),
    6: BlockType("Q5_0", 32, 22, _q5_0),
    7: BlockType("Q5_1", 32, 24, _q5_1),
    8: BlockType("Q8_0", 32, 34, _q8_0),
    10: BlockType("Q2_K", 256, 84, k_blocks.q2_k),
    11: BlockType("Q3_K", 256, 110, k_blocks.q3_k),
    12: BlockType("Q4_K", 256, 144, k_blocks.q4_k),
    13: BlockType("Q5_K", 256, 176, k_blocks.q5_k),
    14: BlockType("Q6_K", 256, 210, k_blocks.q6_k),
    20: BlockType("IQ4_NL", 32, 18, _iq4_nl),
    30: BlockType("BF16", 1, 2, _bf16),
    39: BlockType("MXFP4", 32, 17, _mxfp4),
}
"""Every supported type, by its number in the file."""
