"""The device's operations as tensor operations: what a CPU computes, and the specification of the recorded step.

Shapes follow from shapes alone, and no number comes to the host: so a step made of these can be recorded once and
replayed (``engine.backends.cuda.runtime.replay``), as a graph of launches is. Attention gathers whole block tables, and
every row goes through every expert; that is right for tests and for machines without a GPU, and slow.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.backends.attention import AttentionRule, weigh
from engine.backends.cuda.runtime import simulated_steps
from engine.backends.cuda.runtime.loop_state import LoopState, StepRows
from engine.backends.cuda.runtime.mixing import NEVER
from engine.backends.cuda.runtime.operations import (
    Activation,
    Attend,
    Beside,
    Chunks,
    ExpertMaps,
    KvLayer,
    RopeInputs,
    Sampled,
    SamplingColumns,
)
from engine.backends.cuda.runtime.simulated_sampling import sample
from engine.backends.cuda.runtime.tables import first_seen
from engine.model.layers.decoder import Decoder
from engine.model.layers.layers import Linear, RmsNorm
from engine.model.layers.rotary import Rotary, rotate


class PlainOperations:
    """See ``engine.backends.cuda.runtime.operations.Operations``."""

    exact = False
    """A library's attention may order sums by what is beside a row."""

    mixing = NEVER
    """A processor has no graph to replay, and nothing is gained by the other."""

    has_palettes = False
    """They are kernels' business."""

    def __init__(self, *, fused: bool = False) -> None:
        """``fused``: whether products are asked for together with what surrounds them, which is no gain here."""
        self._fused = fused

    def take_palettes(self, _model: Decoder) -> str:
        """None: they are kernels' business."""
        return "palettes: none without kernels"

    def launch_palettes(self, _model: Decoder) -> None:
        """None."""

    def norm(self, x: Tensor, residual: Tensor | None, norm: RmsNorm) -> Tensor:
        """A norm with the residual stream's addition in front of it."""
        return norm(x if residual is None else residual.add_(x))

    def rotations(self, rotary: Rotary, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The model's own."""
        return rotary.tables(positions, dtype)

    def fuses(self, x: Tensor) -> bool:
        """As said when this was made."""
        return self._fused

    def project(self, x: Tensor, linear: Linear, norm: RmsNorm | None) -> Tensor:
        """Norm, then product."""
        return linear(x if norm is None else norm(x))

    def project_gated(self, x: Tensor, linear: Linear, norm: RmsNorm | None, activation: Activation) -> Tensor:
        """Norm, product, activation."""
        return activation(self.project(x, linear, norm))

    def project_onto(self, x: Tensor, linear: Linear, stream: Tensor) -> None:
        """Product, then sum."""
        stream.add_(linear(x))

    def turn_and_write(self, qkv: Tensor, layer: KvLayer, slots: Tensor, turn: RopeInputs) -> Tensor:
        """Norms, rotation and the write into the cache."""
        kv_heads = layer.heads
        heads = qkv.shape[1] - 2 * kv_heads
        q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
        if turn.norms is not None:
            q, k = (norm(part) for norm, part in zip(turn.norms, (q, k), strict=True))
        q, k = rotate(q, turn.cosines, turn.sines), rotate(k, turn.cosines, turn.sines)
        layer.write(slots, k, v)
        return q

    def decoding(self, lengths: Tensor, tables: tuple[Tensor, ...]) -> Attend:
        """One token a row, over all of its block table."""
        return _Decoding(lengths, tables)

    def prefilling(self, chunks: Chunks, beside: Beside | None = None) -> Attend:
        """A chunk after the other, over all of its block table; then the rows."""
        return _Prefilling(chunks, None if beside is None else _Decoding(beside.lengths, beside.tables))

    def gate(self, x: Tensor, activation: Activation) -> Tensor:
        """The activation itself."""
        return activation(x)

    def experts(self, x: Tensor, maps: ExpertMaps) -> Tensor:
        """All rows through each expert; those that are not sent to it add nothing."""
        weights, chosen = maps.router(x)
        factors = torch.zeros(len(x), len(maps.down), device=x.device).scatter_(1, chosen, weights)
        sent = torch.zeros_like(factors, dtype=torch.bool).scatter_(1, chosen, True)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for number in range(len(maps.down)):
            factor = factors[:, number : number + 1]
            given = x * factor.to(x.dtype) if maps.weigh_inputs else x
            inner = maps.activation(F.linear(given, maps.gate_up[number], _of(maps.gate_up_bias, number)))
            y = F.linear(inner, maps.down[number], _of(maps.down_bias, number)).float()
            out += (y if maps.weigh_inputs else y * factor).masked_fill_(~sent[:, number : number + 1], 0.0)
        return out.to(x.dtype)

    def sample(self, logits: Tensor, rows: Tensor, positions: Tensor, columns: SamplingColumns) -> Sampled:
        """A token for each line."""
        return sample(logits, rows, positions, columns)

    def begin_step(self, state: LoopState, bucket: int) -> StepRows:
        """What lanes compute."""
        return simulated_steps.begin_step(self.faults, state, bucket)

    def end_step(self, state: LoopState, begun: StepRows, sampled: Sampled) -> None:
        """Rows advance."""
        simulated_steps.end_step(state, begun, sampled)

    def faults(self, tables: Tensor, expected: Tensor, seen: tuple[Tensor, Tensor], stamps: Tensor) -> Tensor:
        """Entries whose block is not the one that is expected."""
        place = torch.arange(tables.shape[1], device=tables.device)
        read = (place >= seen[0].unsqueeze(1)) & (place < seen[1].unsqueeze(1))
        exists = (tables >= 0) & (tables < len(stamps))
        found = stamps[torch.where(exists, tables, 0)]
        return (((found != expected) | ~exists) & read).sum(1)

    def zero(self, memory: Tensor, blocks: Tensor) -> None:
        """Whole blocks."""
        memory.index_fill_(0, blocks, 0)


class _Decoding:
    """Attention of one token a row."""

    def __init__(self, lengths: Tensor, tables: tuple[Tensor, ...]) -> None:
        self._lengths = lengths
        self._tables = tables
        self.rows = len(lengths)

    def __call__(self, q: Tensor, layer: KvLayer, rule: AttentionRule) -> Tensor:
        rows, table = q.shape[0], self._tables[layer.table]
        place = torch.arange(table.shape[1] * layer.keys.shape[1], device=q.device)
        first = first_seen(layer.reach, (self._lengths - 1).clamp(min=0))
        seen = (place < self._lengths.unsqueeze(1)) & (place >= first.unsqueeze(1))
        keys, values = _gathered(layer, table, seen)
        # A row of no length attends to one zero; what comes out is a zero.
        seen = seen | (self._lengths == 0).unsqueeze(1)
        mask = torch.where(seen, 0.0, -torch.inf).view(rows, 1, 1, 1, -1)
        out = weigh(q.view(rows, layer.heads, -1, 1, q.shape[2]), keys, values, mask, rule)
        return out.reshape(rows, -1)


class _Prefilling:
    """Attention of prompt chunks."""

    def __init__(self, chunks: Chunks, beside: _Decoding | None) -> None:
        self._chunks = chunks
        self._beside = beside

    def __call__(self, q: Tensor, layer: KvLayer, rule: AttentionRule) -> Tensor:
        out = q.new_zeros(q.shape[0], q.shape[1], layer.values.shape[3])
        for number, (begin, length) in enumerate(self._chunks.spans):
            place = self._chunks.starts[number] + torch.arange(length, device=q.device)
            first = first_seen(layer.reach, place)
            ends = torch.where(self._chunks.lengths[number] > 0, place[-1] + 1, 0)
            table = self._chunks.tables[layer.table][number : number + 1]
            every = torch.arange(table.shape[1] * layer.keys.shape[1], device=q.device)
            keys, values = _gathered(layer, table, ((every >= first[0]) & (every < ends)).unsqueeze(0))
            seen = (every <= place.unsqueeze(1)) & (every >= first.unsqueeze(1))
            part = q[begin : begin + length].transpose(0, 1).reshape(1, layer.heads, -1, length, q.shape[2])
            attended = weigh(part, keys, values, torch.where(seen, 0.0, -torch.inf), rule)[0].flatten(0, 1)
            out[begin : begin + length] = attended.transpose(0, 1)
        out = out.flatten(1)
        if self._beside is not None:
            out[: self._beside.rows] = self._beside(q[: self._beside.rows], layer, rule)
        return out


def _gathered(layer: KvLayer, table: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of whole block tables, ``(rows, heads, slots, dim)``; zeros for what is not seen, whatever lies
    there."""
    # A table that was found to name a block that does not exist is not attended to, and gathered all the same.
    blocks = table.clamp(0, len(layer.keys) - 1)
    keys, values = (
        torch.where(seen.view(len(table), -1, 1, 1), memory[blocks].flatten(1, 2), 0.0).transpose(1, 2)
        for memory in (layer.keys, layer.values)
    )
    return keys, values


def _of(biases: Tensor | None, number: int) -> Tensor | None:
    """The bias of one expert."""
    return None if biases is None else biases[number]
