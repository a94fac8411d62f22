"""Numbers that the sampler's one pass over a row keeps of each stretch of it: a column of each, float32."""

from __future__ import annotations

import triton.language as tl

FIGURES = tl.constexpr(8)
"""Numbers that are kept of each stretch of a row; a column of each:"""
RAW_PEAK = tl.constexpr(0)
"""Largest logit; not a number where some logit is none."""
RAW_SUM = tl.constexpr(1)
"""Sum of exponentials of logits less the largest one, where log-probabilities are asked for."""
PEAK = tl.constexpr(2)
"""Largest score."""
SUM = tl.constexpr(3)
"""Sum of weights relative to the largest score."""
MOMENT = tl.constexpr(4)
"""Their sum, each times its scaled score relative to the largest, for typical-p."""
LISTED = tl.constexpr(5)
"""Scores in the list."""
MORE = tl.constexpr(6)
"""Scores above the list."""
MORE_WEIGHT = tl.constexpr(7)
"""Their weight."""
