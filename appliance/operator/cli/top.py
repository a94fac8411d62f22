"""``athanor top``: who uses the appliance now, as it happens."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from appliance.operator.cli.admin_client import ask, read
from appliance.operator.cli.options import FIND, Admin, Output
from appliance.operator.cli.terminal import Format, output, print_data

if TYPE_CHECKING:
    from rich.console import Console

    from appliance.operator.usage import Usage

EXAMPLES = """
athanor top | live, until ctrl-c
athanor top --once | one look, then the end
athanor top --once -o json | for scripts
"""


def top(
    admin: Admin = FIND,
    interval: Annotated[
        float, typer.Option("--interval", "-i", metavar="SECONDS", min=0.2, max=60.0, help="How often to look.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and end.")] = False,
    output_format: Output = Format.TABLE,
) -> None:
    """Show who uses the appliance, live.

    Output tokens a second by tenant, queues and KV memory by model. Live on a terminal; one look
    otherwise. Rates are the gateway's own, of its last 10 seconds: the first look is right at once.
    """
    console = output()
    if output_format is not Format.TABLE:
        from appliance.common.json_codec import encode

        print_data(encode(_look(admin)), output_format)
        return
    from appliance.operator.cli.top_view import top_view

    if once or not console.is_terminal:
        console.print(top_view(_look(admin), console.width))
        return
    _live(console, admin, interval)


def _live(console: Console, admin: str, interval: float) -> None:
    """Draw until the reader has seen enough."""
    from rich.live import Live

    from appliance.operator.cli.top_view import top_view

    try:
        with Live(top_view(_look(admin), console.width), console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.refresh()
                time.sleep(interval)
                live.update(top_view(_look(admin), console.width))
    except KeyboardInterrupt:
        return


def _look(admin: str) -> Usage:
    from appliance.common.status import ApplianceStatus
    from appliance.operator.usage import usage

    return usage(read(ApplianceStatus, ask(admin, "/status")))
