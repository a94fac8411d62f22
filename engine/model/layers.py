"""The building blocks of a decoder: linear maps, norms, and the gated MLP's activation.

Plain classes around tensors. Weights are allocated empty, filled by the loader, then *packed* once: each device and
dtype gets the form of the weight that its matrix product reads fastest. Products are independent of how many rows
are in the batch only up to rounding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Memory(NamedTuple):
    """Dtype and device of a model's weights."""

    dtype: torch.dtype
    device: torch.device

    def empty(self, *shape: int) -> Tensor:
        """Room for a weight, to be filled by the loader."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)


class Linear:
    """``y = x W^T + b`` with ``W`` of shape ``(outputs, inputs)`` as checkpoints store it.

    Packing, measured on AVX-512 and AMX machines with one thread: float32 is multiplied from the transposed copy
    (twice as fast as the stored form at 4 to 16 rows), 16-bit types through oneDNN's blocked form (1.5 to 2 times).
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight: Tensor | None = weight
        self.bias = bias
        self._packed: Tensor | None = None
        self._transposed: Tensor | None = None

    @classmethod
    def empty(cls, inputs: int, outputs: int, *, bias: bool, memory: Memory) -> Linear:
        """A map to be filled by the loader."""
        return cls(memory.empty(outputs, inputs), memory.empty(outputs) if bias else None)

    @property
    def loaded(self) -> Tensor:
        """The weight as stored; only before ``pack``."""
        assert self.weight is not None, "the weight is packed already"
        return self.weight

    def pack(self) -> None:
        """Bring the weight into its fastest form and let go of the stored one. Call once, after loading."""
        weight = self.loaded
        if weight.device.type != "cpu":
            return
        if weight.dtype == torch.float32:
            self._transposed = weight.t().contiguous()
        elif _onednn_packs(weight.dtype):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        else:
            return
        self.weight = None

    def __call__(self, x: Tensor) -> Tensor:
        """Apply to rows ``x`` of shape ``(N, inputs)``."""
        if self._transposed is not None:
            if self.bias is not None:
                return torch.addmm(self.bias, x, self._transposed)
            return torch.mm(x, self._transposed)
        if self._packed is not None:
            result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
            return result
        return F.linear(x, self.loaded, self.bias)


class RmsNorm:
    """Root mean square norm with a learnt gain (Zhang and Sennrich, arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float, memory: Memory) -> None:
        self.weight = memory.empty(size)
        self._shape = (size,)
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise rows ``x`` of shape ``(N, size)``."""
        return F.rms_norm(x, self._shape, self.weight, self._eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of rows that hold both halves side by side, shape ``(N, 2 I) -> (N, I)``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def _onednn_packs(dtype: torch.dtype) -> bool:
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return False
