"""Pure: a policy, or what is wrong with one, as something to look at in a terminal."""

from __future__ import annotations

from itertools import islice

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from appliance.common.figures import counted, printable
from appliance.operator.cli.tables import table
from policy.errors import Problem
from policy.model import PolicySet, PublicPrefix, Route, Tenant
from policy.route_text import route_text

TAB = 8
"""Columns of a tab; YAML refuses them for indentation, which is a problem to be shown."""

WIDE = 100
"""Columns from which on isolation class and retention are shown."""

MAX_ROWS = 200
"""Tenants shown at most: a table of thousands takes seconds to lay out, and is read by programs, as JSON."""

MIN_LINE = 20
"""Columns of source text shown at least."""


def problem_view(problem: Problem, text: str, width: int) -> RenderableType:
    """One problem: where, what, and the line of ``text`` with a caret under the column."""
    where = f"{problem.file}:{problem.line}:{problem.column}" if problem.line else problem.file
    heading = Text.assemble((printable(where), "bold"), ": ", (printable(problem.path), "cyan") if problem.path else "")
    heading.append(": " if problem.path else "")
    heading.append(printable(problem.message))
    lines = text.splitlines()
    if not 0 < problem.line <= len(lines):
        return Group(heading, "")
    margin = f"{problem.line:>5} | "
    source, column = _window(lines[problem.line - 1], problem.column, width - len(margin))
    caret = Text.assemble((" " * (len(margin) - 2) + "| ", "dim"), (" " * column + "^", "bold red"))
    shown = Text.assemble((margin, "dim"), source)
    shown.no_wrap = caret.no_wrap = True
    return Group(heading, shown, caret, "")


def policy_view(policy: PolicySet, width: int) -> RenderableType:
    """Tenants with what they may use, and the digest by which status and traces name the policy, for a terminal of so
    many columns."""
    tenants = len(policy.tenants)
    good = Text.assemble(
        ("ok", "bold green"), f"   {counted(tenants, 'tenant')}", (f"   digest {policy.digest[:12]}", "dim")
    )
    public = [_prefix(prefix) for prefix in policy.public.values()]
    routes = [_route(route) for route in policy.routes.values()]
    rest = tenants - MAX_ROWS
    more = [Text(f"and {counted(rest, 'tenant')} more; -o json has all of them", "dim")] if rest > 0 else []
    return Group(_tenants(policy, wide=width >= WIDE), *more, "", *public, *routes, good) if tenants else good


def _prefix(prefix: PublicPrefix) -> Text:
    """One line of a public prefix."""
    kind = "conversation" if prefix.chat else "text"
    size = len(prefix.source.encode())
    whose = ", ".join(prefix.tenants) or "nobody"
    return Text.assemble(
        ("public prefix ", "dim"),
        (printable(prefix.id), "bold"),
        f"   {kind} of {counted(size, 'byte')} for {printable(prefix.model)}   by {printable(whose)}",
    )


def _route(route: Route) -> Text:
    """One line of a route."""
    return Text.assemble(
        ("route ", "dim"), (printable(route.id), "bold"), f"   requests go to {printable(route_text(route))}"
    )


def _tenants(policy: PolicySet, *, wide: bool) -> Table:
    """A line a tenant; ``wide``: with isolation class and retention."""
    numbers = ("KEYS", "REQ/MIN", "TOK/MIN", "PARALLEL", "CONTEXT", "OUTPUT")
    shown = table("TENANT", *(("CLASS", "RETENTION") if wide else ()), numbers=numbers)
    shown.add_column("MODELS", overflow="fold", min_width=6)
    for tenant in islice(policy.tenants.values(), MAX_ROWS):
        classes = (tenant.isolation_class.value, tenant.retention.value) if wide else ()
        shown.add_row(
            Text(printable(tenant.id), "bold"),
            *classes,
            *(f"{number:,}" for number in _numbers(tenant)),
            Text(printable(" ".join(tenant.models))),
        )
    return shown


def _numbers(tenant: Tenant) -> tuple[int, ...]:
    limits = tenant.limits
    return (
        len(tenant.credentials),
        limits.requests_per_minute,
        limits.tokens_per_minute,
        limits.concurrency,
        limits.max_context_tokens,
        limits.max_output_tokens,
    )


def _window(line: str, column: int, room: int) -> tuple[str, int]:
    """The part of the line around a 1-based column that fits, and where the caret goes in it."""
    before = line[: column - 1].expandtabs(TAB)
    text = printable(line.expandtabs(TAB))
    room = max(room, MIN_LINE)
    at = len(before)
    start = max(0, min(at - room // 2, len(text) - room)) if len(text) > room else 0
    return text[start : start + room], min(at - start, room - 1)
