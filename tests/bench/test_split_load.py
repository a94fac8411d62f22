"""Gaps of streams in which a long prompt was under way."""

from __future__ import annotations

import random

from bench.split_load import Span, overlapping


def plainly(gaps: list[Span], prompts: list[Span]) -> list[Span]:
    """The same by its meaning, one by one."""
    return sorted(gap for gap in gaps if any(begin < gap[1] and gap[0] < end for begin, end in prompts))


def test_gaps_beside_prompts_are_those_that_share_time_with_one() -> None:
    """Of random gaps of several streams, and prompts that overlap or do not, those are found that a comparison of all
    with all finds; some are and some are not."""
    draw = random.Random(1)
    for _ in range(200):
        gaps = [(begin, begin + draw.uniform(0.01, 3)) for begin in (draw.uniform(0, 100) for _ in range(60))]
        prompts = [(begin, begin + draw.uniform(0.1, 9)) for begin in (draw.uniform(0, 100) for _ in range(6))]
        found = overlapping(gaps, prompts)
        assert found == plainly(gaps, prompts)
        assert 0 < len(found) < len(gaps)
    assert overlapping(gaps, []) == []
