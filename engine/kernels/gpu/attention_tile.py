"""One tile of attention: the part that decoding and prompts share, and the specification of both.

A softmax over tiles keeps, for each query, the largest score so far, the sum of the weights relative to it and the
weighted sum of values (Milakov and Gimelshein, arXiv 1805.02867; FlashAttention, arXiv 2205.14135). A tile that a
query sees nothing of leaves all three as they are, bit by bit. Scores are in powers of two.

Of keys and values only the slots that some query of the tile may see are read: what lies in the same block before or
behind them, or in blocks behind a window, may be somebody else's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.gpu.dialect import LEAST_DOT, LOG2_E, dot, narrow, power_of_two, reach_code, tanh
from engine.kv.layout import Reach
from engine.model.attention import AttentionRule


@dataclass(frozen=True, slots=True)
class PagedLayer:
    """Keys and values of one layer, as ``engine.kv.storage`` keeps them."""

    keys: Tensor
    """``(blocks, block_size, heads, key_dim)``; blocks and slots may be further apart than that."""
    values: Tensor
    """``(blocks, block_size, heads, value_dim)``; of a latent layer the first numbers of ``keys``."""
    reach: Reach
    latent: bool = False
    """Whether values lie in keys."""

    @property
    def heads(self) -> int:
        """Key-value heads."""
        return self.keys.shape[2]


def key_parts(dim: int, latent: int = 0) -> tuple[int, int]:
    """Widths of the two products that make a score: powers of two, the second 0 where the first is the whole key. The
    first holds all of a latent value."""
    main = max(power_of_two(dim + 1) // 2, power_of_two(latent), LEAST_DOT)
    return main, power_of_two(dim - main, LEAST_DOT) if dim > main else 0


def layer_constants(layer: PagedLayer, heads: int, rule: AttentionRule) -> dict[str, int | bool]:
    """What is fixed about a layer when a kernel for it is compiled."""
    dim, value_dim = layer.keys.shape[3], layer.values.shape[3]
    main, tail = key_parts(dim, value_dim if layer.latent else 0)
    code, size = reach_code(layer.reach)
    return {
        "BLOCK_SIZE": layer.keys.shape[1],
        "GROUP": heads // layer.heads,
        "DIM": dim,
        "MAIN": main,
        "TAIL": tail,
        "VALUE": value_dim,
        "VALUE_PAD": main if layer.latent else power_of_two(value_dim, LEAST_DOT),
        "LATENT": layer.latent,
        "REACH": code,
        "SIZE": size,
        "CAPPED": rule.cap > 0,
    }


@triton.jit
def load_query(
    address: tl.tensor, live: tl.tensor, start: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr
) -> tl.tensor:
    """Numbers ``start .. start + WIDTH`` of each query, zeros where there are none."""
    number = start + tl.arange(0, WIDTH)
    return tl.load(address[:, None] + number[None, :], mask=live[:, None] & (number[None, :] < DIM), other=0.0)


@triton.jit
def attend_tile(
    query: tl.tensor,
    query_tail: tl.tensor,
    largest: tl.tensor,
    weight: tl.tensor,
    total: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    slot_key: tl.tensor,
    slot_value: tl.tensor,
    present: tl.tensor,
    visible: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    DIM: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    LATENT: tl.constexpr,
    CAPPED: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Take one tile of keys and values into account; gives the new largest score, sum of weights and sum of values.

    ``present`` says which slots are read at all, ``visible`` what each query sees of them.
    """
    number = tl.arange(0, MAIN)
    key = tl.load(
        keys + slot_key[:, None] + number[None, :], mask=present[:, None] & (number[None, :] < DIM), other=0.0
    )
    score = dot(query, tl.trans(key), tl.zeros([query.shape[0], key.shape[0]], tl.float32))
    if TAIL > 0:
        rest = MAIN + tl.arange(0, TAIL)
        tail = tl.load(
            keys + slot_key[:, None] + rest[None, :], mask=present[:, None] & (rest[None, :] < DIM), other=0.0
        )
        score = dot(query_tail, tl.trans(tail), score)
    score = score * scale
    if CAPPED:
        score = cap * tanh(score / cap)
    score = tl.where(visible, score * LOG2_E, -float("inf"))
    peak = tl.maximum(largest, tl.max(score, 1))
    base = tl.where(peak == -float("inf"), 0.0, peak)
    share = tl.exp2(score - base[:, None])
    fade = tl.exp2(largest - base)
    if LATENT:
        value = key
    else:
        column = tl.arange(0, VALUE_PAD)
        value = tl.load(
            values + slot_value[:, None] + column[None, :],
            mask=present[:, None] & (column[None, :] < VALUE),
            other=0.0,
        )
    weight = weight * fade + tl.sum(share, 1)
    total = dot(narrow(share, value.dtype), value, total * fade[:, None])
    return peak, weight, total


def attend_reference(q_hd: Tensor, k_skd: Tensor, v_skv: Tensor, rule: AttentionRule) -> Tensor:
    """What one token's heads get from the S positions that it sees, in float64; gives ``(H, V)``, zeros for S = 0."""
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


def seen_tokens(layer: PagedLayer, table: list[int], position: int) -> tuple[Tensor, Tensor]:
    """Keys and values that the token at ``position`` attends to, ``(S, K, D)`` and ``(S, K, V)``, looked up slot by
    slot."""
    size = layer.keys.shape[1]
    places = [(table[at // size], at % size) for at in range(layer.reach.first_seen(position), position + 1)]
    keys, values = (torch.stack([part[at] for at in places]) for part in (layer.keys, layer.values))
    return keys, values
