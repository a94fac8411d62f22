"""Pure: usage as something to watch in a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from appliance.cli.status_view import unsafe_warning
from appliance.status import is_unsafe
from appliance.telemetry.figures import count, duration, printable
from appliance.usage import ModelUsage, TenantUsage, Usage

BAR_CELLS = 20
"""Characters of a full bar."""

FULL, NEARLY = 0.95, 0.8
"""Shares of KV memory from which on a bar is red, or yellow."""


def top_view(usage: Usage) -> RenderableType:
    """Everything on one screen."""
    heading = Text.assemble(
        (f"athanor {printable(usage.version)}", "bold"), f"   up {duration(usage.up_s)}   ",
        (f"{usage.tokens_per_s:,.0f} tokens/s", "bold green" if usage.tokens_per_s else "dim"),
        (f"   over {usage.seconds:.0f} s" if usage.seconds else "   looking", "dim"),
    )  # fmt: skip
    parts: list[RenderableType] = ["", heading, ""]
    if is_unsafe(usage.sandbox):
        parts = ["", unsafe_warning(80), *parts]
    return Group(*parts, _models(usage.models), "", _tenants(usage.tenants))


def bar(share: float, cells: int = BAR_CELLS) -> Text:
    """A share of 0 to 1 as a bar of fixed width, with its number."""
    share = min(1.0, max(0.0, share))
    filled = round(share * cells)
    style = "red" if share >= FULL else "yellow" if share >= NEARLY else "green"
    return Text.assemble(("#" * filled, style), ("." * (cells - filled), "dim"), f" {100 * share:3.0f} %")


def _models(models: tuple[ModelUsage, ...]) -> Table:
    table = _table("MODEL", "STATE")
    for title in ("RUNNING", "WAITING"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("KV IN USE", no_wrap=True)
    table.add_column("RESTARTS", justify="right", no_wrap=True)
    for one in models:
        table.add_row(
            Text(printable(one.name), "bold"), Text(one.state, "green" if one.state == "ready" else "yellow"),
            _number(one.running), Text(f"{one.waiting:,}", "yellow" if one.waiting else "dim"),
            Text("-", "dim") if one.kv_used is None else bar(one.kv_used),
            Text(f"{one.restarts:,}", "yellow" if one.restarts else "dim"),
        )  # fmt: skip
    return table


def _tenants(tenants: tuple[TenantUsage, ...]) -> Table:
    table = _table("TENANT", "CLASS")
    for title in ("TOKENS/S", "REQUESTS/S", "REFUSED/S", "IN FLIGHT", "TOKENS"):
        table.add_column(title, justify="right", no_wrap=True)
    for one in tenants:
        limit = f" of {one.max_in_flight:,}" if one.max_in_flight is not None else ""
        table.add_row(
            Text(printable(one.id), "bold"), Text(printable(one.isolation_class)), _rate(one.tokens_per_s, "green"),
            _rate(one.requests_per_s), _rate(one.refused_per_s, "yellow"),
            Text(f"{one.in_flight:,}{limit}", "" if one.in_flight else "dim"), Text(count(one.tokens), "dim"),
        )  # fmt: skip
    return table


def _table(*titles: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for title in titles:
        table.add_column(title, no_wrap=True, overflow="ellipsis")
    return table


def _rate(value: float | None, style: str = "") -> Text:
    if not value:
        return Text("-" if value is None else "0", "dim")
    return Text(f"{value:,.0f}" if value >= 10 else f"{value:.1f}", style)


def _number(value: int) -> Text:
    return Text(f"{value:,}", "" if value else "dim")
