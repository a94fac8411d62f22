"""``athanor console``: where the operator's page is, and how to reach it from elsewhere."""

from __future__ import annotations

from typing import Annotated

import typer

from appliance.operator.cli import exits
from appliance.operator.cli.admin_client import UNIX, ask
from appliance.operator.cli.options import FIND, Admin, Output
from appliance.operator.cli.terminal import Format, errors, fail, output, print_data

EXAMPLES = """
athanor console | the address of the page
athanor console --open | in this machine's browser
athanor console --admin unix:/run/athanor/admin.sock | how to reach it through ssh
"""

PAGE = "/console/"

LOCAL_PORT = 8082
"""Port of the operator's own machine in the line for ssh."""


def console(
    admin: Admin = FIND,
    open_it: Annotated[bool, typer.Option("--open", help="Open it in this machine's browser.")] = False,
    output_format: Output = Format.TABLE,
) -> None:
    """Print the address of the operator's page.

    It shows what is broken, whom it concerns and what to do; throughput, queues, KV memory by tenant, tenants, and
    the last requests phase by phase. It changes nothing. It answers on this machine only: from another one, ssh leads
    to it.
    """
    ask(admin, "/health/live")
    if admin.startswith(UNIX):
        url, forward = f"http://localhost:{LOCAL_PORT}{PAGE}", f"ssh -N -L {LOCAL_PORT}:{admin.removeprefix(UNIX)} HOST"
        if open_it:
            fail(exits.USAGE, "a browser opens no Unix socket", f"on the machine with the browser: {forward}")
    else:
        address = admin.rpartition("://")[2].rstrip("/")
        url, forward = f"http://{address}{PAGE}", f"ssh -N -L {address.rpartition(':')[2]}:{address} HOST"
    if not print_data({"url": url, "forward": forward, "direct": not admin.startswith(UNIX)}, output_format):
        _say(url, forward, direct=not admin.startswith(UNIX))
    if open_it and not _open(url):
        fail(exits.REFUSED, "this machine has no browser to open", f"on one that has: {forward}, then {url}")


def _say(url: str, forward: str, *, direct: bool) -> None:
    """The address to standard output, how to get there from elsewhere beside it."""
    if direct:
        output().print(url, soft_wrap=True)
        errors().print(f"from another machine: {forward}", style="dim", soft_wrap=True)
    else:
        output().print(forward, soft_wrap=True)
        hint = f"typed on the machine with the browser, HOST being this one; then {url}"
        errors().print(hint, style="dim", soft_wrap=True)


def _open(url: str) -> bool:
    import webbrowser

    try:
        return webbrowser.open(url)
    except webbrowser.Error:
        return False
