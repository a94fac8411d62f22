"""Which experts a token goes to, and with what weights: one small function for each way that published models route.

Shape suffixes: N tokens, E experts, K experts a token, G groups of experts. All take logits in float32 and give weights
(float32) and experts (int64), both ``(N, K)``. A token's choice depends on its own logits alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.checkpoint.fields import Fields
from engine.model.layers.layers import Linear

Choice = tuple[Tensor, Tensor]
"""Weights and experts."""

Route = Callable[[Tensor], Choice]
"""From logits ``(N, E)``."""

MAX_EXPERTS = 1_024
"""Experts of a layer; the largest published models have 384."""

MAX_ALL_EXPERTS = 1 << 16
"""Experts of all layers together: each is three entries of the checklist. Kimi K2 has 23,040."""

MAX_FACTOR = 1e3
"""Largest factor of all weights that is believed; published ones are below 3."""

GROUP_VOTES = 2
"""A group of experts is rated by the sum of so many of its best scores."""

LEAST_SUM = 1e-20
"""Added to a sum of sigmoids before it divides them."""


@dataclass(frozen=True, slots=True)
class Softmax:
    """Softmax over all experts, then the largest (Mixtral: arXiv 2401.04088, Qwen-MoE)."""

    top: int
    renormalised: bool
    """Whether the weights of the chosen are divided by their sum."""

    def __call__(self, logits: Tensor) -> Choice:
        """Choose."""
        weights, experts = logits.softmax(-1).topk(self.top)
        return weights / weights.sum(-1, keepdim=True) if self.renormalised else weights, experts


@dataclass(frozen=True, slots=True)
class SoftmaxOfTop:
    """The largest logits, then softmax over these alone (gpt-oss)."""

    top: int

    def __call__(self, logits: Tensor) -> Choice:
        """Choose."""
        best, experts = logits.topk(self.top)
        return best.softmax(-1), experts


@dataclass(frozen=True, slots=True)
class SigmoidOfTop:
    """The largest logits, each with its own sigmoid (Llama 4)."""

    top: int

    def __call__(self, logits: Tensor) -> Choice:
        """Choose."""
        best, experts = logits.topk(self.top)
        return sigmoid(best), experts


@dataclass(frozen=True, slots=True)
class GroupedSigmoid:
    """Sigmoids; a learnt bias takes part in the choice, and not in the weights (DeepSeek-V3, arXiv 2412.19437).

    The experts lie in groups of one size; only those of the groups rated best can be chosen.
    """

    top: int
    bias: Tensor
    """float32, ``(E,)``."""
    groups: int
    best_groups: int
    renormalised: bool
    factor: float

    def __call__(self, logits: Tensor) -> Choice:
        """Choose."""
        scores = sigmoid(logits)
        rated = scores + self.bias
        if self.best_groups < self.groups:
            rated_nge = rated.view(len(rated), self.groups, -1)
            votes = rated_nge.topk(GROUP_VOTES).values.sum(-1)
            kept = torch.zeros_like(votes, dtype=torch.bool).scatter_(1, votes.topk(self.best_groups).indices, True)
            rated = rated_nge.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(1)
        experts = rated.topk(self.top).indices
        weights = scores.gather(1, experts)
        if self.renormalised:
            weights = weights / (weights.sum(-1, keepdim=True) + LEAST_SUM)
        return weights * self.factor, experts


Rule = Softmax | SoftmaxOfTop | SigmoidOfTop | GroupedSigmoid
"""The ways above, as a backend takes them apart that computes them by itself."""


def sigmoid(x: Tensor) -> Tensor:
    """In float32, by way of float64: a number's float32 sigmoid may differ in its last bit by where in the batch it
    stands, since the ends of a vector loop are computed by other instructions than the rest."""
    return x.double().sigmoid().float()


@dataclass(frozen=True, slots=True)
class Router:
    """Logits of a linear map that every rank has whole and that is never rounded to int8, then a choice."""

    linear: Linear
    route: Route

    def logits(self, x: Tensor) -> Tensor:
        """Compute router logits of rows ``x`` of shape ``(N, hidden)``: ``(N, E)``, in the router's dtype."""
        return self.linear(x.to(self.linear.loaded.dtype))

    def __call__(self, x: Tensor) -> Choice:
        """Experts and weights of rows ``x`` of shape ``(N, hidden)``."""
        return self.route(self.logits(x).float())


def read_experts(fields: Fields, key: str, num_layers: int, *, default: int, default_top: int) -> tuple[int, int]:
    """How many experts a layer has, and how many a token goes to.

    Raises:
        ModelLoadError: out of range.
    """
    experts = fields.integer(key, 1, MAX_EXPERTS, default=default)
    if experts * num_layers > MAX_ALL_EXPERTS:
        raise fields.error(f"{num_layers} layers of {experts} experts are more than {MAX_ALL_EXPERTS} experts")
    return experts, fields.integer("num_experts_per_tok", 1, experts, default=default_top)
