"""The choice of tokens on a device in tensor operations of fixed shapes; formulas and order: ``docs/sampling.md``.

Draws have the bits of ``engine.backends.common.rng``: the counter generator is computed here in 64-bit tensors. A token
is that of ``engine.backends.common.sampler`` unless the point falls within rounding of the border between two tokens,
because sums are taken in another order.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.backends.common.penalties import LARGEST
from engine.backends.common.rng import MULTIPLIER_0, MULTIPLIER_1, ROUNDS, WEYL_0, WEYL_1
from engine.backends.common.sampler import LOWEST_LOGPROB, log_probabilities
from engine.backends.cuda.runtime.operations import Sampled, SamplingColumns
from engine.backends.cuda.runtime.rows import Field
from engine.core.scheduler.plan import FAILED
from isolation.ipc.messages import MAX_TOP_LOGPROBS

WORD_BITS = 32
"""Tokens of a word of a mask."""

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


def sample(logits: Tensor, rows: Tensor, positions: Tensor, columns: SamplingColumns) -> Sampled:
    """A token for each line of logits ``(M, V)``; see ``Operations.sample``."""
    temperature, log_min_p = columns.number("temperature")[rows].float(), columns.number("min_p")[rows].log().float()
    top_k, top_p = columns.integer("top_k")[rows], columns.number("top_p")[rows]
    raw = _allowed(logits.float(), columns.words[Field.MASK_LINE][rows], columns.masks)
    scores = _penalised(_biased(raw, rows, columns), rows, columns)
    peak, greedy = scores.max(-1)
    draws = temperature > 0
    scaled = (scores - peak.unsqueeze(1)) / torch.where(draws, temperature, 1.0).unsqueeze(1)
    floor = torch.maximum(nucleus_floor(scaled, top_k, top_p), log_min_p)
    kept = torch.where(scaled >= floor.unsqueeze(1), scaled.exp(), 0.0)
    weights = _typical(scaled, kept, columns.number("typical_p")[rows]).double().cumsum(-1)
    points = uniforms(columns.integer("seed")[rows], positions) * weights[:, -1]
    drawn = (weights <= points.unsqueeze(1)).sum(-1).clamp(max=raw.shape[1] - 1)
    sound = raw.amax(-1).isfinite() & peak.isfinite()
    tokens = torch.where(sound, torch.where(draws, drawn, greedy), FAILED)
    _count(tokens, columns.words[Field.PENALTY_LINE][rows], columns.counts)
    return Sampled(tokens, *_report(raw, tokens, columns.words[Field.LOGPROBS][rows]))


def _allowed(raw: Tensor, lines: Tensor, masks: Tensor) -> Tensor:
    """Float32 logits, minus infinity for what a row's mask forbids."""
    words = masks.index_select(0, lines.clamp(min=0)).unsqueeze(2)
    bits = (words >> torch.arange(WORD_BITS, dtype=torch.int32, device=masks.device)) & 1
    allowed = (bits.flatten(1)[:, : raw.shape[1]] == 1) | (lines < 0).unsqueeze(1)
    return raw.masked_fill(~allowed, -torch.inf)


def _biased(raw: Tensor, rows: Tensor, columns: SamplingColumns) -> Tensor:
    """Scores with the biases of rows that have some."""
    ids, values = columns.bias_ids.index_select(0, rows).long(), columns.biases.index_select(0, rows)
    told = torch.arange(ids.shape[1], device=raw.device) < columns.words[Field.BIASES][rows].unsqueeze(1)
    # Entries that say nothing go to a column of their own, behind the last score.
    room = F.pad(raw, (0, 1))
    places = torch.where(told, ids, raw.shape[1])
    return room.scatter_add(1, places, torch.where(told, values, 0.0))[:, : raw.shape[1]]


def _penalised(raw: Tensor, rows: Tensor, columns: SamplingColumns) -> Tensor:
    """Scores, by the arithmetic of ``engine.backends.common.penalties``."""
    repetition, presence, frequency = (
        columns.number(name)[rows].float().unsqueeze(1)
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")
    )
    lines = columns.words[Field.PENALTY_LINE][rows]
    seen = columns.counts.index_select(0, lines.clamp(min=0))
    put_out = (seen - 1).float()
    scores = torch.where(raw > 0, raw / repetition, raw * repetition)
    scores = (scores - (frequency * put_out + presence * (put_out > 0))).clamp(max=LARGEST)
    return torch.where((seen > 0) & (lines >= 0).unsqueeze(1), scores, raw)


def _count(tokens: Tensor, lines: Tensor, counts: Tensor) -> None:
    """Note what was chosen. What is not to be counted goes to the last line, that of the padding row."""
    size = counts.shape[1]
    flat = counts.view(-1)
    counted = (lines >= 0) & (tokens >= 0)
    places = torch.where(counted, lines * size + tokens, len(flat) - 1)
    flat.index_copy_(0, places, flat.index_select(0, places).clamp(min=1) + 1)


def _report(raw: Tensor, tokens: Tensor, asked: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the tokens and of alternatives, equal ones by rising id."""
    logprobs = log_probabilities(raw).nan_to_num(nan=LOWEST_LOGPROB)
    values, ids = logprobs.sort(descending=True, stable=True)
    room = max(0, MAX_TOP_LOGPROBS - raw.shape[1])
    values = F.pad(values[:, :MAX_TOP_LOGPROBS], (0, room), value=LOWEST_LOGPROB)
    ids = F.pad(ids[:, :MAX_TOP_LOGPROBS], (0, room), value=-1)
    told = torch.arange(MAX_TOP_LOGPROBS, device=raw.device) < asked.unsqueeze(1)
    told &= (values > LOWEST_LOGPROB) & (tokens >= 0).unsqueeze(1)
    own = logprobs.gather(1, tokens.clamp(min=0).unsqueeze(1)).squeeze(1)
    ids = ids.int().masked_fill(~told, -1)
    return own, ids, values.masked_fill(~told, LOWEST_LOGPROB)


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


def _typical(scaled: Tensor, weights: Tensor, shares: Tensor) -> Tensor:
    """Weights of the locally typical set, zeros for other ids; see ``engine.backends.common.sampler``."""
    whole = weights.double().sum(-1)
    moment = torch.where(weights > 0, weights * scaled, 0.0).double().sum(-1)
    distance = (scaled - (moment / whole).float().unsqueeze(1)).abs().masked_fill(weights == 0, torch.inf)
    nearest = distance.sort(stable=True)
    masses = weights.gather(1, nearest.indices).double().cumsum(-1)
    reached = masses >= shares.unsqueeze(1) * masses[:, -1:]
    reach = nearest.values.gather(1, reached.int().argmax(-1, keepdim=True))
    reach = torch.where(shares.unsqueeze(1) < 1, reach, torch.inf)
    return torch.where(distance > reach, 0.0, weights)
