"""Hours in which a tenant is served. Pure; all times are UTC.

A span is ``DAYS FROM-TO`` or ``FROM-TO``: ``mon-fri 08:00-18:00``, ``sat,sun 00:00-24:00``, ``22:00-06:00``. One that
ends before it begins goes on into the next day.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from policy.wording import counted

DAY_MINUTES = 24 * 60
WEEK_MINUTES = 7 * DAY_MINUTES
EPOCH_DAY = 3
"""Day of the week, from Monday, of the Unix epoch: a Thursday."""

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")

_DAY = "(?:mon|tue|wed|thu|fri|sat|sun)"
_DAYS = rf"{_DAY}(?:-{_DAY})?(?:,{_DAY}(?:-{_DAY})?)*"
_CLOCK = "([01][0-9]|2[0-4]):([0-5][0-9])"
_SPAN = re.compile(rf"(?:({_DAYS}) )?{_CLOCK}-{_CLOCK}")


@dataclass(frozen=True, slots=True)
class Span:
    """Days of the week, and the minutes of a day from the first to the one before the last."""

    days: tuple[int, ...]
    begin: int
    end: int
    """Beyond ``DAY_MINUTES`` where the span goes on into the next day."""


def read_span(text: str) -> Span:
    """Read a span.

    Raises:
        ValueError: it is none; the message says why.
    """
    found = _SPAN.fullmatch(text)
    if found is None:
        raise ValueError("must be hours such as mon-fri 08:00-18:00, or 22:00-06:00 for every day; UTC")
    begin, end = int(found[2]) * 60 + int(found[3]), int(found[4]) * 60 + int(found[5])
    if max(begin, end) > DAY_MINUTES:
        raise ValueError("a day ends at 24:00")
    if begin == end:
        raise ValueError("it begins and ends at one time; all day is 00:00-24:00")
    days = tuple(sorted({day for part in (found[1] or "mon-sun").split(",") for day in _days(part)}))
    return Span(days, begin, end if end > begin else end + DAY_MINUTES)


def open_at(spans: Sequence[str], unix_s: float) -> bool:
    """Return whether a time is within the spans, as ``read_span`` takes them; without spans every one is."""
    return not spans or _wait_minutes(tuple(spans), _minute_of_week(unix_s)) == 0


def opens_in(spans: Sequence[str], unix_s: float) -> float:
    """Return the seconds until the spans hold a time again; 0 where they hold this one."""
    minutes = _wait_minutes(tuple(spans), _minute_of_week(unix_s)) if spans else 0
    return max(0.0, minutes * 60 - unix_s % 60) if minutes else 0.0


def span_text(seconds: float) -> str:
    """Return a time to wait in words: ``2 days 3 hours``, ``45 minutes``."""
    minutes = ceil(seconds / 60)
    days, rest = divmod(minutes, DAY_MINUTES)
    hours, minutes = divmod(rest, 60)
    parts = [(days, "day"), (hours, "hour"), (minutes, "minute")]
    return " ".join(counted(number, noun) for number, noun in parts if number)


def _minute_of_week(unix_s: float) -> int:
    return (int(unix_s // 60) + EPOCH_DAY * DAY_MINUTES) % WEEK_MINUTES


@lru_cache(maxsize=4_096)
def _wait_minutes(spans: tuple[str, ...], now: int) -> int:
    """Return the minutes from a minute of the week until one of the spans. All requests of a minute ask for one."""
    best = WEEK_MINUTES
    for span in map(_span, spans):
        for day in span.days:
            begin = day * DAY_MINUTES + span.begin
            since = (now - begin) % WEEK_MINUTES
            if since < span.end - span.begin:
                return 0
            best = min(best, WEEK_MINUTES - since)
    return best


def _days(text: str) -> tuple[int, ...]:
    first, _, last = text.partition("-")
    begin = DAYS.index(first)
    count = (DAYS.index(last) - begin) % 7 + 1 if last else 1
    return tuple((begin + more) % 7 for more in range(count))


_span = lru_cache(maxsize=4_096)(read_span)
"""Spans by their text."""
