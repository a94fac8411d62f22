"""Attention as a model's layers call it: the rule of one layer, and the object that attends in a step.

Shape suffixes: N tokens of the step, B rows of a group, T tokens of a chunk, S context positions, H query heads,
K key-value heads, G = H / K query heads that share one, D numbers of a head's key, V of its value.

A backend makes one ``Attention`` for each step. The step's block tables, masks and lengths are inside the
object, so layers neither see nor pass them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """How a layer weighs the positions that it sees."""

    scale: float
    """Factor of the product of query and key; usually ``head_dim ** -0.5``."""
    cap: float = 0.0
    """Scores become ``cap * tanh(score / cap)``; 0 leaves scores as they are."""
    sinks: Tensor | None = None
    """A logit for each query head, shape ``(H,)``."""

    @property
    def plain(self) -> bool:
        """Whether torch's fused attention computes this rule."""
        return not self.cap and self.sinks is None


class Attention(Protocol):
    """Attends in all layers of one step."""

    @property
    def fixed_shapes(self) -> bool:
        """Whether every product of the step must have the shape of the step, whatever its rows hold.

        Tiles of the deterministic class need it (one shape gives one order of roundings), and so does a step that is
        recorded and replayed. A layer that chooses rows by content must then compute all of them.
        """
        ...

    def __call__(self, place: int, qkv: tuple[Tensor, Tensor, Tensor | None], rule: AttentionRule, /) -> Tensor:
        """Write the step's keys and values, then attend in one layer.

        Args:
            place: the layer's place in the KV layout.
            qkv: ``(N, H, D)``, ``(N, K, D)`` and ``(N, K, V)``; no values for a latent layer.
            rule: how this layer weighs.

        Returns:
            ``(N, H * V)``.
        """
        ...


def weigh(q_bkgtd: Tensor, k_bksd: Tensor, v_bksv: Tensor, mask: Tensor | None, rule: AttentionRule) -> Tensor:
    """Attention with soft-cap and sinks, scores and softmax in float32; gives ``(B, K, G, T, V)``.

    Args:
        q_bkgtd: queries.
        k_bksd: keys.
        v_bksv: values.
        mask: 0 or -inf, to be broadcast to ``(B, K, G, T, S)``.
        rule: scale, cap and sinks.
    """
    scores = torch.matmul(q_bkgtd, k_bksd.unsqueeze(2).transpose(3, 4)).float().mul_(rule.scale)
    if rule.cap:
        scores.div_(rule.cap).tanh_().mul_(rule.cap)
    if mask is not None:
        scores += mask.float()
    if rule.sinks is not None:
        sinks = rule.sinks.float().view(1, q_bkgtd.shape[1], q_bkgtd.shape[2], 1, 1)
        scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), -1)
    weights = scores.softmax(-1)
    if rule.sinks is not None:
        weights = weights[..., :-1]
    return torch.matmul(weights.to(v_bksv.dtype), v_bksv.unsqueeze(2))
