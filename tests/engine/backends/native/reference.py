"""Specifications of the compiled kernels, in plain tensor operations.

Rows are float32 unless a function says otherwise; ``operand`` is what a product is fed, in the weights' dtype.
Shape suffixes as in ``engine.backends.attention``: N tokens, H query heads, K key-value heads, D numbers of a head.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.backends.native.compression import CHUNK
from engine.backends.native.packing import Packed
from engine.model.layers.layers import quantise_rows


def norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Root mean square norm of rows."""
    return F.rms_norm(x, gain.shape, gain, eps)


def operand(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows as a product of this dtype sees them, again in float32: rounded to bfloat16, or to 8 bits by row."""
    if dtype == torch.int8:
        numbers, scale = quantise_rows(x)
        return numbers.float() * scale
    return x.to(dtype).float()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x W^T + b`` in float64, for rows and a weight that were rounded already."""
    return F.linear(x.double(), weight.double(), None if bias is None else bias.double()).float()


def swiglu(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """``silu(x G^T) * (x U^T)``."""
    return F.silu(linear(x, gate)) * linear(x, up)


def angles(positions: Tensor, frequencies: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of shape ``(N, D / 2)``."""
    turned = positions.to(torch.float32).unsqueeze(1) * frequencies
    return turned.cos() * scale, turned.sin() * scale


def rope(x_nhd: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate heads: the first half of a head against the second."""
    left, right = x_nhd.chunk(2, -1)
    cos, sin = cosines.unsqueeze(1), sines.unsqueeze(1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


def attend(q_hd: Tensor, k_skd: Tensor, v_skd: Tensor) -> Tensor:
    """One token's heads over its whole context of S positions; gives ``(H, D)``."""
    group = q_hd.shape[0] // k_skd.shape[1]
    k_hsd, v_hsd = (t.repeat_interleave(group, 1).transpose(0, 1).double() for t in (k_skd, v_skd))
    scores = (k_hsd @ q_hd.double().unsqueeze(2)).squeeze(2) * q_hd.shape[1] ** -0.5
    out_hd: Tensor = (scores.softmax(-1).unsqueeze(1) @ v_hsd).squeeze(1)
    return out_hd.float()


def unpack(packed: Packed) -> Tensor:
    """The weight as it was before ``pack``, of int8 the whole numbers."""
    flat = packed.weight.permute(0, 2, 1, 3).reshape(-1, packed.weight.shape[1] * packed.weight.shape[3])
    return flat[: packed.outputs, : packed.inputs]


def expand(packed: Packed) -> Packed:
    """The weight as it was before ``compress``."""
    compression = packed.compression
    if compression is None:
        return packed
    numbers = packed.weight
    low = numbers[:, :CHUNK].view(-1, 16, 4, 2, 8).transpose(2, 3).reshape(-1, CHUNK)
    pairs = numbers[:, CHUNK:].view(-1, 8, 1, 64)
    index = torch.cat((pairs & 15, pairs >> 4), 2).view(-1, 16, 4, 2, 8).transpose(2, 3).reshape(-1, CHUNK)
    high = compression.palette[index.long()]
    words = (high.to(torch.int32) << 8 | low.to(torch.int32)).flatten()
    starts = compression.starts.long()
    counts = starts[1:] - starts[:-1]
    patches = compression.patches[: int(starts[-1])].long()
    places = torch.repeat_interleave(torch.arange(len(counts)) * CHUNK, counts) + (patches >> 16)
    words[places] = (patches & 0xFFFF).to(torch.int32)
    weight = _as_bfloat16(words).view(compression.shape)
    return replace(packed, weight=weight, compression=None)


def _as_bfloat16(words: Tensor) -> Tensor:
    """int32 numbers of 16 bits as the bfloat16 that has these bits."""
    return torch.where(words < 1 << 15, words, words - (1 << 16)).to(torch.int16).view(torch.bfloat16)
