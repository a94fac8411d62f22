"""``athanor traces``: the last requests as a table, or one of them as a waterfall."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from appliance.operator.cli import exits
from appliance.operator.cli.admin_client import Answer, ask, read
from appliance.operator.cli.options import FIND, Admin, Output
from appliance.operator.cli.terminal import Format, errors, fail, output, print_data

EXAMPLES = """
athanor traces | the last 20 requests
athanor traces 7f3a9c | one, by the beginning of its id
athanor traces chatcmpl-7f3a9c01de | or of the id that a client saw
athanor traces -o json --limit 500 | for scripts
"""

_ID = re.compile(r"(?:[A-Za-z]+[-_])?[0-9A-Fa-f]{1,64}")
"""A request or trace id, or its beginning."""

MULTIPLE = 300
"""HTTP status of an id that names several requests."""


def traces(
    wanted: Annotated[
        str | None,
        typer.Argument(
            metavar="ID", show_default=False, help="Request or trace id, or the first 6 digits and more of one."
        ),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", metavar="N", min=1, max=512, help="How many to list.")] = 20,
    admin: Admin = FIND,
    output_format: Output = Format.TABLE,
) -> None:
    """List the last requests, or show one as a waterfall."""
    if wanted is None:
        answer = ask(admin, f"/traces?limit={limit}")
        _show_list(answer, output_format)
        return
    if not _ID.fullmatch(wanted):
        fail(exits.REFUSED, f"{wanted!r} is no id", "take one from `athanor traces`")
    answer = ask(admin, f"/traces/{wanted}")
    if answer.status == MULTIPLE:
        _show_list(answer, output_format)
        errors().print("the id names several requests; give one of these ids", style="yellow")
        raise typer.Exit(exits.REFUSED)
    _show_one(answer, output_format)


def _show_list(answer: Answer, output_format: Format) -> None:
    from appliance.gateway.telemetry.store import TraceList
    from appliance.gateway.telemetry.waterfall import trace_table

    listed = read(TraceList, answer, MULTIPLE)
    if print_data(answer.body, output_format):
        return
    if listed.traces:
        output().print(trace_table(listed.traces))
    else:
        errors().print("no requests yet", style="dim")


def _show_one(answer: Answer, output_format: Format) -> None:
    from appliance.gateway.telemetry.store import StoredTrace
    from appliance.gateway.telemetry.waterfall import waterfall

    trace = read(StoredTrace, answer)
    if print_data(answer.body, output_format):
        return
    console = output()
    console.print()
    console.print(waterfall(trace))
    console.print()
