"""Pure: usage as something to watch in a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from appliance.common.figures import count, duration, printable
from appliance.common.status import TenantStatus, is_unsafe
from appliance.operator.cli.status_view import NARROW, alert_mark, unsafe_warning
from appliance.operator.cli.tables import number, rate, rates_line, share_of, table
from appliance.operator.usage import ModelUsage, Usage

BAR_CELLS, NARROW_CELLS = 20, 8
"""Characters of a full bar, and of one where there is little room."""

MAX_ALERTS = 3
"""Alerts shown above the tables, a line each; `athanor status` has all of them in full."""

FULL, NEARLY = 0.95, 0.8
"""Shares of KV memory from which on a bar is red, or yellow."""


def top_view(usage: Usage, width: int) -> RenderableType:
    """Everything on one screen of so many columns."""
    heading = Text.assemble((f"athanor {printable(usage.version)}", "bold"), f"   up {duration(usage.load.up_s)}")
    parts: list[RenderableType] = ["", heading, rates_line(usage.load), ""]
    if is_unsafe(usage.sandbox):
        parts = ["", unsafe_warning(80), *parts]
    for alert in usage.alerts[:MAX_ALERTS]:
        mark, style = alert_mark(alert)
        parts.append(Text.assemble((mark, style), "  ", (printable(alert.what), "bold")))
    if len(usage.alerts) > MAX_ALERTS:
        parts.append(Text(f"      and {len(usage.alerts) - MAX_ALERTS} more: athanor status", "dim"))
    parts += [""] if usage.alerts else []
    narrow = width < NARROW
    return Group(*parts, _models(usage.models, narrow=narrow), "", _tenants(usage.tenants, narrow=narrow))


def bar(share: float, cells: int = BAR_CELLS) -> Text:
    """A share of 0 to 1 as a bar of fixed width, with its number."""
    share = min(1.0, max(0.0, share))
    filled = round(share * cells)
    style = "red" if share >= FULL else "yellow" if share >= NEARLY else "green"
    return Text.assemble(("#" * filled, style), ("." * (cells - filled), "dim"), f" {100 * share:3.0f} %")


def _models(models: tuple[ModelUsage, ...], *, narrow: bool) -> Table:
    shown = table("MODEL", "STATE", numbers=("RUNNING", "WAITING"))
    shown.add_column("KV IN USE", no_wrap=True)
    if not narrow:
        shown.add_column("RESTARTS", justify="right", no_wrap=True)
    for one in models:
        cells = [
            Text(printable(one.name), "bold"),
            Text(one.state, "green" if one.state == "ready" else "yellow"),
            number(one.running),
            Text(f"{one.waiting:,}", "yellow" if one.waiting else "dim"),
            Text("-", "dim") if one.kv_used is None else bar(one.kv_used, NARROW_CELLS if narrow else BAR_CELLS),
        ]
        if not narrow:
            cells.append(Text(f"{one.restarts:,}", "yellow" if one.restarts else "dim"))
        shown.add_row(*cells)
    return shown


def _tenants(tenants: tuple[TenantStatus, ...], *, narrow: bool) -> Table:
    numbers = ("TOKENS OUT/S", "REQUESTS/S", "REFUSED/S", "IN FLIGHT", *(() if narrow else ("TOKENS",)))
    shown = table("TENANT", *(() if narrow else ("CLASS",)), numbers=numbers)
    for one in tenants:
        cells = [Text(printable(one.id), "bold"), *(() if narrow else (Text(printable(one.isolation_class)),))]
        cells += [
            rate(one.output_tokens_per_s, "green"),
            rate(one.requests_per_s),
            rate(one.refused_per_s, "yellow"),
            share_of(one.in_flight, one.max_in_flight),
        ]
        shown.add_row(*cells, *(() if narrow else (Text(count(one.tokens), "dim"),)))
    return shown
