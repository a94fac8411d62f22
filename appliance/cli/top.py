"""``athanor top``: who uses the appliance now, as it happens."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from appliance.cli.admin_client import ask
from appliance.cli.options import FIND, Admin, Output
from appliance.cli.terminal import Format, output, print_data

if TYPE_CHECKING:
    from appliance.usage import Sample

EXAMPLES = """
athanor top | live, until ctrl-c
athanor top --once | two looks a second apart, then the end
athanor top --once -o json | for scripts
"""

WINDOW_S = 10.0
"""Rates are those of the last seconds: requests count when they end, so shorter ones would jump."""


def top(
    admin: Admin = FIND,
    interval: Annotated[
        float, typer.Option("--interval", "-i", metavar="SECONDS", min=0.2, max=60.0, help="How often to look.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show one interval and end.")] = False,
    output_format: Output = Format.TABLE,
) -> None:
    """Show who uses the appliance, live.

    Tokens a second by tenant, queues and KV memory by model. Live on a terminal; one interval
    otherwise. Rates count requests that have ended.
    """
    from appliance.usage import measure

    console = output()
    samples = [_look(admin)]
    if once or output_format is not Format.TABLE or not console.is_terminal:
        time.sleep(interval)
        usage = measure(samples[0], _look(admin))
        if output_format is not Format.TABLE:
            from appliance.snapshot import encode

            print_data(encode(usage), output_format)
            return
        from appliance.cli.top_view import top_view

        console.print(top_view(usage))
        return
    _live(admin, interval, samples)


def _live(admin: str, interval: float, samples: list[Sample]) -> None:
    """Draw until the reader has seen enough."""
    from rich.live import Live

    from appliance.cli.top_view import top_view
    from appliance.usage import measure

    kept = max(2, int(WINDOW_S / interval) + 1)
    view = top_view(measure(samples[0], samples[0]))
    try:
        with Live(view, console=output(), screen=True, auto_refresh=False) as live:
            while True:
                live.update(view, refresh=True)
                time.sleep(interval)
                samples.append(_look(admin))
                del samples[:-kept]
                view = top_view(measure(samples[0], samples[-1]))
    except KeyboardInterrupt:
        return


def _look(admin: str) -> Sample:
    from appliance.cli.read import read
    from appliance.status import ApplianceStatus
    from appliance.usage import Sample

    return Sample(time.time(), read(ApplianceStatus, ask(admin, "/status")))
