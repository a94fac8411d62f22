"""Pure: an appliance's status as something to look at in a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from appliance.status import (
    Alert,
    ApplianceStatus,
    EngineStatus,
    ModelStatus,
    PolicyStatus,
    PublicPrefixStatus,
    TenantStatus,
    TextStatus,
    is_unsafe,
    runs_unsafe,
)
from appliance.telemetry.figures import NS, clock, count, duration, printable

WIDE = 112
"""Columns from which on process ids and sandbox kinds are shown."""

NARROW = 78
"""Columns below which times and queues are left out, so that the rest can be read."""

DIGEST_CHARACTERS = 12
"""Of a policy digest: enough to tell two apart."""

_MARKS = {"broken": ("FAIL", "bold white on red"), "degraded": ("warn", "bold yellow"), "note": ("note", "cyan")}
"""Of alerts by level; the doctor's words."""

_SAID_ELSEWHERE = ("unsafe", "null", "policy")
"""Alerts that have lines of their own here."""

_STATE_STYLES = {"ready": "green", "failed": "bold red", "stopped": "red"}
"""All other states are on their way somewhere: yellow."""


def status_view(status: ApplianceStatus, now: float) -> RenderableType:
    """The whole status; ``now`` is Unix time, for how long it has been up."""
    parts: list[RenderableType] = [""]
    if runs_unsafe(status):
        parts += [_Unsafe(), ""]
    parts += [part for model in status.models if model.runner == "null" for part in (_null_warning(model.name), "")]
    heading = Text.assemble(
        (f"athanor {printable(status.version)}", "bold"),
        f"   up {duration(max(0.0, now - status.started_at))}   ",
        ("sandbox ", "dim"),
        (printable(status.sandbox), "bold red" if is_unsafe(status.sandbox) else ""),
    )
    parts += [heading, Text(printable(status.cgroup), "dim"), ""]
    for alert in status.alerts:
        if alert.key not in _SAID_ELSEWHERE:
            parts += [_alert(alert, now), ""]
    parts += [_Models((*status.models, *status.own)), "", _tenants(status.tenants), ""]
    if status.public:
        parts += [_public(status.public), ""]
    parts += [_policy(status.policy), ""]
    return Group(*parts)


def alert_mark(alert: Alert) -> tuple[str, str]:
    """The word in front of an alert, and its style."""
    return _MARKS.get(alert.level, ("warn", "bold yellow"))


def _alert(alert: Alert, now: float) -> RenderableType:
    """What is the matter and since when, whom it concerns and what to do, what to type."""
    mark, style = alert_mark(alert)
    since = f"For {duration(max(0.0, now - alert.since))}" if alert.since is not None else ""
    more = " ".join(f"{one.rstrip('.:')}." for one in (since, alert.who, alert.do) if one)
    lines = [Text(printable(alert.what), "bold"), Text(printable(more))]
    if alert.command:
        lines.append(Text.assemble(("> ", "dim"), (printable(alert.command), "cyan")))
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, width=len(mark))
    grid.add_column(overflow="fold")
    grid.add_row(Text(mark, style), Group(*lines))
    return grid


def _null_warning(name: str) -> Text:
    """The line of a model that is a benchmark's."""
    return Text(f"NULL RUNNER: {printable(name)} computes nothing; its answers are meaningless", "bold yellow")


def unsafe_warning(width: int) -> Text:
    """The loud line of an appliance that runs engines without a sandbox."""
    text = "NO SANDBOX: models and prompts run with the rights of this user"
    return Text(f" {text} ".ljust(width)[:width], "bold white on red", no_wrap=True)


class _Unsafe:
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield unsafe_warning(options.max_width)


class _Models:
    """Two lines a model, its engine and its text sandbox, then those of single tenants; fewer columns where narrow."""

    def __init__(self, models: tuple[ModelStatus, ...]) -> None:
        self._models = models

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        table = _table("MODEL", "ROOM", "STATE", *(("SANDBOX",) if width >= WIDE else ()))
        numbers = ["PID"] if width >= WIDE else []
        numbers += ["RESTARTS", "RUNNING"] if width < NARROW else ["UP", "RESTARTS", "RUNNING", "WAITING"]
        for title in (*numbers, "KV FREE"):
            table.add_column(title, justify="right", no_wrap=True)
        for model in self._models:
            name = printable(f"{model.name} of {model.tenant}" if model.tenant else model.name)
            if model.engine.state == "shared":
                table.add_row(*_room(name, "text", model.text, width))
                continue
            table.add_row(*_room(name, "engine", model.engine, width))
            table.add_row(*_room("", "text", model.text, width))
        yield table


def _room(name: str, room: str, one: EngineStatus | TextStatus, width: int) -> Iterator[Text]:
    wide, narrow = width >= WIDE, width < NARROW
    yield Text(name, "bold")
    yield Text(room)
    yield Text(printable(one.state), _STATE_STYLES.get(one.state, "yellow"))
    if wide:
        yield Text(printable(one.kind), "bold red" if is_unsafe(one.kind) else "")
        yield Text("-" if one.pid is None else str(one.pid), "dim")
    if not narrow:
        yield Text(duration(one.uptime_s))
    yield Text(count(one.restarts), "yellow" if one.restarts else "dim")
    if isinstance(one, EngineStatus):
        yield _number(one.running)
        if not narrow:
            yield _number(one.waiting)
        share = f"{100 * one.free_blocks / one.num_blocks:.0f} %" if one.num_blocks else "-"
        yield Text(f"{share} of {one.num_blocks:,}" if wide and one.num_blocks else share)


def _tenants(tenants: tuple[TenantStatus, ...]) -> RenderableType:
    counted = any(one.requests is not None for one in tenants)
    table = _table("TENANT", "CLASS")
    titles = ("IN FLIGHT", "REQUESTS", "REFUSED", "TOKENS")
    for title in titles if counted else titles[:1]:
        table.add_column(title, justify="right", no_wrap=True)
    for one in tenants:
        limit = f" of {one.max_in_flight:,}" if one.max_in_flight is not None else ""
        cells = [Text(f"{one.in_flight:,}{limit}", "" if one.in_flight else "dim")]
        if counted:
            cells += [_number(one.requests), _number(one.refused), _number(one.tokens)]
        name = Text(printable(one.id), "bold")
        table.add_row(name, Text(printable(one.isolation_class)), *cells)
    return table


def _public(prefixes: tuple[PublicPrefixStatus, ...]) -> RenderableType:
    """A line a public prefix; why one is refused stands below it."""
    table = _table("PUBLIC PREFIX", "MODEL", "STATE")
    for title in ("TENANTS", "TOKENS", "KV BLOCKS", "HITS"):
        table.add_column(title, justify="right", no_wrap=True)
    reasons = []
    for one in prefixes:
        state = Text(one.state, {"resident": "green", "refused": "bold red"}.get(one.state, "yellow"))
        numbers = map(_number, (one.tenants, one.num_tokens, one.num_blocks, one.hits))
        table.add_row(Text(printable(one.id), "bold"), Text(printable(one.model)), state, *numbers)
        if one.reason:
            reasons.append(Text(f"{printable(one.id)}: {printable(one.reason)}", "red"))
    return Group(table, *reasons)


def _policy(policy: PolicyStatus) -> RenderableType:
    loaded = clock(int(policy.loaded_at * NS), date=True)
    text = Text.assemble(
        ("POLICY  ", "dim"),
        printable(policy.digest[:DIGEST_CHARACTERS]),
        (f"   loaded {loaded}", "dim"),
        f"\n        {printable(policy.file)}",
    )
    if policy.last_error is None:
        return text
    error = Text.assemble(("the last reload changed nothing: ", "bold red"), printable(policy.last_error))
    check = Text.assemble(("> ", "dim"), (f"athanor policy check {printable(policy.file)}", "cyan"))
    return Group(text, Padding(Group(error, check), (0, 0, 0, 8)))


def _table(*titles: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for title in titles:
        table.add_column(title, no_wrap=True, overflow="ellipsis")
    return table


def _number(number: int | None) -> Text:
    return Text(count(number), "" if number else "dim")
