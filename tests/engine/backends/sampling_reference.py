"""The distribution of ``docs/sampling.md`` in float64, one row at a time, and the statistics that tests compare by."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from isolation.ipc.sampling import Sampling

Keep = Callable[[np.ndarray, Sampling], np.ndarray]
"""Scores (maximum 0) and numbers to which ids are kept."""


def penalised(logits: np.ndarray, sampling: Sampling, prompt: Sequence[int], output: Sequence[int]) -> np.ndarray:
    """Step 2."""
    scores = logits.astype(np.float64)
    for token in {*prompt, *output}:
        r = sampling.repetition_penalty
        scores[token] = scores[token] / r if scores[token] > 0 else scores[token] * r
    for token in set(output):
        scores[token] -= sampling.frequency_penalty * list(output).count(token) + sampling.presence_penalty
    return scores


def kept(scores: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Steps 5 to 8."""
    keep = np.ones(len(scores), dtype=bool)
    if sampling.top_k:
        keep &= scores >= np.sort(scores)[-min(sampling.top_k, len(scores))]
    weights = np.where(keep, np.exp(scores), 0)
    if sampling.top_p < 1:
        order = np.argsort(-weights, kind="stable")
        before = np.cumsum(weights[order]) - weights[order]
        last = order[np.nonzero(before < sampling.top_p * weights.sum())[0][-1]]
        keep &= weights >= weights[last]
    keep &= np.exp(scores) >= sampling.min_p
    return keep if sampling.typical_p == 1 else typical(scores, keep, sampling.typical_p)


def typical(scores: np.ndarray, keep: np.ndarray, share: float) -> np.ndarray:
    """The locally typical set of what is kept, by the definition of Meister et al. 2022 (arXiv 2202.00666): ids by
    rising distance of their information from the entropy, until their probabilities reach the share; ties are kept."""
    weights = np.where(keep, np.exp(scores), 0)
    chances = weights[weights > 0] / weights.sum()
    information = np.full(len(scores), np.inf)
    information[weights > 0] = -np.log(chances)
    entropy = -(chances * np.log(chances)).sum()
    distance = np.where(weights > 0, np.abs(information - entropy), np.inf)
    order = np.argsort(distance, kind="stable")
    before = np.cumsum(weights[order]) - weights[order]
    last = order[np.nonzero(before < share * weights.sum())[0][-1]]
    return distance <= distance[last] + 1e-12


def distribution(
    logits: np.ndarray, sampling: Sampling, prompt: Sequence[int] = (), output: Sequence[int] = (), keep: Keep = kept
) -> np.ndarray:
    """Probability of each id."""
    scores = penalised(logits, sampling, prompt, output)
    scores = (scores - scores.max()) / sampling.temperature
    weights = np.where(keep(scores, sampling), np.exp(scores), 0)
    return weights / weights.sum()


def chi_square(counts: np.ndarray, expected: np.ndarray) -> tuple[float, int]:
    """Statistic and degrees of freedom; cells below 5 are put together."""
    common = expected >= 5
    cells = list(zip(counts[common], expected[common], strict=True))
    rest = (expected > 0) & ~common
    if expected[rest].sum() >= 5:
        cells.append((counts[rest].sum(), expected[rest].sum()))
    return sum((seen - wanted) ** 2 / wanted for seen, wanted in cells), len(cells) - 1


def tail(statistic: float, freedom: int) -> float:
    """Probability that a chi-square variable is larger: the closed forms for even and for odd degrees of freedom."""
    half = statistic / 2
    if freedom == 0:
        return 1.0 if statistic <= 1e-9 else 0.0
    if freedom % 2 == 0:
        return math.fsum(
            math.exp(i * math.log(half) - math.lgamma(i + 1) - half) if half else float(i == 0)
            for i in range(freedom // 2)
        )
    terms = (math.exp((i - 0.5) * math.log(half) - math.lgamma(i + 0.5) - half) for i in range(1, (freedom + 1) // 2))
    return math.erfc(math.sqrt(half)) + (math.fsum(terms) if half else 0.0)
