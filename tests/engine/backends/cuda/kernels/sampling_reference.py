"""What the sampler on the device computes, one row at a time in float64: its specification."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Draw(NamedTuple):
    """A token, and how sure it is."""

    token: int
    margin: float
    """How far, in probability, the point lies from the border of its token, and the cut from being another one: below
    the roundings of float32 another token is as right."""


def allowed(logits: Tensor, words: Tensor | None) -> Tensor:
    """Float64 logits of one row ``(V,)``, minus infinity for what its mask (int32 words) forbids."""
    raw = logits.double()
    if words is None:
        return raw
    bits = (words.long().unsqueeze(1) >> torch.arange(32)) & 1
    known = torch.zeros(len(raw), dtype=torch.bool)
    flat = bits.flatten()[: len(raw)].bool()
    known[: len(flat)] = flat
    return raw.masked_fill(~known, -torch.inf)


def penalised(raw: Tensor, counts: Tensor, penalties: tuple[float, float, float]) -> Tensor:
    """Scores: ``counts`` is 0 for an id that did not occur, else 1 and its occurrences in the output."""
    repetition, presence, frequency = penalties
    scores = torch.where(raw > 0, raw / repetition, raw * repetition)
    scores = scores - frequency * (counts - 1) - presence * (counts > 1)
    return torch.where(counts > 0, scores, raw)


def draw(scores: Tensor, temperature: float, cut: tuple[int, float, float, float], point: float) -> Draw:
    """A draw under top-k, top-p, min-p and typical-p.

    Args:
        scores: float64 ``(V,)``, one finite at least.
        temperature: above 0.
        cut: top-k (0: none), top-p (1: all), min-p (0: all) and typical-p (1: all).
        point: in [0, 1).
    """
    top_k, top_p, min_p, typical_p = cut
    scaled = (scores - scores.max()) / temperature
    weights = scaled.exp()
    kept = torch.ones_like(weights, dtype=torch.bool)
    margins = []
    if top_k:
        kept = scaled >= scaled.sort(descending=True).values[top_k - 1]
    if top_p < 1:
        order = scaled.argsort(descending=True)
        masses = torch.where(kept, weights, 0.0)[order].cumsum(0)
        masses = masses / masses[-1]
        margins.append((masses - top_p).abs().min().item())
        last = int((masses >= top_p).int().argmax())
        kept &= scaled >= scaled[order[last]]
    if min_p > 0:
        margins.append((weights - min_p).abs().min().item())
        kept &= weights >= min_p
    if typical_p < 1:
        chances = torch.where(kept, weights, 0.0)
        chances = chances / chances.sum()
        information = -chances.log()
        entropy = -torch.special.xlogy(chances, chances).sum()
        distance, order = (information - entropy).abs().sort()
        masses = chances[order].cumsum(0)
        margins.append((masses - typical_p).abs().min().item())
        last = int((masses >= typical_p).int().argmax())
        # Float32 may exchange two ids that are nearly as far away as each other.
        others = distance[distance != distance[last]]
        margins += (others - distance[last]).abs().sort().values[:1].tolist()
        kept &= (information - entropy).abs() <= distance[last]
    sums = torch.where(kept, weights, 0.0).cumsum(0)
    sums = sums / sums[-1]
    token = int((sums > point).int().argmax())
    margins.append((sums - point).abs().min().item())
    return Draw(token, min(margins))


def logprobs(raw: Tensor) -> Tensor:
    """Log-softmax of one row ``(V,)`` of float64 logits."""
    return raw - raw.logsumexp(0)
