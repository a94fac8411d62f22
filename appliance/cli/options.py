"""Options that several commands share, so that they read alike everywhere."""

from __future__ import annotations

from typing import Annotated

import typer

from appliance.cli.admin_client import LOOPBACK_ADMIN, default_admin
from appliance.cli.terminal import Format

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

Output = Annotated[Format, typer.Option("--output", "-o", metavar="FORMAT", help="table, json or yaml.")]
