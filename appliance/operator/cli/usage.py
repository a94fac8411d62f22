"""``athanor usage``: what tenants used and what it cost, from the usage book."""

from __future__ import annotations

import socket
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from appliance.operator.cli import exits
from appliance.operator.cli.audit import ELSEWHERE, log_folder
from appliance.operator.cli.moments import MOMENTS, read_moment
from appliance.operator.cli.options import DEFAULT_CONFIG, Config
from appliance.operator.cli.terminal import Format, fail, output, print_data

if TYPE_CHECKING:
    from appliance.common.usage.report import By, Filter

EXAMPLES = """
athanor usage | this month, by tenant
athanor usage --since yesterday --until today | who used most yesterday
athanor usage --by day,model --tenant alpha --since 30d | what alpha used, day by day
athanor usage -o plot --since 7d | when it was used, and by whom, as a plot
athanor usage --by tenant,user --since yesterday | who of the tenants' end users used most
athanor usage --cost --since 7d | what a million output tokens cost, by the machine's price
athanor usage --config .athanor/athanor.yaml | of the appliance that this configuration is of
athanor usage --since 2026-10 --until 2026-11 -o csv | last month's bills
"""


User = Annotated[
    list[str] | None,
    typer.Option("--user", metavar="NAME", help="Only this end user, as requests name it; may be repeated."),
]
Cost = Annotated[
    bool, typer.Option("--cost", help="What the machine cost by model, at host.price_per_hour of --config.")
]


class UsageFormat(StrEnum):
    """``--output`` of this command: a bill is opened in a spreadsheet."""

    TABLE = "table"
    PLOT = "plot"
    CSV = "csv"
    JSON = "json"
    YAML = "yaml"


def usage(  # noqa: PLR0913 - a parameter is an option
    since: Annotated[
        str, typer.Option("--since", metavar="TIME", help=f"Begin of the time: {MOMENTS} (UTC), down to the hour.")
    ] = "month",
    until: Annotated[str, typer.Option("--until", metavar="TIME", help="End of the time, likewise.")] = "now",
    by: Annotated[
        str,
        typer.Option(
            "--by", metavar="NAMES", help="Sum by tenant, model, month, day, hour, user; several with commas."
        ),
    ] = "tenant",
    tenant: Annotated[
        list[str] | None, typer.Option("--tenant", metavar="ID", help="Only this tenant; may be repeated.")
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option("--model", metavar="NAME", help="Only this model; may be repeated.")
    ] = None,
    user: User = None,
    cost: Cost = False,
    config: Config = DEFAULT_CONFIG,
    directory: Annotated[
        Path | None, typer.Option("--from", metavar="DIR", help="Folder of the book, in place of --config's audit log.")
    ] = None,
    output_format: Annotated[
        UsageFormat, typer.Option("--output", "-o", metavar="FORMAT", help="table, plot, csv, json or yaml.")
    ] = UsageFormat.TABLE,
) -> None:
    """Show what tenants used and what it cost.

    Requests, tokens and cost as they are in the audit log, since the log began: a restart loses
    nothing. Prompt tokens that were found in the cache are part of the input. Costs are in the
    currency of the policy's prices, at the prices of their time.

    End users are shown by pseudonyms, in whole days, 1,000 of a tenant a day and the rest as
    "others"; requests that name none are in no row of theirs. --user finds the row of a name.

    A plot has a column for each hour, day or month: that of --by, else the shortest of which all
    have room. Lines of the twelve largest stand below it, each with a scale of its own.

    With --cost: hours in which the appliance ran, times the price of an hour, shared among models
    by computed tokens, and what a million output tokens of each cost so.
    """
    from appliance.common.usage.report import Filter

    names = _names(by)
    now = datetime.now(UTC)
    begin, end = (_hour(read_moment(text, now, option)) for text, option in ((since, "--since"), (until, "--until")))
    if until == "now":
        end += timedelta(hours=1)  # the hour that runs
    if end <= begin:
        fail(exits.USAGE, f"the time ends before it begins: from {begin:%Y-%m-%dT%HZ} to {end:%Y-%m-%dT%HZ}")
    chosen = Filter(begin, end, tuple(tenant or ()), tuple(model or ()), tuple(user or ()))
    folder = directory or _folder(config)
    if cost:
        _show_cost(config, folder, chosen, now, output_format)
        return
    if output_format is UsageFormat.PLOT:
        _show_plot(folder, names, chosen)
    else:
        _show(folder, names, chosen, output_format)


def _folder(config: Path) -> Path:
    """Folder of the log that a configuration names; the command ends where there is none."""
    from appliance.common.errors import ConfigError

    try:
        return log_folder(config)
    except ConfigError as error:
        fail(exits.REFUSED, error.message, ELSEWHERE)


def _names(text: str) -> list[By]:
    from appliance.common.usage.report import By

    try:
        names = [By(name.strip()) for name in text.split(",")]
    except ValueError:
        fail(exits.USAGE, f"usage is summed by {', '.join(By)}, not by {text!r}")
    if len(set(names)) < len(names):
        fail(exits.USAGE, f"--by names something twice: {text!r}")
    return names


def _hour(moment: datetime) -> datetime:
    """The book has whole hours: begin of the one that holds a moment."""
    return moment.replace(minute=0, second=0, microsecond=0)


def _show(folder: Path, names: list[By], chosen: Filter, output_format: UsageFormat) -> None:
    from appliance.common.errors import ConfigError
    from appliance.common.usage.report import sums
    from appliance.operator.cli.usage_view import csv_text, document, usage_view

    try:
        found = sums(folder, names, chosen)
    except ConfigError as error:
        fail(exits.REFUSED, error.message, ELSEWHERE)
    if output_format is UsageFormat.CSV:
        typer.echo(csv_text(found, names), nl=False)
    elif not print_data(document(found, names, chosen), Format(output_format.value)):
        console = output()
        console.print(usage_view(found, names, chosen, console.width))


def _show_plot(folder: Path, names: list[By], chosen: Filter) -> None:
    from appliance.common.errors import ConfigError
    from appliance.operator.cli.usage_plot import plot_view, read_plot, room

    console = output()
    try:
        found = read_plot(folder, names, chosen, room(console.width))
    except ValueError as error:
        fail(exits.USAGE, str(error))
    except ConfigError as error:
        fail(exits.REFUSED, error.message, ELSEWHERE)
    console.print(plot_view(found, chosen, console.width))


def _show_cost(path: Path, folder: Path, chosen: Filter, now: datetime, output_format: UsageFormat) -> None:
    from appliance.common.config_loader import load_config
    from appliance.common.errors import ConfigError
    from appliance.common.usage.host_cost import host_cost
    from appliance.common.usage.report import By, hours_awake, sums
    from appliance.operator.cli.host_cost_view import csv_text, document, host_cost_view

    if output_format is UsageFormat.PLOT:
        fail(exits.USAGE, "the machine's cost is of the whole time and has no plot: leave --cost or -o plot out")
    if chosen.tenants or chosen.models or chosen.users:
        fail(exits.USAGE, "the machine's cost is of all tenants and models: leave --tenant, --model and --user out")
    try:
        loaded = load_config(path)
    except ConfigError as error:
        fail(exits.REFUSED, error.message)
    if loaded.host is None:
        mend = "host: {price_per_hour: 2.5, currency: EUR}"
        fail(exits.REFUSED, "the configuration has no price of the machine", mend)
    running = now if _runs(loaded.run_dir) else None
    try:
        hours, by_model = hours_awake(folder, chosen, running), sums(folder, [By.MODEL], chosen)
    except ConfigError as error:
        fail(exits.REFUSED, error.message, ELSEWHERE)
    found = host_cost(hours, loaded.host.price_per_hour, loaded.host.currency, by_model)
    if output_format is UsageFormat.CSV:
        typer.echo(csv_text(found), nl=False)
    elif not print_data(document(found, chosen), Format(output_format.value)):
        output().print(host_cost_view(found, chosen))


def _runs(run_dir: Path) -> bool:
    """Whether a supervisor answers in this folder, so that the last run goes on."""
    from appliance.common.paths import OPERATOR_SOCKET

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            sock.connect(str(run_dir / OPERATOR_SOCKET))
        except OSError:
            return False
    return True
