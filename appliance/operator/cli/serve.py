"""``athanor serve``: the appliance as its configuration describes it."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from appliance.operator.cli import exits
from appliance.operator.cli.options import DEFAULT_CONFIG, Config, Settings
from appliance.operator.cli.terminal import fail

EXAMPLES = """
athanor serve | both host processes, as /etc/athanor/athanor.yaml says
athanor serve --config athanor.yaml --role gateway | one, under its own unit
athanor serve --config athanor.yaml --set sandbox.cores=4 | another value for one key
"""


class Role(StrEnum):
    """Host process to run."""

    BOTH = "both"
    SUPERVISOR = "supervisor"
    GATEWAY = "gateway"
    FETCH = "fetch"
    CARRIER = "carrier"
    OPERATOR = "operator"


def serve(
    config: Config = DEFAULT_CONFIG,
    role: Annotated[
        Role, typer.Option(metavar="ROLE", help="both, supervisor, gateway, fetch, carrier or operator.")
    ] = Role.BOTH,
    settings: Settings = None,
) -> None:
    """Serve what a configuration says, until SIGTERM.

    The file is read first, then environment variables (ATHANOR_SANDBOX__CORES is sandbox.cores),
    then --set. Prints one JSON line with the addresses when every model has answered a test
    request. SIGHUP reloads the policy, as `athanor reload` does.
    """
    from appliance.common.errors import ApplianceError
    from appliance.common.log_import import import_structlog

    import_structlog()
    from appliance.operator import serve as appliance_serve
    from isolation.errors import IsolationError

    try:
        code = appliance_serve.run(config, role.value, settings or ())
    except (ApplianceError, IsolationError) as error:
        fail(exits.CANNOT_START, str(error))
    raise typer.Exit(code)
