"""The choice of tokens on a device in tensor operations of fixed shapes; formulas and order: ``docs/sampling.md``.

Draws have the bits of ``engine.rng``: the counter generator is computed here in 64-bit tensors. A token is that of
``engine.sampler`` unless the point falls within rounding of the border between two tokens, because sums are taken in
another order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.device.operations import SamplingColumns
from engine.rng import MULTIPLIER_0, MULTIPLIER_1, ROUNDS, WEYL_0, WEYL_1
from engine.scheduler.plan import FAILED

LOW = 0xFFFFFFFF
HALF = 0xFFFF


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """One float64 in [0, 1) for each seed (bits, int64) and position (int64): Philox4x32-10."""
    a, b = int(MULTIPLIER_0), int(MULTIPLIER_1)
    c0, c1 = positions & LOW, (positions >> 32) & LOW
    c2 = c3 = torch.zeros_like(c0)
    k0, k1 = seeds & LOW, (seeds >> 32) & LOW
    for _ in range(ROUNDS):
        (high_0, low_0), (high_1, low_1) = _product(a, c0), _product(b, c2)
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0, k1 = (k0 + int(WEYL_0)) & LOW, (k1 + int(WEYL_1)) & LOW
    return ((c1 << 20) | (c0 >> 12)).double() * 2.0**-52


def _product(factor: int, words: Tensor) -> tuple[Tensor, Tensor]:
    """High and low word of products of 32-bit numbers, none of which passes 63 bits on the way."""
    low, high = factor * (words & HALF), factor * (words >> 16)
    carried = high + (low >> 16)
    return carried >> 16, ((carried & HALF) << 16) | (low & HALF)


def sample(logits: Tensor, rows: Tensor, positions: Tensor, columns: SamplingColumns) -> Tensor:
    """A token for each line of logits ``(M, V)``; see ``Operations.sample``."""
    heat, log_min_p = (column[rows].float() for column in (columns.temperature, columns.log_min_p))
    top_k, top_p = columns.top_k[rows], columns.top_p[rows]
    raw = logits.float()
    peak, greedy = raw.max(-1)
    draws = heat > 0
    scaled = (raw - peak.unsqueeze(1)) / torch.where(draws, heat, 1.0).unsqueeze(1)
    floor = torch.maximum(nucleus_floor(scaled, top_k, top_p), log_min_p)
    weights = torch.where(scaled >= floor.unsqueeze(1), scaled.exp(), 0.0).double().cumsum(-1)
    points = uniforms(columns.seed[rows], positions) * weights[:, -1]
    drawn = (weights <= points.unsqueeze(1)).sum(-1).clamp(max=raw.shape[1] - 1)
    return torch.where(peak.isfinite(), torch.where(draws, drawn, greedy), FAILED)


def nucleus_floor(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The least score that top-k and then top-p keep, for each row of scores whose maximum is 0."""
    best = scaled.sort(descending=True).values
    last = best.gather(1, (top_k - 1).clamp(min=0).unsqueeze(1))
    floor = torch.where(top_k.unsqueeze(1) > 0, last, -torch.inf)
    masses = torch.where(best >= floor, best.exp(), 0.0).double().cumsum(-1)
    reached = masses >= top_p.unsqueeze(1) * masses[:, -1:]
    nucleus = best.gather(1, reached.int().argmax(-1, keepdim=True))
    floor = torch.maximum(floor, torch.where(top_p.unsqueeze(1) < 1, nucleus, -torch.inf))
    return floor.squeeze(1)
