"""Asks the hosts of a fleet what they tell of themselves."""

from __future__ import annotations

import ssl
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from appliance.common.fleet_file import Fleet, FleetHost
from appliance.common.fleet_hosts import HostState, read_status
from appliance.common.json_codec import SnapshotError
from appliance.operator.cli.admin_client import OK, UnreachableError, try_ask

ASKED_AT_ONCE = 16
"""Hosts that are asked at the same time."""

ANSWER_S = 5.0
"""Patience with one host, in seconds: its status takes milliseconds."""


def look(fleet: Fleet, context: ssl.SSLContext | None) -> tuple[HostState, ...]:
    """Ask every host, in the order of the file."""
    with ThreadPoolExecutor(max_workers=min(ASKED_AT_ONCE, len(fleet.hosts))) as pool:
        return tuple(pool.map(partial(look_at, context=context), fleet.hosts))


def look_at(host: FleetHost, context: ssl.SSLContext | None) -> HostState:
    """Ask one host for its state."""
    try:
        answer = try_ask(host.admin, "/status", timeout_s=ANSWER_S, tls=context)
        if answer.status != OK:
            return HostState(name=host.name, admin=host.admin, problem=answer.message())
        return HostState(name=host.name, admin=host.admin, status=read_status(answer.body))
    except UnreachableError as error:
        return HostState(name=host.name, admin=host.admin, problem=str(error.args[0]))
    except SnapshotError as error:
        return HostState(name=host.name, admin=host.admin, problem=f"the answer is not understood: {error}")
