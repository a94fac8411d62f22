"""Specifications of the GPU kernels: plain tensor operations in float64, a row, token or pair after another."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.backends.attention import AttentionRule
from engine.backends.cuda.kernels.activation import Gate
from engine.backends.cuda.kernels.grouped import ExpertMap
from engine.backends.cuda.kernels.prefill_attention import ChunkPlaces
from engine.backends.cuda.kernels.routing import Routed
from engine.backends.cuda.kernels.tile_map import DecodeShape
from engine.backends.cuda.kernels.triton_common import ceil_div
from engine.backends.cuda.runtime.operations import KvLayer, RopeInputs
from engine.core.kv.layout import Reach


def attended(q_hd: Tensor, k_skd: Tensor, v_skv: Tensor, rule: AttentionRule) -> Tensor:
    """Attention of one token's heads to the S positions that it sees, in float64; gives ``(H, V)``, zeros for S = 0."""
    heads, group = q_hd.shape[0], q_hd.shape[0] // k_skd.shape[1]
    if not len(k_skd):
        return q_hd.new_zeros(heads, v_skv.shape[2], dtype=torch.float64)
    k_hsd, v_hsv = (part.double().repeat_interleave(group, 1).transpose(0, 1) for part in (k_skd, v_skv))
    scores = (k_hsd @ q_hd.double().unsqueeze(2)).squeeze(2) * rule.scale
    if rule.cap:
        scores = rule.cap * torch.tanh(scores / rule.cap)
    if rule.sinks is not None:
        scores = torch.cat((scores, rule.sinks.double().unsqueeze(1)), 1)
    weights = scores.softmax(1)[:, : k_hsd.shape[1]]
    return (weights.unsqueeze(1) @ v_hsv).squeeze(1)


def seen_tokens(layer: KvLayer, table: list[int], position: int) -> tuple[Tensor, Tensor]:
    """Keys and values that the token at ``position`` attends to, ``(S, K, D)`` and ``(S, K, V)``, looked up slot by
    slot."""
    size = layer.keys.shape[1]
    places = [(table[at // size], at % size) for at in range(layer.reach.first_seen(position), position + 1)]
    keys, values = (torch.stack([part[at] for at in places]) for part in (layer.keys, layer.values))
    return keys, values


def decoded(q: Tensor, layer: KvLayer, tables: Tensor, lengths: Tensor, rule: AttentionRule) -> Tensor:
    """Attention of decoding rows, ``(rows, heads, value_dim)``."""
    rows = []
    for query, table, length in zip(q, tables.tolist(), lengths.tolist(), strict=True):
        keys, values = seen_tokens(layer, table, length - 1) if length else (layer.keys[0, :0], layer.values[0, :0])
        rows.append(attended(query, keys, values, rule))
    return torch.stack(rows) if rows else q.new_zeros(0, q.shape[1], layer.values.shape[3])


def prefilled(q: Tensor, layer: KvLayer, chunks: ChunkPlaces, rule: AttentionRule, out: Tensor) -> None:
    """Attention of the tokens of prompt chunks, written to ``out``; other tokens are left alone."""
    columns = (part.tolist() for part in (chunks.begins, chunks.lengths, chunks.starts, chunks.tables))
    for begin, length, start, table in zip(*columns, strict=True):
        for token in range(length):
            keys, values = seen_tokens(layer, table, start + token)
            out[begin + token] = attended(q[begin + token], keys, values, rule)


def activated(x: Tensor, gate: Gate) -> Tensor:
    """Gated rows."""
    x = x.double()
    if gate.kind == "clamped":
        gates, ups = x[:, 0::2].clamp(max=gate.limit), x[:, 1::2].clamp(-gate.limit, gate.limit)
        return (ups + 1) * gates * torch.sigmoid(gates * gate.alpha)
    gates, ups = x.chunk(2, -1)
    return (F.silu(gates) if gate.kind == "silu" else F.gelu(gates, approximate="tanh")) * ups


def faults(tables: Tensor, expected: Tensor, seen: tuple[Tensor, Tensor], stamps: Tensor) -> Tensor:
    """Entries of each row that name a missing block or one with another stamp."""
    place = torch.arange(tables.shape[1])
    inside = (place >= seen[0].unsqueeze(1)) & (place < seen[1].unsqueeze(1))
    exists = (tables >= 0) & (tables < len(stamps))
    found = stamps[torch.where(exists, tables, 0).long()]
    return (((found != expected) | ~exists) & inside).sum(1).int()


def multiplied(x: Tensor, linear: ExpertMap, routed: Routed, weigh: str = "no") -> Tensor:
    """Products of each pair of row and expert."""
    top = routed.experts.shape[1]
    rows = []
    for pair, expert in enumerate(routed.experts.flatten().tolist()):
        row = x[pair if len(x) == routed.experts.numel() else pair // top]
        weight = routed.weights.flatten()[pair]
        if weigh == "before":
            row = row * weight.to(row.dtype)
        y = linear.weight[expert].double() @ row.double()
        if linear.bias is not None:
            y = y + linear.bias[expert].double()
        rows.append(y * weight.double() if weigh == "after" else y)
    return torch.stack(rows)


def normed(
    x: Tensor, residual: Tensor | None, gain: Tensor, *, eps: float, offset: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Normalised rows in float64, and the new residual stream in its own dtype."""
    stream = None if residual is None else (residual.float() + x.float()).to(residual.dtype)
    value = (x if stream is None else stream).double()
    normed = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps) * (gain.double() + float(offset))
    return normed, stream


def roped(qkv: Tensor, heads: int, kv_heads: int, turn: RopeInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of every token, normalised and rotated."""
    wide = qkv.double()
    q, k, v = wide[:, :heads], wide[:, heads : heads + kv_heads], wide[:, heads + kv_heads :]
    if turn.norms is not None:
        q, k = (
            part
            * torch.rsqrt(part.square().mean(-1, keepdim=True) + norm.eps)
            * (norm.weight.double() + float(norm.offset))
            for part, norm in zip((q, k), turn.norms, strict=True)
        )
    return _turned(q, turn), _turned(k, turn), v


def _turned(x: Tensor, turn: RopeInputs) -> Tensor:
    width = turn.cosines.shape[-1]
    cos = turn.cosines.double().view(len(x), 1, width)[..., : width // 2]
    sin = turn.sines.double().view(len(x), 1, width)[..., width // 2 :]
    turning, rest = x[..., :width], x[..., width:]
    left, right = turning.chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin, rest), -1)


def decode_units(lengths: list[int], reach: Reach, shape: DecodeShape) -> list[tuple[int, int, int]]:
    """Row, split and number of tiles of every split, in order."""
    units = []
    for row, length in enumerate(lengths):
        if length:
            begin, end = reach.first_seen(length - 1) // shape.tile, ceil_div(length, shape.tile)
            width = max(ceil_div(end - begin, shape.splits), shape.span)
            for split in range(ceil_div(end - begin, width)):
                units.append((row, split, min(width, end - begin - split * width)))
    return units
