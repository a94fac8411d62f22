"""fp8 weights with float scales: 8-bit numbers and a scale for the matrix, each output or each block.

Formats: DeepSeek-V3's (``weight_scale_inv``, one float for each block of 128 by 128, the last ones truncated; arXiv
2412.19437 section 3.3), and compressed-tensors' ``float-quantized`` (``weight_scale`` for the tensor, each output, or
blocks). In all of them a number is ``stored * scale``, whatever the name of the scale suggests. F8 numbers are those of
the OCP 8-bit floating point specification: E4M3 has no infinity and one NaN, E5M2 is IEEE-like.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.quantised.codec import FLOATS, Present, Source, finite

F8 = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
"""Permitted dtypes of the numbers."""


@dataclass(frozen=True, slots=True)
class ScaledBlocks:
    """Numbers with a scale for each block of ``block`` outputs and inputs; ``block`` (0, 0) means one scale for all,
    and (1, 0) one for each output. The numbers may be fp8 or int8."""

    scale: str
    """Suffix of the scales."""
    block: tuple[int, int]
    axis: int = 0

    @property
    def multiple(self) -> int:
        """Return the slab granularity: slabs hold whole blocks."""
        return max(self.block[0], 1)

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Return the suffixes of numbers and scales."""
        return "weight", self.scale

    def decode(self, source: Source, begin: int, end: int) -> Tensor:
        """See ``Codec.decode``."""
        numbers = source.read("weight", begin, end).float()
        high, wide = self.block
        name = source.name(self.scale)
        if not high:
            return numbers.mul_(finite(source.read(self.scale), name).reshape(()))
        scale = finite(source.read(self.scale, begin // high, -(-end // high)), name)
        if not wide:
            return numbers.mul_(scale.reshape(-1, 1))
        rows = scale.repeat_interleave(high, 0)[: numbers.shape[0]]
        return numbers.mul_(rows.repeat_interleave(wide, 1)[:, : numbers.shape[1]])


def block_scaled(
    present: Present, shape: tuple[int, int], block: tuple[int, int], *, scale: str, numbers: tuple[str, ...]
) -> ScaledBlocks:
    """Build the codec of a matrix with one scale for each block.

    Raises:
        ModelLoadError: a tensor is missing or of another dtype or shape.
    """
    present.require("weight", numbers, shape)
    present.require(scale, FLOATS, (-(-shape[0] // block[0]), -(-shape[1] // block[1])))
    return ScaledBlocks(scale, block)


def row_scaled(present: Present, shape: tuple[int, int], *, scale: str, numbers: tuple[str, ...]) -> ScaledBlocks:
    """Build the codec of a matrix with one scale, or one for each output, depending on the shape of the scales.

    Raises:
        ModelLoadError: a tensor is missing or of another dtype or shape.
    """
    present.require("weight", numbers, shape)
    found = present.require(scale, FLOATS, (), (1,), (1, 1), (shape[0],), (shape[0], 1))
    by_output = math.prod(found.shape) == shape[0] and found.shape not in ((), (1,))
    return ScaledBlocks(scale, (1, 0) if by_output else (0, 0))
