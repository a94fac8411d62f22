"""``athanor reload``: put an edited policy or configuration in force, or learn why not."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from appliance.operator.cli import exits
from appliance.operator.cli.admin_client import ask, read
from appliance.operator.cli.options import FIND, Admin, Output
from appliance.operator.cli.terminal import Format, fail, output, print_data

EXAMPLES = """
athanor reload | exit code 0: in force; 1: nothing changed; 6: nothing runs, the next start reads the files
athanor policy check policy.yaml && athanor reload | look before
athanor reload --config .athanor/athanor.yaml | the appliance that this configuration is of
"""

CONFLICT = 409
"""HTTP status of a reload that changed nothing."""


def reload(
    context: typer.Context,
    admin: Admin = FIND,
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", metavar="FILE", help="Ask the admin listener that this athanor.yaml names."),
    ] = None,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, help="How long to wait for the outcome.")
    ] = 60.0,
    output_format: Output = Format.TABLE,
) -> None:
    """Put an edited policy or configuration in force.

    Reads policy, keys and athanor.yaml anew and waits for the outcome. All or nothing: with a
    problem in any file all stays as it was. Keys of athanor.yaml that cannot change while it
    runs are listed with what a restart would make of them. Exit code 3: what listens there did not
    answer, or not as it should, so that it is not known what is in force; 6: nothing listens there.
    """
    from rich.text import Text

    from appliance.common.config_loader import load_config
    from appliance.common.figures import printable
    from appliance.common.status import ReloadOutcome

    if config is not None:
        source = context.get_parameter_source("admin")
        if source is not None and source.name != "DEFAULT":
            fail(exits.USAGE, "--admin and --config both say whom to ask: leave one of them out")
        admin = load_config(config).listen.admin
    answer = ask(admin, "/reload", "POST", timeout, absent=exits.NOT_RUNNING)
    outcome = read(ReloadOutcome, answer, CONFLICT)
    if print_data(answer.body, output_format):
        raise typer.Exit(exits.OK if outcome.ok else exits.REFUSED)
    if outcome.ok:
        output().print(Text.assemble(("reloaded ", "green"), printable(outcome.message)))
        for line in outcome.applied:
            output().print(Text.assemble(("applied ", "green"), printable(line)), soft_wrap=True)
        for line in outcome.restart:
            output().print(Text.assemble(("needs a restart: ", "bold yellow"), printable(line)), soft_wrap=True)
        if outcome.restart_command:
            output().print(Text.assemble(("> ", "dim"), (outcome.restart_command, "cyan")), soft_wrap=True)
        for line in outcome.warnings:
            output().print(Text.assemble(("warning: ", "bold yellow"), printable(line)), soft_wrap=True)
        return
    fail(exits.REFUSED, "\n".join([outcome.message, *outcome.problems]))
