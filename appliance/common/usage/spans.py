"""Spans of time that the operator's page sums usage over: whole days in UTC, today included. Pure."""

from __future__ import annotations

from datetime import timedelta
from enum import StrEnum

from appliance.common.usage.periods import HOURS_PER_DAY, date_of, period_of
from appliance.common.usage.report import SECONDS_PER_HOUR, By, Filter


class Span(StrEnum):
    """A span that ends with the hour that runs."""

    TODAY = "today"
    WEEK = "7d"
    """Today and the six days before."""
    MONTH = "30d"
    """Today and the 29 days before."""


_DAYS = {Span.TODAY: 1, Span.WEEK: 7, Span.MONTH: 30}

HOURLY = frozenset({Span.TODAY, Span.WEEK})
"""Spans that are plotted by hour; the others by day."""


def times(span: Span, unix_s: float) -> Filter:
    """Return the hours of a span, up to the end of the hour that a Unix time is in."""
    since = date_of(period_of(unix_s).day) - timedelta(days=_DAYS[span] - 1)
    hour = int(unix_s // SECONDS_PER_HOUR)
    return Filter(since, date_of(0) + timedelta(hours=hour + 1))


def step_of(span: Span) -> By:
    """Return what the plot of a span has a step for."""
    return By.HOUR if span in HOURLY else By.DAY


def step_s(span: Span) -> int:
    """Return the seconds of one step of the plot."""
    return SECONDS_PER_HOUR * (1 if span in HOURLY else HOURS_PER_DAY)


def num_steps(span: Span) -> int:
    """Return the number of steps of the whole span: of today those to come as well, so that days look alike."""
    return _DAYS[span] * (HOURS_PER_DAY if span in HOURLY else 1)
