"""Tenants that send ten times what is usual for them: the rule, and what the book says of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.common.usage.book import open_book
from appliance.common.usage.report import open_to_read
from appliance.common.usage.unusual import MIN_REQUESTS, MIN_TOKENS, Unusual, far_above, unusual, usual

HOUR = 500_000
"""The hour that runs."""


@pytest.mark.parametrize(
    ("amount", "past", "found"),
    [
        pytest.param(10_000, {24 * day + 3: 1_000 for day in range(7)}, True, id="ten-times"),
        pytest.param(9_999, {24 * day + 3: 1_000 for day in range(7)}, False, id="less"),
        pytest.param(3_599, {24: 1}, False, id="small"),
        pytest.param(10_000, {3: 5_000}, True, id="one-busy-day"),
        pytest.param(10_000, {24 * day + 3: 5_000 for day in range(4)}, False, id="four-busy-days"),
        pytest.param(10_000, {166 + 20: 1_001}, False, id="as-a-week-ago"),
    ],
)
def test_the_rule_is_that_of_the_alert(amount: int, past: dict[int, int], found: bool) -> None:
    """Ten times the median of seven days' busiest hours, not small, and not as a week ago."""
    assert far_above(amount, past, MIN_REQUESTS) is found


def test_usual_is_a_median_of_the_days() -> None:
    """Each day's busiest hour counts once, a quiet day as 0."""
    past = {1: 10, 2: 70, 24: 5, 25: 20, 24 * 3 + 1: 30, 24 * 4 + 1: 40, 24 * 5 + 1: 50}
    assert usual(past) == 30


def test_the_book_tells_who_is_unusual(tmp_path: Path) -> None:
    """A tenant whose hour is far above its days is told with both; one that is always so, one that is new and one that
    is small are not."""
    book, _ = open_book(tmp_path)
    rows = []
    for day in range(1, 8):
        rows += [(HOUR - 24 * day, name, 300, 4_000) for name in ("odd", "small")]
        rows.append((HOUR - 24 * day, "steady", MIN_REQUESTS, MIN_TOKENS))
    rows += [(HOUR, name, MIN_REQUESTS, MIN_TOKENS) for name in ("odd", "steady", "new")]
    rows.append((HOUR, "small", MIN_REQUESTS - 1, MIN_TOKENS - 2_000))
    with book._change() as connection:
        for hour, name, requests, tokens in rows:
            for model in ("m", "n"):
                numbers = (requests // 2, tokens // 2, 0, 0, 0, 0)
                connection.execute("INSERT INTO used VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", (hour, name, model, *numbers))
    with open_to_read(tmp_path) as read:
        assert unusual(read, HOUR) == [Unusual("odd", MIN_REQUESTS, 300, MIN_TOKENS, 4_000)]
        assert unusual(read, HOUR + 1) == unusual(read, HOUR), "the hour before counts as well"
        assert unusual(read, HOUR + 2) == []
