"""Hours of a tenant: when it is served, and how long until it is again."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.hours import DAYS, Span, open_at, opens_in, read_span

WORK = "mon-fri 08:00-18:00"
NIGHT = "22:00-06:00"
WEEKEND = "sat,sun 00:00-24:00"


def at(text: str) -> float:
    """Unix time of a moment of the week that begins on Monday, 2026-11-23."""
    day, clock = text.split(" ")
    hour, minute, second = (*map(int, clock.split(":")), 0)[:3]
    return (datetime(2026, 11, 23, hour, minute, second, tzinfo=UTC) + timedelta(days=DAYS.index(day))).timestamp()


@pytest.mark.parametrize(
    ("spans", "moment", "wait_s"),
    [
        ((), "wed 03:00", 0),
        ((WORK,), "mon 08:00", 0),
        ((WORK,), "mon 07:59:30", 30),
        ((WORK,), "fri 17:59:59", 0),
        ((WORK,), "fri 18:00", (14 + 48) * 3_600),
        ((WORK,), "sun 07:00", 25 * 3_600),
        ((NIGHT,), "tue 23:00", 0),
        ((NIGHT,), "wed 05:59:59", 0),
        ((NIGHT,), "wed 06:00", 16 * 3_600),
        (("sun 22:00-06:00",), "mon 05:00", 0),
        (("sun 22:00-06:00",), "mon 06:00", 6 * 86_400 + 16 * 3_600),
        ((WEEKEND,), "sat 00:00", 0),
        ((WEEKEND,), "sun 23:59:59", 0),
        ((WEEKEND,), "mon 00:00", 5 * 86_400),
        ((WORK, WEEKEND), "fri 20:00", 4 * 3_600),
        (("fri-mon 12:00-13:00",), "sun 12:30", 0),
        (("fri-mon 12:00-13:00",), "mon 13:00", 3 * 86_400 + 23 * 3_600),
        (("wed 10:00-10:01",), "wed 10:00:59", 0),
        (("wed 10:00-10:01",), "wed 10:01", 7 * 86_400 - 60),
    ],
)
def test_a_moment_is_within_or_so_long_before(spans: tuple[str, ...], moment: str, wait_s: float) -> None:
    """Begins count, ends do not; nights and weeks go round."""
    assert open_at(spans, at(moment)) is (wait_s == 0)
    assert opens_in(spans, at(moment)) == wait_s


@given(
    st.lists(st.sampled_from(DAYS), min_size=1, unique=True),
    st.integers(0, 1_439),
    st.integers(0, 1_439),
    st.floats(0, 4e9, allow_nan=False),
)
def test_after_the_wait_it_is_open(days: list[str], begin: int, end: int, now: float) -> None:
    """Whatever the span and the time: the wait is less than a week, right after it the span holds, and shortly before
    it does not."""
    if begin == end:
        return
    text = f"{','.join(days)} {begin // 60:02}:{begin % 60:02}-{end // 60:02}:{end % 60:02}"
    wait = opens_in((text,), now)
    assert 0 <= wait <= 7 * 86_400
    assert open_at((text,), now + wait + 0.001)
    if wait > 1:
        assert not open_at((text,), now + wait - 1)


@pytest.mark.parametrize(
    "text",
    [
        *("", "mon", "08:00", "mon 8:00-9:00", "25:00-26:00", "08:00-24:01", "24:30-08:00", "08:60-09:00", "mon-fri"),
        *("08:00-08:00", "Mon 08:00-09:00", "monday 08:00-09:00", "mon,  tue 08:00-09:00", " 08:00-09:00"),
        "mon 08:00-09:00 CET",
    ],
)
def test_what_is_no_span(text: str) -> None:
    """Other words, times that no day has, and spans of no length; the right form is read (control)."""
    assert read_span("mon,wed-thu 08:00-09:30") == Span((0, 2, 3), 480, 570)
    with pytest.raises(ValueError):
        read_span(text)
