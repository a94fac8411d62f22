"""Options that several commands share, so that they read alike everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from appliance.operator.cli.admin_client import LOOPBACK_ADMIN, default_admin
from appliance.operator.cli.terminal import Format

FIND = "auto"
"""No address: where this machine's appliance listens is found out."""

Admin = Annotated[
    str,
    typer.Option(
        "--admin",
        metavar="URL",
        help=f"Admin listener: http://HOST:PORT or unix:PATH; {FIND} is the service's socket, else {LOOPBACK_ADMIN}.",
        callback=lambda given: default_admin() if given == FIND else given,
    ),
]

DEFAULT_CONFIG = Path("/etc/athanor/athanor.yaml")
"""Configuration of the installed units."""

Config = Annotated[Path, typer.Option("--config", "-c", metavar="FILE", help="The appliance's athanor.yaml.")]
"""Every command that reads a configuration takes this option, with ``DEFAULT_CONFIG``."""

Output = Annotated[Format, typer.Option("--output", "-o", metavar="FORMAT", help="table, json or yaml.")]

Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set a configuration key, as in sandbox.cores=4; may be repeated."),
]
