"""Options that several commands share, so that they read alike everywhere."""

from __future__ import annotations

from typing import Annotated

import typer

from appliance.cli.terminal import Format

Admin = Annotated[
    str,
    typer.Option("--admin", metavar="URL", help="Admin listener: http://HOST:PORT or unix:PATH."),
]

Output = Annotated[Format, typer.Option("--output", "-o", metavar="FORMAT", help="table, json or yaml.")]
