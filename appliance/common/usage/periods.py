"""Days and months of usage, in UTC, as whole numbers. Pure.

An hour is numbered from the Unix epoch, a day likewise; a month is numbered ``year * 12 + month - 1``.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

MS_PER_HOUR = 3_600_000
HOURS_PER_DAY = 24
SECONDS_PER_DAY = 86_400
MOST = 1 << 53
"""Bound of every sum: what a gateway that was taken over reports overflows nothing, and JSON has it exactly. In
billionths it is nine million units of the currency."""

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Period:
    """The day and the month of one moment, and when they end."""

    day: int
    month: int
    day_ends: float
    """Unix time at which the next day begins."""
    month_ends: float
    """Unix time at which the next month begins."""


def period_of(unix_s: float) -> Period:
    """Return the period of a Unix time."""
    day = int(unix_s // SECONDS_PER_DAY)
    date = EPOCH + timedelta(days=day)
    month = date.year * 12 + date.month - 1
    return Period(day, month, float((day + 1) * SECONDS_PER_DAY), month_start(month + 1).timestamp())


def month_start(month: int) -> datetime:
    """Return the first moment of a month."""
    return datetime(month // 12, month % 12 + 1, 1, tzinfo=UTC)


def first_day(month: int) -> int:
    """Return the number of a month's first day."""
    return (month_start(month) - EPOCH).days


def date_of(day: int) -> datetime:
    """Return the first moment of a day."""
    return EPOCH + timedelta(days=day)
