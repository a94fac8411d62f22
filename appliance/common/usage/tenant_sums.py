"""What one tenant has used in the current day and month, by model and by end user. Reads only; blocks.

The book's rows lie by hour, with all tenants in each, so that a write is cheap. A tenant's rows are looked up hour by
hour: a whole month is 744 look-ups, however many tenants there are. Rows of end users lie by day.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from appliance.common.usage import users
from appliance.common.usage.periods import HOURS_PER_DAY, first_day, period_of
from appliance.common.usage.pseudonyms import OTHERS as OTHER_USERS
from appliance.common.usage.report import SECONDS_PER_HOUR, Sum, open_to_read, total

MAX_MODELS = 140
"""Models of an answer, those with the most tokens; all others are one row. It must fit a datagram."""

MAX_USERS = 80
"""End users of an answer, those with the most tokens; all others are one row. It must fit a datagram."""

OTHERS = ""
"""Name of the row of all other models or end users, which none of them has."""

_QUERY = """
WITH RECURSIVE hours(one) AS (SELECT :first UNION ALL SELECT one + 1 FROM hours WHERE one < :last)
SELECT model, SUM(requests), SUM(input) AS input, SUM(cached), SUM(output) AS output, SUM(cost), SUM(reasoning)
FROM hours CROSS JOIN used ON used.hour = hours.one AND used.tenant = :tenant
GROUP BY model ORDER BY input + output DESC, model
"""
"""SQLite keeps the order of a CROSS JOIN, so each hour is found by the key (hour, tenant, model)."""

_QUERY_USERS = """
WITH RECURSIVE days(one) AS (SELECT :first UNION ALL SELECT one + 1 FROM days WHERE one < :last)
SELECT user, SUM(requests), SUM(input) AS input, SUM(cached), SUM(output) AS output, SUM(cost), SUM(reasoning)
FROM days CROSS JOIN used_by_user ON used_by_user.day = days.one AND used_by_user.tenant = :tenant
WHERE :user IS NULL OR user = :user
GROUP BY user ORDER BY user = :others, input + output DESC, user
"""


@dataclass(frozen=True, slots=True)
class CurrentSums:
    """Sums of a day and of the month that it is in, by model and by pseudonym of end users, those with the most tokens
    first."""

    day: int
    month: int
    in_day: tuple[Sum, ...]
    in_month: tuple[Sum, ...]
    users_in_day: tuple[Sum, ...]
    users_in_month: tuple[Sum, ...]


def tenant_sums(folder: Path, tenant: str, unix_s: float, user: str = "") -> CurrentSums:
    """Return a tenant's sums from the book in the audit folder, up to the hour of a Unix time; of its end users, where
    the digest of a name is given, those of this one.

    Raises:
        ConfigError: there is no book, it is of a newer version, or it cannot be read.
    """
    period, last = period_of(unix_s), int(unix_s // SECONDS_PER_HOUR)
    by_model, by_user = [], []
    with open_to_read(folder) as book:
        chosen = users.known_pseudonym(book, tenant, user) if user else None
        for day in (period.day, first_day(period.month)):
            found = book.execute(_QUERY, {"first": day * HOURS_PER_DAY, "last": last, "tenant": tenant})
            by_model.append(_bounded([Sum((model,), *numbers) for model, *numbers in found], MAX_MODELS))
            of_users = {"first": day, "last": period.day, "tenant": tenant, "user": chosen, "others": OTHER_USERS}
            rows = [Sum((name,), *numbers) for name, *numbers in book.execute(_QUERY_USERS, of_users)]
            named = sum(one.keys[0] != OTHER_USERS for one in rows)
            by_user.append(_bounded(rows, min(named, MAX_USERS)))
    return CurrentSums(period.day, period.month, *by_model, *by_user)


def _bounded(sums: Sequence[Sum], most: int) -> tuple[Sum, ...]:
    rest = sums[most:]
    return (*sums[:most], *([total(rest, OTHERS)] if rest else []))
