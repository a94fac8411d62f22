"""Weights in the form that the compiled kernels read: panels of 32 outputs (see ``csrc/linear.c``).

Plain tensor operations, the same on every device. A packed weight of shape ``(N, K)`` has the shape ``(ceil(N / 32), K'
/ d, 32, d)``: ``d`` inputs lie together (1 of float32, 2 of bfloat16, 4 of int8) and ``K'`` is ``K`` rounded up to what
one instruction takes. What is added is zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.backends.native.abi import PANEL, Type
from engine.model.layers.layers import quantise_rows

INPUTS_TOGETHER = {torch.float32: 1, torch.bfloat16: 2, torch.int8: 4}
"""Inputs of one output that are neighbours in memory."""

INPUT_STEP = {torch.float32: 1, torch.bfloat16: 32, torch.int8: 64}
"""Inputs are padded to a multiple of this."""

TYPES = {torch.float32: Type.F32, torch.bfloat16: Type.BF16, torch.int8: Type.INT8}
"""Names of the dtypes on the other side."""

FED = {torch.float32: torch.float32, torch.bfloat16: torch.float32, torch.int8: torch.int16}
"""What products are fed by kernels without dot products: bfloat16 as float32, bytes as numbers of 16 bits."""

FED_TO_DOTS = {torch.float32: torch.float32, torch.bfloat16: torch.bfloat16, torch.int8: torch.uint8}
"""What products are fed by kernels with dot products."""

ZERO_BYTE = 128
"""Activations travel as unsigned bytes around this."""


@dataclass(frozen=True, slots=True)
class Compression:
    """What belongs to a compressed weight (``engine.backends.native.compression``)."""

    palette: Tensor
    """uint8, the upper bytes that four bits name."""
    starts: Tensor
    """int32, for each chunk where its patches begin, and their end."""
    patches: Tensor
    """int32: place in the chunk in the upper 16 bits, the weight in the lower."""
    shape: tuple[int, ...]
    """Shape of the weight before packing."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed weight and what belongs to it."""

    weight: Tensor
    inputs: int
    outputs: int
    bias: Tensor | None = None
    """float32, padded to whole panels."""
    scale: Tensor | None = None
    """Scales of int8 weights: float32, one for each output."""
    sums: Tensor | None = None
    """Corrections of int8 weights: 128 times each output's sum over its inputs, float32; activations are bytes offset
    by 128."""
    compression: Compression | None = None

    @property
    def dtype(self) -> Type:
        """The dtype as the kernels call it; a compressed weight is multiplied as bfloat16."""
        return Type.BF16 if self.compression is not None else TYPES[self.weight.dtype]


def padded_inputs(inputs: int, dtype: torch.dtype) -> int:
    """Length of an operand's row."""
    step = INPUT_STEP[dtype]
    return -(-inputs // step) * step


def pack(weight: Tensor, bias: Tensor | None = None, *, int8: bool = False) -> Packed:
    """Pack a weight of shape ``(N, K)``, quantised to int8 with a scale an output when asked."""
    outputs, inputs = weight.shape
    scale = sums = None
    if int8:
        weight, scale = quantise_rows(weight.float())
        sums = _panels_of(weight.sum(1, dtype=torch.int32).float() * ZERO_BYTE)
        scale = _panels_of(scale.flatten())
    together = INPUTS_TOGETHER[weight.dtype]
    wide, tall = padded_inputs(inputs, weight.dtype), -(-outputs // PANEL) * PANEL
    padded = F.pad(weight, (0, wide - inputs, 0, tall - outputs))
    packed = padded.view(-1, PANEL, wide // together, together).permute(0, 2, 1, 3).contiguous()
    return Packed(packed, inputs, outputs, None if bias is None else _panels_of(bias.float()), scale, sums)


def interleave(gate: Tensor, up: Tensor) -> Tensor:
    """Rows of two maps (or biases) in alternating runs of 16, as a SWIGLU panel holds them; zeros behind the last."""
    inner, half = gate.shape[0], PANEL // 2
    missing = -inner % half
    pads = (0,) * (2 * (gate.dim() - 1)) + (0, missing)
    parts = [F.pad(part, pads).view(-1, half, *gate.shape[1:]) for part in (gate, up)]
    return torch.stack(parts, 1).flatten(0, 2)


def _panels_of(values: Tensor) -> Tensor:
    return F.pad(values.contiguous(), (0, -len(values) % PANEL)).contiguous()
