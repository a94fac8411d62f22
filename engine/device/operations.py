"""What a decoder's step does on a device besides plain matrix products: one interface, two ways to compute it.

``engine.kernels.gpu.operations`` launches the Triton kernels; ``engine.device.plain`` has tensor operations, of fixed
shapes and without a look at any number, so that on a CPU the same step can be recorded and replayed as on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.model.attention import AttentionRule


@dataclass(frozen=True, slots=True)
class KvLayer:
    """Keys and values of one layer: ``(blocks, block_size, kv_heads, dim)``; blocks may be further apart than that."""

    keys: Tensor
    values: Tensor

    @property
    def heads(self) -> int:
        """Key-value heads."""
        return self.keys.shape[2]


@dataclass(frozen=True, slots=True)
class Turn:
    """How heads of query and key are made ready in one layer."""

    cosines: Tensor
    """``(N, 1, D)``, as ``engine.model.rotary`` makes them."""
    sines: Tensor
    """The same, with the sign of the first half."""
    gains: tuple[Tensor, Tensor] | None
    """Of the norms of query heads and of key heads, ``(D,)`` each; None where heads are not normalised."""
    eps: float


@dataclass(frozen=True, slots=True)
class Chunks:
    """Prompt chunks of a step. Tensors have one entry a chunk; one of length 0 is not computed."""

    begins: Tensor
    """Index of the chunk's first token in the step."""
    lengths: Tensor
    starts: Tensor
    """Position of the first token in its sequence."""
    tables: Tensor
    """Block tables, int64 ``(chunks, width)``."""
    spans: tuple[tuple[int, int], ...]
    """First token in the step, and length, as the host planned them."""


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """The numbers of all rows, one entry a row; floats are float64, whole numbers int64."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor
    seed: Tensor
    limit: Tensor
    stop_ids: Tensor
    """``(rows, stops)``."""


class Attend(Protocol):
    """Attention of one step's tokens; what the layers share was computed when it was made."""

    def __call__(self, q: Tensor, layer: KvLayer, rule: AttentionRule, /) -> Tensor:
        """Attend with ``q`` of shape ``(N, heads, D)``; gives ``(N, heads * D)``."""
        ...


class Operations(Protocol):
    """The step's operations. Nothing here reads a tensor's content on the host."""

    def norm(self, x: Tensor, residual: Tensor | None, gain: Tensor, eps: float, /) -> Tensor:
        """RMS norm of ``x`` ``(N, size)``; with a residual ``x`` is added to it in place, and the sum is normalised."""
        ...

    def turn_and_write(self, qkv: Tensor, layer: KvLayer, slots: Tensor, turn: Turn, /) -> Tensor:
        """Normalise and rotate heads ``(N, H + 2 K, D)``, write keys and values to ``slots`` (int64, counted from the
        layer's first token; negative: nowhere); gives the queries ``(N, H, D)``."""
        ...

    def decoding(self, lengths: Tensor, tables: Tensor, /) -> Attend:
        """Attention of one token a row: ``lengths`` int64 ``(rows,)``, 0 for none; ``tables`` int64 ``(rows, width)``.
        Rows of no length get zeros."""
        ...

    def prefilling(self, chunks: Chunks, /) -> Attend:
        """Attention of prompt chunks; tokens of chunks of no length get anything finite or not."""
        ...

    def gate(self, x: Tensor, /) -> Tensor:
        """SwiGLU of rows ``(N, 2 I)`` that hold all gates, then all inputs."""
        ...

    def sample(self, logits: Tensor, rows: Tensor, positions: Tensor, columns: SamplingColumns, /) -> Tensor:
        """A token for each line of logits, int64, ``FAILED`` where they are not finite. ``rows`` says whose line it is,
        ``positions`` where the token will stand."""
        ...

    def faults(self, tables: Tensor, expected: Tensor, ends: Tensor, stamps: Tensor, /) -> Tensor:
        """Of the first ``ends`` entries of each block table how many name a block that does not exist or has another
        stamp than is expected."""
        ...

    def zero(self, memory: Tensor, blocks: Tensor, /) -> None:
        """Make whole blocks (int64 ids) zero; the first axis of ``memory`` counts them."""
        ...
