"""mxfp4 as published for gpt-oss: 32 4-bit numbers with a power of two (OCP microscaling formats, version 1.0).

``X_blocks`` uint8 of shape ``(experts, outputs, inputs / 32, 16)`` with two E2M1 numbers in a byte, the lower half
first, and ``X_scales`` uint8 of ``(experts, outputs, inputs / 32)`` in E8M0: the exponent plus 127, 255 for NaN.
Decoded here as ``(experts * outputs, inputs)``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import ModelLoadError
from engine.model.quantised.codec import Present, Source

BLOCK = 32
"""Number of values that share an exponent."""

BIAS = 127
NOT_A_NUMBER = 255

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of the 4-bit codes."""


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """Matrices of all experts, stacked along the outputs."""

    blocks: str
    scales: str
    axis: int = 0
    multiple: int = 1

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Return the suffixes of numbers and exponents."""
        return self.blocks, self.scales

    def decode(self, source: Source, begin: int, end: int) -> Tensor:
        """See ``Codec.decode``."""
        scales = source.read(self.scales, begin, end, lead=2)
        if bool((scales == NOT_A_NUMBER).any()):
            raise ModelLoadError(f"tensor {source.name(self.scales)} holds a scale that is not a number")
        return decode_blocks(source.read(self.blocks, begin, end, lead=2), scales)


def decode_blocks(blocks: Tensor, scales: Tensor) -> Tensor:
    """Decode ``(..., G, 16)`` bytes of numbers and ``(..., G)`` exponents to float32 of shape ``(..., G * 32)``."""
    table = torch.tensor(E2M1)
    pairs = torch.stack((table[(blocks & 15).int()], table[(blocks >> 4).int()]), -1)
    return torch.ldexp(pairs.flatten(-2), (scales.int() - BIAS).unsqueeze(-1)).flatten(-2)


def mxfp4(present: Present, stem: str, shape: tuple[int, int, int]) -> Mxfp4:
    """Build the codec of the matrices of a layer's experts.

    Args:
        present: tensors that the checkpoint holds for the module.
        stem: ``gate_up_proj`` or ``down_proj``.
        shape: experts, outputs and inputs.

    Raises:
        ModelLoadError: a tensor is missing or of another dtype or shape.
    """
    experts, outputs, inputs = shape
    if inputs % BLOCK:
        raise ModelLoadError(f"module {present.module} with {inputs} inputs cannot be mxfp4: blocks have {BLOCK}")
    blocks, scales = f"{stem}_blocks", f"{stem}_scales"
    present.require(blocks, ("U8",), (experts, outputs, inputs // BLOCK, BLOCK // 2))
    present.require(scales, ("U8",), (experts, outputs, inputs // BLOCK))
    return Mxfp4(blocks, scales)
