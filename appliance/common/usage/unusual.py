"""Tenants that send ten times what is usual for them, by the hours of the usage book. Reads only; blocks.

The thresholds are those of the alert ``AthanorTenantUnusual`` (``docs/monitoring/alerts.yaml``), which has ten minutes
where the book has hours: what is told here lasts longer, or was more.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass

from appliance.common.usage.periods import HOURS_PER_DAY

FACTOR = 10

MIN_REQUESTS = 3_600
"""Requests of an hour, one a second, below which nothing is unusual."""

MIN_TOKENS = 1_800_000
"""Tokens of an hour, 500 a second, below which nothing is unusual."""

USUAL_DAYS = 7
"""Days whose busiest hours' median is the usual."""

SEEN_DAYS = 13
"""Days that are looked at for whether a tenant was known a day ago."""

WEEK_AGO = range(166, 194)
"""Hours ago of the day that ended when a week ago was two hours on: a weekly job is usual."""

MAX_LOOKED_AT = 64
"""Tenants whose history is looked up, those with the most tokens first."""

MAX_TOLD = 20
"""Tenants that are told."""

_CANDIDATES = """
SELECT tenant, hour, SUM(requests) AS requests, SUM(input + output) AS tokens FROM used
WHERE hour IN (:running, :running - 1) GROUP BY tenant, hour HAVING requests >= :requests OR tokens >= :tokens
ORDER BY tokens DESC, tenant LIMIT :most
"""

_HISTORY = """
WITH RECURSIVE hours(one) AS (SELECT :first UNION ALL SELECT one + 1 FROM hours WHERE one < :last)
SELECT hour, SUM(requests), SUM(input + output)
FROM hours CROSS JOIN used ON used.hour = hours.one AND used.tenant = :tenant GROUP BY hour
"""
"""SQLite keeps the order of a CROSS JOIN, so each hour is found by the key (hour, tenant, model)."""


@dataclass(frozen=True, slots=True)
class Unusual:
    """What a tenant sent in an hour, beside its usual busiest hour of a day."""

    tenant: str
    requests: int
    usual_requests: int
    tokens: int
    usual_tokens: int


def unusual(connection: sqlite3.Connection, running: int) -> list[Unusual]:
    """Return the tenants that were far above their usual in the hour that runs, or in the one before; ``running`` is
    the number of that hour. Those with the most tokens come first, ``MAX_TOLD`` at most."""
    asked = {"running": running, "requests": MIN_REQUESTS, "tokens": MIN_TOKENS, "most": MAX_LOOKED_AT}
    found: dict[str, Unusual] = {}
    for tenant, hour, requests, tokens in connection.execute(_CANDIDATES, asked).fetchall():
        if tenant in found:
            continue
        first = hour - SEEN_DAYS * HOURS_PER_DAY
        rows = connection.execute(_HISTORY, {"first": first, "last": hour - 1, "tenant": tenant}).fetchall()
        if not any(past <= hour - HOURS_PER_DAY for past, _, _ in rows):
            continue  # nothing is usual for it yet
        by_requests, by_tokens = ({hour - row[0]: row[column] for row in rows} for column in (1, 2))
        if far_above(requests, by_requests, MIN_REQUESTS) or far_above(tokens, by_tokens, MIN_TOKENS):
            found[tenant] = Unusual(tenant, requests, usual(by_requests), tokens, usual(by_tokens))
    return list(found.values())[:MAX_TOLD]


def usual(past: Mapping[int, int]) -> int:
    """Return the median of the busiest hours of the last days; ``past`` has amounts by how many hours ago."""
    days = range(USUAL_DAYS)
    busiest = sorted(
        max(past.get(ago, 0) for ago in range(1 + day * HOURS_PER_DAY, 1 + (day + 1) * HOURS_PER_DAY)) for day in days
    )
    return busiest[USUAL_DAYS // 2]


def far_above(amount: int, past: Mapping[int, int], least: int) -> bool:
    """Return whether an hour's amount is unusual: not small, ten times the usual, and ten times a week ago."""
    week_ago = max(past.get(ago, 0) for ago in WEEK_AGO)
    return amount >= least and amount >= FACTOR * usual(past) and amount >= FACTOR * week_ago
