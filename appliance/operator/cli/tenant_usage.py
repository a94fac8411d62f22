"""``athanor tenant usage``: requests and tokens of every tenant since the gateway started."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.common.figures import counted
from appliance.operator.cli.admin_client import ask, read
from appliance.operator.cli.options import FIND, Admin, Output
from appliance.operator.cli.terminal import Format, output, print_data

if TYPE_CHECKING:
    from rich.console import RenderableType

    from appliance.common.status import TenantTable

EXAMPLES = """
athanor tenant usage | every tenant that has called
athanor tenant usage -o json | for scripts
"""

NARROW = 100
"""Width of a terminal from which on all counts fit."""

FEWER_COUNTS = ("requests", "refused", "failed", "input_tokens", "output_tokens")
COUNTS = (
    "requests",
    "ok",
    "refused",
    "invalid",
    "cancelled",
    "failed",
    "input_tokens",
    "cached_tokens",
    "output_tokens",
)
"""Counts of ``TenantUse`` that are shown."""


def usage(admin: Admin = FIND, output_format: Output = Format.TABLE) -> None:
    """Show what each tenant used.

    Requests by outcome and tokens, since the gateway started, of every tenant that has called, those
    with the most tokens first. Metrics show tenants beyond a bound together; these counts are exact,
    and have the same sums.
    """
    import time

    from appliance.common.status import TenantTable

    answer = ask(admin, "/tenants")
    found = read(TenantTable, answer)
    if not print_data(answer.body, output_format):
        console = output()
        console.print(usage_view(found, time.time(), console.width))


def usage_view(found: TenantTable, now: float, width: int) -> RenderableType:
    """Return the table for a terminal of so many columns; ``now`` is Unix time."""
    from rich.console import Group
    from rich.text import Text

    from appliance.common.figures import duration, printable
    from appliance.operator.cli.tables import number, table

    rows = sorted(found.tenants, key=lambda one: (-(one.input_tokens + one.output_tokens), one.tenant))
    counts = COUNTS if width >= NARROW else FEWER_COUNTS
    shown = table("TENANT", numbers=tuple(name.removesuffix("_tokens").upper() for name in counts))
    for one in rows:
        name = Text(printable(one.tenant), "bold") if one.tenant else Text("not identified", "dim")
        shown.add_row(name, *(number(getattr(one, count)) for count in counts))
    total = (sum(getattr(one, count) for one in rows) for count in counts)
    shown.add_row(Text("all", "dim"), *map(number, total))
    tenants = counted(sum(bool(one.tenant) for one in rows), "tenant")
    heading = f"{tenants} in {duration(max(0.0, now - found.started_at))}"
    return Group("", Text(heading, "bold"), "", shown)
