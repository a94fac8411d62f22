"""Medians of measurements with their intervals of confidence; pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

CONFIDENCE = 0.95


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Interval of confidence of the median: two values whose ranks enclose it with a probability of ``CONFIDENCE``, or
    the ends where there are too few values. It asks nothing of the distribution."""
    ordered, count = sorted(values), len(values)
    outside, low = 0.0, 0
    while low < count // 2:
        outside += 2 * math.comb(count, low) / 2**count
        if outside > 1 - CONFIDENCE:
            break
        low += 1
    low = max(0, low - 1)
    return ordered[low], ordered[count - 1 - low]


def told(values: Sequence[float], digits: int = 2) -> str:
    """Median and interval."""
    low, high = interval(values)
    return f"{median(values):6.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"
