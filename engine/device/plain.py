"""The device's operations as tensor operations: what a CPU computes, and the specification of the recorded step.

Shapes follow from shapes alone, and no number comes to the host: so a step made of these can be recorded once and
replayed (``engine.device.replay``), as a graph of launches is. Attention gathers whole block tables; that is right for
tests and for machines without a GPU, and slow.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.device.operations import Attend, Chunks, KvLayer, SamplingColumns, Turn
from engine.device.plain_sampling import sample
from engine.model.attention import AttentionRule, weigh
from engine.model.layers import silu_mul
from engine.model.rotary import rotate


class PlainOperations:
    """See ``engine.device.operations.Operations``."""

    def norm(self, x: Tensor, residual: Tensor | None, gain: Tensor, eps: float) -> Tensor:
        """RMS norm with the residual stream's addition in front of it."""
        if residual is not None:
            x = residual.add_(x)
        return F.rms_norm(x, (x.shape[1],), gain, eps)

    def turn_and_write(self, qkv: Tensor, layer: KvLayer, slots: Tensor, turn: Turn) -> Tensor:
        """Norms, rotation and the write into the cache."""
        kv_heads = layer.heads
        heads, dim = qkv.shape[1] - 2 * kv_heads, qkv.shape[2]
        q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
        if turn.gains is not None:
            q, k = (F.rms_norm(part, (dim,), gain, turn.eps) for part, gain in zip((q, k), turn.gains, strict=True))
        q, k = rotate(q, turn.cosines, turn.sines), rotate(k, turn.cosines, turn.sines)
        for memory, part in ((layer.keys, k), (layer.values, v)):
            lines = _lines(memory)
            # What goes nowhere goes to the last line, which is of a block that nobody has.
            lines.index_copy_(0, torch.where(slots < 0, len(lines) - 1, slots), part.flatten(1))
        return q

    def decoding(self, lengths: Tensor, tables: Tensor) -> Attend:
        """One token a row, over all of its block table."""
        return _Decoding(lengths, tables)

    def prefilling(self, chunks: Chunks) -> Attend:
        """A chunk after the other, over all of its block table."""
        return _Prefilling(chunks)

    def gate(self, x: Tensor) -> Tensor:
        """SwiGLU."""
        return silu_mul(x)

    def sample(self, logits: Tensor, rows: Tensor, positions: Tensor, columns: SamplingColumns) -> Tensor:
        """A token for each line."""
        return sample(logits, rows, positions, columns)

    def faults(self, tables: Tensor, expected: Tensor, ends: Tensor, stamps: Tensor) -> Tensor:
        """Entries whose block is not the one that is expected."""
        seen = torch.arange(tables.shape[1], device=tables.device) < ends.unsqueeze(1)
        exists = (tables >= 0) & (tables < len(stamps))
        found = stamps[torch.where(exists, tables, 0)]
        return (((found != expected) | ~exists) & seen).sum(1)

    def zero(self, memory: Tensor, blocks: Tensor) -> None:
        """Whole blocks."""
        memory.index_fill_(0, blocks, 0)


class _Decoding:
    """Attention of one token a row."""

    def __init__(self, lengths: Tensor, tables: Tensor) -> None:
        self._lengths = lengths
        self._tables = tables

    def __call__(self, q: Tensor, layer: KvLayer, rule: AttentionRule) -> Tensor:
        rows = q.shape[0]
        seen = torch.arange(self._tables.shape[1] * layer.keys.shape[1], device=q.device) < self._lengths.unsqueeze(1)
        keys, values = (_gathered(memory, self._tables, seen) for memory in (layer.keys, layer.values))
        # A row of no length attends to one zero; what comes out is a zero.
        seen = seen | (self._lengths == 0).unsqueeze(1)
        mask = torch.where(seen, 0.0, -torch.inf).view(rows, 1, 1, 1, -1)
        out = weigh(q.view(rows, layer.heads, -1, 1, q.shape[2]), keys, values, mask, rule)
        return out.reshape(rows, -1)


class _Prefilling:
    """Attention of prompt chunks."""

    def __init__(self, chunks: Chunks) -> None:
        self._chunks = chunks

    def __call__(self, q: Tensor, layer: KvLayer, rule: AttentionRule) -> Tensor:
        out = q.new_zeros(q.shape[0], q.shape[1], layer.values.shape[3])
        for number, (begin, length) in enumerate(self._chunks.spans):
            place = self._chunks.starts[number] + torch.arange(length, device=q.device)
            ends = torch.where(self._chunks.lengths[number] > 0, place[-1] + 1, 0)
            table = self._chunks.tables[number : number + 1]
            every = torch.arange(table.shape[1] * layer.keys.shape[1], device=q.device)
            keys, values = (_gathered(memory, table, every < ends) for memory in (layer.keys, layer.values))
            mask = torch.where(every <= place.unsqueeze(1), 0.0, -torch.inf)
            part = q[begin : begin + length].transpose(0, 1).reshape(1, layer.heads, -1, length, q.shape[2])
            attended = weigh(part, keys, values, mask, rule)[0].flatten(0, 1)
            out[begin : begin + length] = attended.transpose(0, 1)
        return out.flatten(1)


def _lines(memory: Tensor) -> Tensor:
    """A layer's tokens, ``(slots, heads * dim)``: slots are counted from the layer's first token, those of other layers
    between two blocks included."""
    blocks, _, heads, dim = memory.shape
    width = heads * dim
    slots = (memory.stride(0) // memory.stride(1)) * (blocks - 1) + memory.shape[1]
    return memory.as_strided((slots, width), (memory.stride(1), 1))


def _gathered(memory: Tensor, tables: Tensor, seen: Tensor) -> Tensor:
    """Tokens of whole block tables, ``(rows, heads, slots, dim)``; zeros for what is not seen, whatever lies there."""
    # A table that was found to name a block that does not exist is not attended to, and gathered all the same.
    rows = memory[tables.clamp(0, len(memory) - 1)].flatten(1, 2)
    return torch.where(seen.view(len(tables), -1, 1, 1), rows, 0.0).transpose(1, 2)
