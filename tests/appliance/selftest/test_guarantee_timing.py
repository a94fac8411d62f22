"""The statistics behind G1's clock: what they say of samples whose answer is known."""

from __future__ import annotations

import itertools
import random

import pytest

from appliance.selftest.g1_timing import Arms, auc, rows


def drawn(mean: float, count: int, seed: int) -> list[float]:
    """Times about a mean."""
    draw = random.Random(seed)
    return [draw.gauss(mean, 1.0) for _ in range(count)]


def test_the_area_is_the_share_of_pairs() -> None:
    """Against counting every pair, ties by a half."""
    draw = random.Random(3)
    known, fresh = ([draw.randrange(9) for _ in range(count)] for count in (40, 55))
    pairs = [(b > a) + (a == b) / 2 for a, b in itertools.product(known, fresh)]
    assert auc(known, fresh).area == pytest.approx(sum(pairs) / len(pairs))


def test_the_error_is_that_of_repeated_draws() -> None:
    """The standard error is about the spread of the area over 200 draws of equal arms."""
    areas = [auc(drawn(5, 80, seed), drawn(5, 80, seed + 1_000)) for seed in range(200)]
    mean = sum(one.area for one in areas) / 200
    spread = (sum((one.area - mean) ** 2 for one in areas) / 199) ** 0.5
    assert spread == pytest.approx(sum(one.error for one in areas) / 200, rel=0.2)


def test_rows_tell_a_leak_from_none() -> None:
    """Guesses that come back sooner fail their row, also when a few do; guesses that do not pass it; a control that
    shows nothing fails, and so does a cached token of somebody else's."""
    count = 1_600
    slow, same, fast = drawn(20, count, 1), drawn(20, count, 2), drawn(10, count, 3)
    clean = rows(256, Arms(slow, same, fast, same, [0] * 8, [256] * 8), full=True)
    assert [row.verdict for row in clean] == ["pass"] * 4
    partly = slow[: count - count // 8] + fast[: count // 8]
    leaking = rows(256, Arms(partly, same, slow, same, [0, 16], [256, 0]), full=True)
    assert [row.verdict for row in leaking] == ["fail"] * 4
