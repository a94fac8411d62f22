"""What one tenant has used in a time, by model or by end user. Reads only; blocks.

Rows of the book lie by hour or day, with all tenants in each. A tenant's are looked up one by one: 30 days are 720
look-ups, however many tenants there are.
"""

from __future__ import annotations

from pathlib import Path

from appliance.common.errors import ConfigError
from appliance.common.usage.periods import HOURS_PER_DAY
from appliance.common.usage.report import By, Filter, Sum, open_to_read, reasoning

_TABLES = {By.MODEL: ("used", "hour"), By.USER: ("used_by_user", "day")}


def tenant_table(folder: Path, tenant: str, by: By, chosen: Filter, within_s: float) -> list[Sum]:
    """Return a tenant's sums by ``By.MODEL`` or ``By.USER``, those with the highest cost first.

    Args:
        folder: the audit log's.
        tenant: its name, or its pseudonym.
        by: what is summed by.
        chosen: the time; its tenants, models and users are not looked at.
        within_s: seconds that reading may take.

    Raises:
        ConfigError: there is no book, it is of a newer version, it cannot be read, it is not summed so, or reading took
            too long.
    """
    if by not in _TABLES:
        raise ConfigError(f"one tenant's usage is summed by {' or '.join(_TABLES)}, and not by {by}")
    table, unit = _TABLES[by]
    first, behind = chosen.days
    if by is By.MODEL:
        first, behind = first * HOURS_PER_DAY, behind * HOURS_PER_DAY
    with open_to_read(folder, within_s) as book:
        query = (  # Tables and columns are constants; values are bound.
            f"WITH RECURSIVE times(one) AS (SELECT :first UNION ALL SELECT one + 1 FROM times WHERE one + 1 < :behind) "  # noqa: S608
            f"SELECT {by.value}, SUM(requests), SUM(input) AS input, SUM(cached), SUM(output) AS output, "
            f"SUM(cost) AS cost, {reasoning(book)} "
            f"FROM times CROSS JOIN {table} ON {table}.{unit} = times.one AND {table}.tenant = :tenant "
            f"GROUP BY {by.value} ORDER BY cost DESC, input + output DESC, {by.value}"
        )
        found = book.execute(query, {"first": first, "behind": behind, "tenant": tenant})
        return [Sum((str(name),), *numbers) for name, *numbers in found]
