"""Pure: the hosts of a fleet, and their differences, as something to look at in a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from appliance.common.figures import counted, printable
from appliance.common.fleet_hosts import FleetDifference, HostState
from appliance.common.fleet_status import FleetStatus
from appliance.operator.cli.tables import number, table

DIGEST_CHARACTERS = 12
"""Characters of a digest that are shown."""

_STYLES = {"serving": "green", "silent": "bold red", "not ready": "red"}


def fleet_view(states: Iterable[HostState]) -> RenderableType:
    """A line a host; why one did not answer stands below."""
    shown = table("HOST", "STATE", "ROLE", "VERSION", "POLICY", numbers=("RUNNING", "WAITING", "KV FREE", "KV KEYS"))
    problems = []
    for host in states:
        state = Text(host.state, _STYLES.get(host.state, "yellow"))
        if host.status is None:
            shown.add_row(Text(host.name, "bold"), state, *["-"] * 7)
            problems.append(Text(f"{host.name}: {printable(host.problem)}", "red"))
            continue
        load = host.status.load
        free = f"{100 * load.kv_free / load.kv_blocks:.0f} %" if load.kv_blocks else "-"
        policy, version = (printable(text) for text in (host.status.policy.digest, host.status.version))
        cells = (
            printable(host.status.fleet.role),
            version,
            policy[:DIGEST_CHARACTERS],
            number(load.running),
            number(load.waiting),
            free,
            _keys(host.status.fleet),
        )
        shown.add_row(Text(host.name, "bold"), state, *cells)
    return Group(shown, *problems)


def _keys(status: FleetStatus) -> str:
    """Say whether a host has the keys for the KV of its fleet, and how many shreds are on their way."""
    shreds = f", {counted(status.shreds, 'shred')}" if status.shreds else ""
    return f"{printable(status.kv_keys)}{shreds}" if status.kv_keys else "-"


def difference_lines(found: FleetDifference) -> Iterator[str]:
    """What differs, a line for each thing and one for each of its values."""
    for one in found.differences:
        yield f"{printable(one.what)} differs"
        for value, hosts in one.values.items():
            yield f"  {printable(value)[: 2 * DIGEST_CHARACTERS]}  {', '.join(hosts)}"
    if found.unknown:
        yield f"not compared, because no host pins a digest: {printable(', '.join(found.unknown))}"
    if found.silent:
        yield f"no answer: {', '.join(found.silent)}"
