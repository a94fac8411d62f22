"""The metrics listener: what a scraper may ask, on an address of its own. It can change nothing: it has the routes of
``appliance.gateway.telemetry.scrape`` and the page of the alerts, which their ``runbook_url`` names, and no other."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from appliance.common.addresses import listens_on_loopback
from appliance.common.errors import StartError, reason_of
from appliance.common.listen_config import ListenConfig
from appliance.common.status import Readiness
from appliance.gateway.console.runbooks import runbooks_route
from appliance.gateway.telemetry.scrape import Picker, Render, ScrapeParts, no_picker, scrape_app
from appliance.gateway.watch.operator_server import ServerLimits, bind, serving

LIMITS = ServerLimits(connections=16, answer_s=10.0)
"""Some scrapers, each with the patience of Prometheus' default, 10 s."""

TOKEN = re.compile(rb"[A-Za-z0-9._~+/=-]{32,512}")
"""Token in its file (the characters of RFC 6750): 32 are 128 bits at least where they were drawn as hex digits."""


@contextlib.asynccontextmanager
async def serve_metrics(
    listen: ListenConfig,
    render: Render,
    refresh: Callable[[], None],
    ready: Callable[[], Readiness],
    picker: Picker = no_picker,
) -> AsyncIterator[dict[str, str]]:
    """Serve metrics while the block runs, where the configuration names an address; gives it under ``metrics``, as a
    URL or ``unix:PATH``, or nothing.

    Raises:
        StartError: the address cannot be bound, or the token not be read.
    """
    if listen.metrics is None:
        yield {}
        return
    token = b"" if listen.metrics_token is None else read_token(listen.metrics_token)
    loopback = listens_on_loopback(listen.metrics)
    parts = ScrapeParts(metrics=render, refresh=refresh, ready=ready, picker=picker)
    app = scrape_app(parts, [runbooks_route()], token=token, loopback=loopback)
    async with serving(app, bind(listen.metrics, "metrics", LIMITS.connections), LIMITS) as shown:
        yield {"metrics": shown}


def read_token(path: Path) -> bytes:
    """Return the token in a file; white space around it does not count.

    Raises:
        StartError: the file cannot be read, or has no token.
    """
    try:
        token = path.read_bytes().strip()
    except OSError as error:
        raise StartError(
            f"cannot read the token of the metrics listener, {path}: {reason_of(error)}; the gateway's user must be "
            f"able to read it, or leave listen: metrics_token out"
        ) from None
    if not TOKEN.fullmatch(token):
        raise StartError(
            f"{path} has no token of 32 to 512 letters, digits or any of ._~+/=-: scrapers could not send it, or "
            f"guess it; make one with: openssl rand -hex 32 > {path}"
        )
    return token
