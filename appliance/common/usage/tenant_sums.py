"""What one tenant has used in the current day and month, by model. Reads only; blocks.

The book's rows lie by hour, with all tenants in each, so that a write is cheap. A tenant's rows are looked up hour by
hour: a whole month is 744 look-ups, however many tenants there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from appliance.common.usage.periods import HOURS_PER_DAY, first_day, period_of
from appliance.common.usage.report import SECONDS_PER_HOUR, Sum, open_to_read, total

MAX_MODELS = 150
"""Models of an answer, those with the most tokens; all others are one row. It must fit a datagram."""

OTHERS = ""
"""Name of the row of all other models, which no model has."""

_QUERY = """
WITH RECURSIVE hours(one) AS (SELECT :first UNION ALL SELECT one + 1 FROM hours WHERE one < :last)
SELECT model, SUM(requests), SUM(input) AS input, SUM(cached), SUM(output) AS output, SUM(cost)
FROM hours CROSS JOIN used ON used.hour = hours.one AND used.tenant = :tenant
GROUP BY model ORDER BY input + output DESC, model
"""
"""SQLite keeps the order of a CROSS JOIN, so each hour is found by the key (hour, tenant, model)."""


@dataclass(frozen=True, slots=True)
class CurrentSums:
    """Sums of a day and of the month that it is in, by model, the one with the most tokens first."""

    day: int
    month: int
    in_day: tuple[Sum, ...]
    in_month: tuple[Sum, ...]


def tenant_sums(folder: Path, tenant: str, unix_s: float) -> CurrentSums:
    """Return a tenant's sums from the book in the audit folder, up to the hour of a Unix time.

    Raises:
        ConfigError: there is no book, it is of a newer version, or it cannot be read.
    """
    period, last = period_of(unix_s), int(unix_s // SECONDS_PER_HOUR)
    sums = []
    with open_to_read(folder) as book:
        for day in (period.day, first_day(period.month)):
            found = book.execute(_QUERY, {"first": day * HOURS_PER_DAY, "last": last, "tenant": tenant})
            sums.append(_bounded([Sum((model,), *numbers) for model, *numbers in found]))
    return CurrentSums(period.day, period.month, *sums)


def _bounded(sums: Sequence[Sum]) -> tuple[Sum, ...]:
    rest = sums[MAX_MODELS:]
    return (*sums[:MAX_MODELS], *([total(rest, OTHERS)] if rest else []))
