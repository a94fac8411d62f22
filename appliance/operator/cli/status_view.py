"""Pure: an appliance's status as something to look at in a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from appliance.common.cards import OK, CardStatus
from appliance.common.figures import NS, clock, count, counted, duration, printable, size
from appliance.common.status import (
    Alert,
    ApplianceStatus,
    EngineStatus,
    ModelStatus,
    PolicyStatus,
    PublicPrefixStatus,
    SandboxStatus,
    TenantStatus,
    is_unsafe,
    runs_unsafe,
)
from appliance.operator.cli.batches_view import batches_view
from appliance.operator.cli.checkpoints_view import checkpoints_view
from appliance.operator.cli.tables import number, rates_line, share_of, table

WIDE = 112
"""Columns from which on process ids and sandbox kinds are shown."""

NARROW = 78
"""Columns below which times and queues are left out, so that the rest can be read."""

DIGEST_CHARACTERS = 12
"""Characters of a policy digest that are shown: enough to tell two apart."""

_MARKS = {"broken": ("FAIL", "bold white on red"), "degraded": ("warn", "bold yellow"), "note": ("note", "cyan")}
"""Word and style of an alert by its level, as the doctor has them."""

_SAID_ELSEWHERE = ("unsafe", "null", "policy")
"""Alerts that have lines of their own here."""

_STATE_STYLES = {"ready": "green", "frozen": "cyan", "failed": "bold red", "hung": "bold red", "stopped": "red"}
"""All other states are on their way somewhere: yellow."""


def status_view(status: ApplianceStatus, now: float, width: int) -> RenderableType:
    """The whole status for a terminal of so many columns; ``now`` is Unix time, for how long an alert has lasted."""
    parts: list[RenderableType] = [""]
    if runs_unsafe(status):
        parts += [unsafe_warning(width), ""]
    parts += [part for model in status.models if model.runner == "null" for part in (_null_warning(model.name), "")]
    heading = Text.assemble(
        (f"athanor {printable(status.version)}", "bold"),
        f"   up {duration(status.load.up_s)}   ",
        ("sandbox ", "dim"),
        (printable(status.sandbox), "bold red" if is_unsafe(status.sandbox) else ""),
    )
    parts += [heading, Text(printable(status.cgroup), "dim"), rates_line(status.load), ""]
    for alert in status.alerts:
        if alert.key not in _SAID_ELSEWHERE:
            parts += [_alert(alert, now), ""]
    parts += [_models((*status.models, *status.own), width), "", *_forms(status.models), _tenants(status.tenants), ""]
    if status.cards:
        parts += [_cards(status.cards), ""]
    if status.checkpoints:
        parts += [checkpoints_view(status.checkpoints, now), ""]
    if status.batches is not None:
        parts += [batches_view(status.batches, width), ""]
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


def _models(models: tuple[ModelStatus, ...], width: int) -> Table:
    """Two lines a model, its engine and its text sandbox, then those of single tenants; fewer columns where narrow."""
    numbers = ["PID"] if width >= WIDE else []
    numbers += ["RESTARTS", "RUNNING"] if width < NARROW else ["UP", "RESTARTS", "RUNNING", "WAITING"]
    shown = table("MODEL", "ROOM", "STATE", *(("SANDBOX",) if width >= WIDE else ()), numbers=[*numbers, "KV FREE"])
    for model in models:
        name = printable(f"{model.name} of {model.tenant}" if model.tenant else model.name)
        if model.engine.state == "shared":
            shown.add_row(*_room(name, "text", model.text, width))
            continue
        shown.add_row(*_room(name, "engine", model.engine, width))
        shown.add_row(*_room("", "text", model.text, width))
    return shown


def _forms(models: tuple[ModelStatus, ...]) -> Iterator[RenderableType]:
    """What each engine computes with, as it says."""
    known = [model for model in models if model.engine.computes]
    for model in known:
        form, _, figures = printable(model.engine.computes).partition("; ")
        yield Text.assemble((f"{printable(model.name)} computes with ", "dim"), form)
        if figures:
            yield Padding(Text(figures, "dim"), (0, 0, 0, 2))
        if model.engine.weights:
            yield Padding(Text(f"weights held as {printable(model.engine.weights)}", "dim"), (0, 0, 0, 2))
        if model.engine.adapters:
            yield Padding(Text(f"with {counted(model.engine.adapters, 'adapter')} in memory", "dim"), (0, 0, 0, 2))
    if known:
        yield ""


def _room(name: str, room: str, one: SandboxStatus, width: int) -> Iterator[Text]:
    wide, narrow = width >= WIDE, width < NARROW
    yield Text(name, "bold")
    yield Text(room)
    state = "frozen" if one.frozen else one.state
    yield Text(printable(state), _STATE_STYLES.get(state, "yellow"))
    if wide:
        yield Text(printable(one.kind), "bold red" if is_unsafe(one.kind) else "")
        yield Text("-" if one.pid is None else str(one.pid), "dim")
    if not narrow:
        yield Text(duration(one.uptime_s))
    yield Text(count(one.restarts), "yellow" if one.restarts else "dim")
    if isinstance(one, EngineStatus):
        yield number(one.running)
        if not narrow:
            yield number(one.waiting)
        share = f"{100 * one.free_blocks / one.num_blocks:.0f} %" if one.num_blocks else "-"
        cached = f", {one.cached_blocks:,} cached" if one.cached_blocks else ""
        yield Text(f"{share} of {one.num_blocks:,}{cached}" if wide and one.num_blocks else share)


def _cards(cards: tuple[CardStatus, ...]) -> RenderableType:
    """A line a GPU, and one below for what its models hold of it."""
    shown = table("GPU", "STATE", "ENGINES", numbers=("BUSY", "MEMORY", "HEAT", "POWER"))
    held = []
    for one in cards:
        told = one.figures
        used, total = told.get("memory_used_bytes"), told.get("memory_total_bytes")
        cells = (
            f"{told['busy_percent']} %" if "busy_percent" in told else "-",
            "-" if used is None or total is None else f"{used >> 30} of {total >> 30} GiB",
            f"{told['temperature_c']} C" if "temperature_c" in told else "-",
            f"{told['power_mw'] / 1_000:.0f} W" if "power_mw" in told else "-",
        )
        style = "bold red" if one.state != OK else "yellow" if one.failing or one.out else "green"
        engines = Text(", ".join(map(printable, one.engines)) or "-")
        shown.add_row(Text(str(one.index), "bold"), Text(one.state, style), engines, *map(Text, cells))
        if one.out:
            held.append(Text(f"GPU {one.index} gets no engine: {printable(one.out)}", "red"))
        if one.state == OK and one.throttled:
            held.append(Text(f"GPU {one.index} is slowed down by {', '.join(one.throttled)}", "dim"))
        for model in one.models:
            share = f"; its share is {size(model.share)}" if model.share else ""
            held.append(Text(f"{printable(model.model)} holds {size(model.held)} of GPU {one.index}{share}", "dim"))
        if one.unknown_bytes:
            held.append(Text(f"others hold {size(one.unknown_bytes)} of GPU {one.index}", "dim"))
    return Group(shown, *held)


def _tenants(tenants: tuple[TenantStatus, ...]) -> RenderableType:
    told = any(one.requests is not None for one in tenants)
    shown = table("TENANT", "CLASS", numbers=("IN FLIGHT", "REQUESTS", "REFUSED", "TOKENS")[: 4 if told else 1])
    for one in tenants:
        cells = [share_of(one.in_flight, one.max_in_flight)]
        if told:
            cells += [number(one.requests), number(one.refused), number(one.tokens)]
        shown.add_row(Text(printable(one.id), "bold"), Text(printable(one.isolation_class)), *cells)
    return shown


def _public(prefixes: tuple[PublicPrefixStatus, ...]) -> RenderableType:
    """A line a public prefix; why one is refused stands below it."""
    shown = table("PUBLIC PREFIX", "MODEL", "STATE", numbers=("TENANTS", "TOKENS", "KV BLOCKS", "HITS"))
    reasons = []
    for one in prefixes:
        state = Text(one.state, {"resident": "green", "refused": "bold red"}.get(one.state, "yellow"))
        numbers = map(number, (one.tenants, one.num_tokens, one.num_blocks, one.hits))
        shown.add_row(Text(printable(one.id), "bold"), Text(printable(one.model)), state, *numbers)
        if one.reason:
            reasons.append(Text(f"{printable(one.id)}: {printable(one.reason)}", "red"))
    return Group(shown, *reasons)


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
