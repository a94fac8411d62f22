"""``athanor serve``: the appliance as a configuration file describes it."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from appliance.cli import exits
from appliance.cli.terminal import fail

EXAMPLES = """
athanor serve --config /etc/athanor/athanor.yaml | both host processes
athanor serve --config athanor.yaml --role gateway | one, under its own unit
"""


class Role(StrEnum):
    """Which host process to run."""

    BOTH = "both"
    SUPERVISOR = "supervisor"
    GATEWAY = "gateway"


def serve(
    config: Annotated[Path, typer.Option("--config", "-c", metavar="FILE", help="The appliance's athanor.yaml.")],
    role: Annotated[Role, typer.Option(metavar="ROLE", help="both, supervisor or gateway.")] = Role.BOTH,
) -> None:
    """Serve what a configuration file says, until SIGTERM.

    Prints one JSON line with its addresses when every model has given a real token. SIGHUP
    reloads the policy, as `athanor reload` does.
    """
    from appliance import serve as appliance_serve
    from appliance.errors import ApplianceError
    from isolation.errors import IsolationError

    try:
        code = appliance_serve.run(config, role.value)
    except (ApplianceError, IsolationError) as error:
        fail(exits.CANNOT_START, str(error))
    raise typer.Exit(code)
