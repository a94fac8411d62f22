"""Pure: tenants, and one tenant, as something to look at in a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from appliance.common.figures import counted, printable, size
from appliance.operator.cli.key_list import keys_view
from appliance.operator.cli.tables import number, table

if TYPE_CHECKING:
    from appliance.operator.cli.tenant_list import TenantRow
    from appliance.operator.cli.tenant_show import TenantPage
    from policy.origins import Origin, Setting

WIDE = 100
"""Columns from which on tenant groups and today's requests are shown."""

MAX_ROWS = 200
"""Tenants shown at most; JSON and YAML have all."""

INDENT = (0, 0, 0, 2)


def tenants_view(rows: Sequence[TenantRow], width: int) -> RenderableType:
    """Return the table of tenants for a terminal of so many columns."""
    if not rows:
        return Text("the policy has no tenant: athanor tenant add")
    wide, priced = width >= WIDE, any(row.cost_today is not None for row in rows)
    numbers = ["KEYS", "RUNNING", *(["REQUESTS TODAY"] if wide else []), "TOKENS TODAY", *(["COST"] if priced else [])]
    shown = table("TENANT", "CLASS", *(["GROUP"] if wide else []), numbers=numbers)
    shown.add_column("MODELS", overflow="fold", min_width=6)
    for row in rows[:MAX_ROWS]:
        cells = [Text(printable(row.tenant), "bold"), Text(row.isolation_class)]
        cells += [Text(row.group or "-", "" if row.group else "dim")] if wide else []
        cells += [number(row.keys), number(row.running), *([number(row.requests_today)] if wide else [])]
        cells += [number(row.tokens_today), *([Text(row.cost_today or "-")] if priced else [])]
        shown.add_row(*cells, Text(printable(" ".join(row.models))))
    rest = f", the first {MAX_ROWS} shown; -o json has all of them" if len(rows) > MAX_ROWS else ""
    return Group(shown, "", Text(f"{counted(len(rows), 'tenant')}{rest}", "dim"))


def tenant_view(page: TenantPage) -> RenderableType:
    """Return the page of one tenant."""
    parts: list[RenderableType] = [
        Text.assemble(
            (printable(page.tenant), "bold"),
            (f"   {page.written.file}:{page.written.line}:{page.written.column}", "dim"),
        ),
        "",
        *_section("SETTINGS", _settings(page.settings)),
        *_section("CREDENTIALS", _credentials(page)),
        *_section("USE", _use(page)),
    ]
    shared = [("sharing group", page.sharing_group)] if page.sharing_group else []
    shared += [("public prefix", one) for one in page.public_prefixes]
    if shared:
        parts += _section("SHARES", _pairs([(name, Text(printable(value))) for name, value in shared]))
    if page.kept is not None:
        parts += _section("KEPT", _kept(page))
    return Group(*parts)


def ends_view(page: TenantPage) -> RenderableType:
    """Return what ends where a tenant is removed."""
    rows = [("running requests", number(page.running)), ("credentials", _listed(page.credentials))]
    holding = [row.id for row in page.keys or () if row.state in ("active", "old")]
    rows.append(("API keys in force", Text("-", "dim") if page.keys is None else _listed(list(dict.fromkeys(holding)))))
    if page.kept is not None:
        rows += [("batches that are not over", number(page.kept.batches)), ("files and responses", _files(page))]
        rows.append(
            ("sealed under its own key", Text("yes: it stays until the key is shredded" if _sealed(page) else "no"))
        )
    return Group(Text.assemble((printable(page.tenant), "bold"), ": with it ends"), Padding(_pairs(rows), INDENT), "")


def value_text(value: Any) -> str:
    """Return the value of a setting as a person reads it."""
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case dict():
            head = value.get("rate", value.get("at_once"))
            rest = [f"{name} {value_text(one)}" for name, one in value.items() if name not in ("rate", "at_once")]
            return ", ".join([value_text(head), *rest] if head is not None else rest)
        case list() | tuple():
            return ", ".join(f"({value_text(one)})" if isinstance(one, dict) else str(one) for one in value) or "-"
    return str(value)


def _section(title: str, content: RenderableType) -> Iterator[RenderableType]:
    yield Text(title, "dim")
    yield Padding(content, INDENT)
    yield ""


def _pairs(rows: Sequence[tuple[str, Text]]) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows:
        grid.add_row(Text(name), value)
    return grid


def _settings(settings: Sequence[Setting]) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_column(overflow="fold")
    for one in settings:
        style, source = ("dim", "built in") if one.origin is None else ("cyan", _source(one.origin))
        value = Text(printable(value_text(one.value)), "dim" if one.origin is None else "")
        grid.add_row(Text(one.path, value.style), value, Text(printable(source), style))
    return grid


def _source(origin: Origin) -> str:
    """Return in words where a value is written: at the tenant, a tenant group, or the defaults."""
    section, _, rest = origin.path.partition(".")
    layer = {"tenants": "own", "defaults": "defaults"}.get(section, f"group {rest.partition('.')[0]}")
    return f"{layer} ({origin.file.rpartition('/')[2]}:{origin.line})"


def _credentials(page: TenantPage) -> RenderableType:
    keys = page.keys or []
    known = {row.id for row in keys}
    others = [one for one in page.credentials if one.removeprefix("key:") not in known]
    rows = [Text(printable(one) + _absent(page, one)) for one in others]
    return Group(*([keys_view(keys)] if keys else []), *rows)


def _absent(page: TenantPage, credential: str) -> str:
    is_key = credential.startswith("key:")
    return "   (the key table has no such key)" if is_key and page.keys is not None else ""


def _use(page: TenantPage) -> RenderableType:
    shown = table(
        "", numbers=("REQUESTS", "INPUT", "CACHED", "OUTPUT", *((f"COST {page.currency}",) if page.currency else ()))
    )
    for name, label in (("today", "today (UTC)"), ("month", "this month")):
        used = page.used[name] or {}
        names = ("requests", "input_tokens", "cached_tokens", "output_tokens")
        cost = (Text(used.get("cost", "-")),) if page.currency else ()
        shown.add_row(Text(label), *(number(used.get(one)) for one in names), *cost)
    running = "not known" if page.running is None else counted(page.running, "request")
    return Group(shown, Text(f"running now: {running}"))


def _kept(page: TenantPage) -> Table:
    rows = [
        ("batches that are not over", number(page.kept.batches if page.kept else 0)),
        ("files and responses", _files(page)),
    ]
    return _pairs([*rows, ("sealed under its own key", Text("yes" if _sealed(page) else "no"))])


def _files(page: TenantPage) -> Text:
    kept = page.kept
    if kept is None or not (kept.files or kept.responses):
        return Text("0", "dim")
    return Text(f"{counted(kept.files, 'file')}, {counted(kept.responses, 'response')}, {size(kept.bytes)}")


def _sealed(page: TenantPage) -> bool:
    return page.kept is not None and page.kept.has_key


def _listed(names: Sequence[str]) -> Text:
    return Text(printable(", ".join(names)) or "none", "" if names else "dim")
