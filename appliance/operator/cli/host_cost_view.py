"""Pure: what the machine cost by model, as a table, as comma-separated values, and as a document for programs."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from appliance.common import spreadsheet
from appliance.common.figures import printable
from appliance.common.usage.host_cost import HostCost, ModelCost
from appliance.common.usage.report import Filter
from appliance.operator.cli.tables import number, table

DECIMALS = 4
"""Decimals of amounts, which are shares of a price of hours."""

KEYS = (
    *("model", "requests", "input_tokens", "cached_tokens", "output_tokens"),
    *("share", "cost", "per_million_output_tokens"),
)
"""Names of the columns in documents."""


def host_cost_view(found: HostCost, chosen: Filter) -> RenderableType:
    """Return the table, and how its numbers come about."""
    time = f"{chosen.since:%Y-%m-%d %H:%M} to {chosen.until:%Y-%m-%d %H:%M} UTC"
    unit = f" {found.currency}" if found.currency else ""
    method = (
        f"{found.hours:,.2f} hours awake x {found.price_per_hour:g}{unit} = {found.cost:,.{DECIMALS}f}{unit}, "
        "shared by computed tokens (input without cached, and output)"
    )
    if not found.models:
        return Group(Text("nothing was used"), Text(f"{time}   {method}", "dim"))
    shown = table("MODEL", numbers=("REQUESTS", "INPUT", "OUTPUT", "SHARE", "COST", "PER 1M OUTPUT"))
    for one in found.models:
        each = one.per_million
        shown.add_row(
            Text(printable(one.model), "bold"),
            *map(number, (one.requests, one.input, one.output)),
            f"{one.share:.1%}",
            f"{one.cost:,.{DECIMALS}f}",
            "-" if each is None else f"{each:,.{DECIMALS}f}",
        )
    return Group(shown, "", Text(time, "dim"), Text(method, "dim"))


def csv_text(found: HostCost) -> str:
    """Return the rows with a line of titles."""
    return spreadsheet.csv_text(KEYS, map(_values, found.models), names=1)


def document(found: HostCost, chosen: Filter) -> dict[str, object]:
    """Return what other programs read."""
    return {
        "since": f"{chosen.since:%Y-%m-%dT%H:%M:%SZ}",
        "until": f"{chosen.until:%Y-%m-%dT%H:%M:%SZ}",
        "hours_awake": round(found.hours, DECIMALS),
        "price_per_hour": found.price_per_hour,
        "currency": found.currency,
        "cost": round(found.cost, DECIMALS),
        "rows": [dict(zip(KEYS, _values(one), strict=True)) for one in found.models],
    }


def _values(one: ModelCost) -> tuple[object, ...]:
    each = one.per_million
    numbers = (one.model, one.requests, one.input, one.cached, one.output, round(one.share, DECIMALS))
    return (*numbers, round(one.cost, DECIMALS), None if each is None else round(each, DECIMALS))
