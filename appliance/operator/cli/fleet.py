"""``athanor fleet status | diff | drain``: several hosts with the same appliance, behind a router."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from appliance.operator.cli import exits
from appliance.operator.cli.options import Output
from appliance.operator.cli.terminal import Format, fail, output, print_data

if TYPE_CHECKING:
    import ssl

    from appliance.common.fleet_file import Fleet, FleetHost
    from appliance.common.fleet_hosts import HostState
    from appliance.common.live_requests import DrainStatus

STATUS_EXAMPLES = """
athanor fleet status | the hosts of /etc/athanor/fleet.yaml
athanor fleet status --hosts fleet.yaml -o json | for scripts
"""

DIFF_EXAMPLES = """
athanor fleet diff | exit status 1 where hosts differ
"""

DRAIN_EXAMPLES = """
athanor fleet drain host-b | until nothing runs there, 60 s at most
athanor fleet drain host-b --resume | it takes requests again
"""

DEFAULT_HOSTS = Path("/etc/athanor/fleet.yaml")
"""The list of hosts, where none is named."""

LONGEST_WAIT_S = 3_600.0
"""An hour: longer than any answer takes."""

LOOK_S = 0.5
"""Seconds between two looks at a host that drains."""

Hosts = Annotated[Path, typer.Option("--hosts", metavar="FILE", help="The list of hosts (docs/fleet.md).")]


def status(hosts: Hosts = DEFAULT_HOSTS, output_format: Output = Format.TABLE) -> None:
    """Show each host: state, version, policy, load."""
    from appliance.operator.cli.fleet_view import fleet_view
    from appliance.operator.fleet import look

    fleet, context = _read(hosts)
    states = look(fleet, context)
    if not print_data([_document(state) for state in states], output_format):
        output().print(fleet_view(states))
    if any(state.status is None for state in states):
        raise typer.Exit(exits.UNREACHABLE)


def diff(hosts: Hosts = DEFAULT_HOSTS, output_format: Output = Format.TABLE) -> None:
    """Compare versions, policies, fleet keys and models of all hosts.

    The exit status is 1 where hosts differ, 3 where one does not answer, and 5 where a model is pinned nowhere, so that
    nothing is known of its files.
    """
    from appliance.common.fleet_hosts import compare
    from appliance.common.json_codec import encode
    from appliance.operator.cli.fleet_view import difference_lines
    from appliance.operator.fleet import look

    fleet, context = _read(hosts)
    states = look(fleet, context)
    found = compare(states)
    if not print_data(encode(found), output_format):
        lines = list(difference_lines(found)) or [f"{len(states)} hosts have the same version, policy, key and models"]
        for line in lines:
            output().print(line, soft_wrap=True, markup=False)
    if found.differences:
        raise typer.Exit(exits.REFUSED)
    if found.silent:
        raise typer.Exit(exits.UNREACHABLE)
    if found.unknown:
        raise typer.Exit(exits.INCOMPLETE)


def drain(
    host: Annotated[str, typer.Argument(metavar="HOST", help="Name of the host in the list.")],
    hosts: Hosts = DEFAULT_HOSTS,
    wait: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, max=LONGEST_WAIT_S, help="How long to wait until nothing runs.")
    ] = 60.0,
    resume: Annotated[bool, typer.Option("--resume", help="End the drain: the host takes requests again.")] = False,
    last: Annotated[bool, typer.Option("--last", help="Also where no other host would take requests.")] = False,
) -> None:
    """Have a host take no more requests, and wait until none runs there.

    Its readiness turns to 503 at once; for the notice of its configuration (`listen.drain_notice_s`) it still takes
    what routers send. Requests that run go on. The exit status is 1 where some run still after the wait.
    """
    from appliance.common.figures import counted
    from appliance.operator.fleet import look

    fleet, context = _read(hosts)
    chosen = next((one for one in fleet.hosts if one.name == host), None)
    if chosen is None:
        fail(exits.USAGE, f"{hosts} has no host {host}", f"it has {', '.join(one.name for one in fleet.hosts)}")
    if resume:
        _order(chosen, "/resume", "POST", context)
        output().print(f"{host} takes requests", markup=False)
        return
    others = [one.state for one in look(fleet, context) if one.name != host]
    if "serving" not in others and not last:
        fail(exits.REFUSED, f"no other host than {host} takes requests", "--last drains it all the same")
    running = _drained(chosen, context, wait)
    if running:
        left = counted(running, "request")
        fail(exits.REFUSED, f"{left} still on {host} after {wait:g} s; it takes no more")
    output().print(f"{host} takes no more requests, and none runs", markup=False)


def _drained(host: FleetHost, context: ssl.SSLContext | None, wait_s: float) -> int:
    """Begin the drain and wait; gives how many requests run still."""
    import time

    until = time.monotonic() + wait_s
    found = _order(host, "/drain", "POST", context)
    while found.running and time.monotonic() < until:
        time.sleep(min(LOOK_S, max(0.0, until - time.monotonic())))
        found = _order(host, "/drain", "GET", context)
    return found.running


def _order(host: FleetHost, path: str, method: str, context: ssl.SSLContext | None) -> DrainStatus:
    from appliance.common.live_requests import DrainStatus
    from appliance.operator.cli.admin_client import UnreachableError, read, try_ask
    from appliance.operator.fleet import ANSWER_S

    try:
        return read(DrainStatus, try_ask(host.admin, path, method, ANSWER_S, tls=context))
    except UnreachableError as error:
        fail(exits.UNREACHABLE, f"{host.name}: {error.args[0]}")


def _read(path: Path) -> tuple[Fleet, ssl.SSLContext | None]:
    from appliance.common.errors import ConfigError
    from appliance.common.fleet_file import read_fleet

    try:
        fleet = read_fleet(path)
        return fleet, fleet.context()
    except ConfigError as error:
        fail(exits.USAGE, str(error), "docs/fleet.md has an example")


def _document(state: HostState) -> dict[str, Any]:
    """One host for scripts: its state, and the whole status where it answered."""
    from appliance.common.json_codec import encode

    told = None if state.status is None else encode(state.status)
    return {"name": state.name, "admin": state.admin, "state": state.state, "problem": state.problem, "status": told}
