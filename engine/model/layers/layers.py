"""The building blocks of a decoder: linear maps, norms, and the gated MLP's activation.

Plain classes around tensors. Weights are allocated empty, filled by the loader, then *packed* once: each device and
dtype gets the form of the weight that its matrix product reads fastest. Products are independent of how many rows
are in the batch only up to rounding.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.layers.scaled import E4M3, multiply

LARGEST_INT8 = 127
"""Largest whole number that a quantised value takes: the range is symmetric."""


class Memory(NamedTuple):
    """Dtype and device of a model's weights."""

    dtype: torch.dtype
    device: torch.device
    final: bool = False
    """Whether weights are computed with where they are read: nobody packs them, and those of one kind, as experts' maps
    are, lie in one piece. Where each is packed by itself, such a piece would be held until the last one was."""
    scaled: bool = False
    """Whether maps of a layer's blocks are held in 8 bits with a scale an output (``engine.model.layers.scaled``);
    embeddings, heads, routers, experts and norms are not."""

    def empty(self, *shape: int) -> Tensor:
        """Room for a weight, to be filled by the loader."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def several(self, count: int, *shape: int) -> list[Tensor]:
        """Room for so many weights of one kind."""
        if self.final:
            return list(self.empty(count, *shape).unbind())
        return [self.empty(*shape) for _ in range(count)]


class Delta(Protocol):
    """What the adapters of a step add to the result of a map or an embedding (``engine.model.adapters.bank``)."""

    def add(self, x: Tensor, y: Tensor, /) -> None:
        """Add to those rows of ``y``, the result of ``x``, that have an adapter; other rows are not touched."""


class Linear:
    """``y = x W^T + b`` with ``W`` of shape ``(outputs, inputs)`` as checkpoints store it.

    Packing, measured on AVX-512 and AMX machines with one thread: float32 is multiplied from the transposed copy
    (twice as fast as the stored form at 4 to 16 rows), 16-bit types through oneDNN's blocked form (1.5 to 2 times).
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None) -> None:
        self.weight: Tensor | None = weight
        self.bias = bias
        self.scale = scale
        """Scale of each output, float32, where the weight is in 8 bits; else None."""
        self._packed: Tensor | None = None
        self._transposed: Tensor | None = None
        self._int8: tuple[Tensor, Tensor] | None = None
        self.delta: Delta | None = None
        """What adapters add; None: no adapter changes this map."""

    @classmethod
    def empty(cls, inputs: int, outputs: int, *, bias: bool, memory: Memory) -> Linear:
        """A map to be filled by the loader."""
        return cls(memory.empty(outputs, inputs), memory.empty(outputs) if bias else None)

    @classmethod
    def scaled(cls, inputs: int, outputs: int, *, bias: bool, memory: Memory) -> Linear:
        """A map to be filled by the loader, in 8 bits where the memory says so."""
        if not memory.scaled:
            return cls.empty(inputs, outputs, bias=bias, memory=memory)
        weight = torch.empty(outputs, inputs, dtype=E4M3, device=memory.device)
        scale = torch.empty(outputs, dtype=torch.float32, device=memory.device)
        return cls(weight, memory.empty(outputs) if bias else None, scale)

    @property
    def loaded(self) -> Tensor:
        """The weight as stored; only before ``pack``."""
        assert self.weight is not None, "the weight is packed already"
        return self.weight

    def release(self) -> None:
        """Release the stored weight, which a backend has taken over. The map cannot be applied any more."""
        self.weight = None

    def pack(self, *, int8: bool = False) -> None:
        """Bring the weight into its fastest form and release the stored one. Call once, after loading.

        Args:
            int8: round the weight to int8 with a scale an output, and from now on each row of x with a scale of its
                own (W8A8).
        """
        weight = self.loaded
        if self.scale is not None:
            return
        if int8:
            numbers, scale = quantise_rows(weight.float())
            self._int8 = numbers.t().contiguous(), scale.t().contiguous()
            self.weight = None
            return
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
        y = self._apply(x)
        if self.delta is not None:
            self.delta.add(x, y)
        return y

    def _apply(self, x: Tensor) -> Tensor:
        if self._transposed is not None:
            if self.bias is not None:
                return torch.addmm(self.bias, x, self._transposed)
            return torch.mm(x, self._transposed)
        if self._packed is not None:
            result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
            return result
        if self._int8 is not None:
            return self._apply_int8(x, *self._int8)
        if self.scale is not None:
            return multiply(x, self.loaded, self.scale, self.bias)
        return F.linear(x, self.loaded, self.bias)

    def _apply_int8(self, x: Tensor, numbers: Tensor, scale: Tensor) -> Tensor:
        bytes_, row_scale = quantise_rows(x.float())
        y = torch._int_mm(bytes_, numbers).float().mul_(row_scale).mul_(scale)
        if self.bias is not None:
            y += self.bias
        return y.to(x.dtype)


class RmsNorm:
    """Root mean square norm with a learnt gain (Zhang and Sennrich, arXiv 1910.07467)."""

    offset: ClassVar[bool] = False
    """Whether the gain is published less one."""

    def __init__(self, size: int, eps: float, memory: Memory) -> None:
        self.weight = memory.empty(size)
        self.eps = eps
        self._shape = (size,)

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise rows ``x`` of shape ``(N, size)``."""
        return F.rms_norm(x, self._shape, self.weight, self.eps)


class OffsetRmsNorm(RmsNorm):
    """A norm whose gain is published less one (Gemma). The product with the gain is taken in float32."""

    offset = True

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise rows ``x`` of shape ``(N, size)``."""
        y = F.rms_norm(x.float(), self._shape, None, self.eps)
        return torch.addcmul(y, y, self.weight.float()).to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of rows that hold both halves side by side, shape ``(N, 2 I) -> (N, I)``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """``gelu(gate) * up``, in the form of tanh, of rows that hold both halves: ``(N, 2 I) -> (N, I)``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 numbers of the shape of ``x`` (float32, ``(N, K)``) and a scale a row, ``(N, 1)``: ``x ~ numbers * scale``.

    Symmetric around zero, rounded to nearest even. A row that holds a number which is not finite gets the scale NaN:
    whatever is computed from it is NaN, and nothing else is.
    """
    largest = x.abs().amax(1, keepdim=True)
    inverse = torch.where(largest > 0, LARGEST_INT8 / largest, 0.0)
    numbers = (x * inverse).nan_to_num_(0.0).round_().clamp_(-LARGEST_INT8, LARGEST_INT8).to(torch.int8)
    return numbers, torch.where(largest.isfinite(), largest / LARGEST_INT8, torch.nan)


def packed_bytes(weight: Tensor, *, int8: bool = False) -> int | None:
    """Bytes that ``Linear.pack`` takes for a weight on the host; None where it leaves the weight as it is."""
    if int8:
        return weight.numel() + 4 * weight.shape[0]
    return weight.nbytes if weight.dtype == torch.float32 or _onednn_packs(weight.dtype) else None


def _onednn_packs(dtype: torch.dtype) -> bool:
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return False
