"""The fleet for the operator's page: asks every host of the operator's list for its status, as ``athanor fleet`` does.

Hosts are asked while somebody looks, and never else. One answer serves all pages for ``KEPT_S``, so that no number of
pages asks hosts more often. The gateway asks for ``/status`` alone.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from appliance.common.clocks import Clocks
from appliance.common.errors import ConfigError
from appliance.common.fleet_file import Fleet, FleetHost, read_fleet
from appliance.common.fleet_hosts import HostState, read_status
from appliance.common.status import ApplianceStatus
from appliance.common.version import VERSION
from appliance.gateway.console.fleet_look import FleetLook, fleet_look
from appliance.gateway.front.http_get import GetError, get

KEPT_S = 5.0
"""Seconds for which an answer is told again."""

ANSWER_S = 3.0
"""Patience with one host, in seconds: its status takes milliseconds."""

ASKED_AT_ONCE = 32
"""Hosts that are asked at the same time: of 256 silent ones the last is given up after 24 s."""

MAX_STATUS_BYTES = 4 << 20
"""Most bytes of one status: that of 10,000 tenants at work has fewer."""

HERE = "this host"
"""Name of the only row where there is no list."""

STATUS = "/status"

UNIX = "unix:"


class ConsoleFleet:
    """Answers the page of the fleet."""

    def __init__(
        self, status: Callable[[], ApplianceStatus], path: Path | None = None, clocks: Clocks | None = None
    ) -> None:
        """``status`` gives this host's own; ``path`` is the list of hosts, read anew for each look."""
        self._status, self._path, self._clocks = status, path, clocks or Clocks()
        self._running: asyncio.Task[FleetLook] | None = None
        self._kept: tuple[float, FleetLook] | None = None

    async def look(self, page: str) -> FleetLook:
        """Return what the page shows; ``page`` is the digest of the page's files. All who ask together wait for one
        look, which goes on where one of them leaves."""
        if self._kept is not None and self._clocks.monotonic() < self._kept[0]:
            return replace(self._kept[1], page=page)
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._look())
        return replace(await asyncio.shield(self._running), page=page)

    async def _look(self) -> FleetLook:
        found = await self._found()
        self._kept = (self._clocks.monotonic() + KEPT_S, found)
        return found

    async def _found(self) -> FleetLook:
        now = self._clocks.wall()
        if self._path is None:
            own = HostState(name=HERE, admin="", status=self._status())
            return fleet_look([own], now=now, version=VERSION, listed=False)
        try:
            fleet, context = await asyncio.to_thread(_read, self._path)
        except (ConfigError, OSError) as error:
            return FleetLook(now=now, version=VERSION, page="", listed=True, problem=str(error))
        turns = asyncio.Semaphore(ASKED_AT_ONCE)
        states = await asyncio.gather(*(_asked(host, context, turns) for host in fleet.hosts))
        # In a thread: 256 hosts whose models have nothing in common are compared for seconds.
        return await asyncio.to_thread(fleet_look, states, now=now, version=VERSION, listed=True)


def _read(path: Path) -> tuple[Fleet, ssl.SSLContext | None]:
    fleet = read_fleet(path)
    return fleet, fleet.context()


async def _asked(host: FleetHost, context: ssl.SSLContext | None, turns: asyncio.Semaphore) -> HostState:
    async with turns:
        return await ask_host(host, context)


async def ask_host(host: FleetHost, context: ssl.SSLContext | None) -> HostState:
    """Ask one host for its state; what goes wrong is its problem."""
    try:
        async with asyncio.timeout(ANSWER_S):
            body = await _got(host.admin, context)
            status = await asyncio.to_thread(_decoded, body)
            return HostState(name=host.name, admin=host.admin, status=status)
    except TimeoutError:
        problem = f"no answer within {ANSWER_S:g} s"
    except GetError as error:
        problem = f"the answer is not used: {error}"
    except (ValueError, RecursionError) as error:
        problem = f"the answer is not understood: {error}"
    except OSError as error:
        problem = (error.strerror or str(error) or type(error).__name__).lower()
    return HostState(name=host.name, admin=host.admin, problem=problem)


def _decoded(body: bytes) -> ApplianceStatus:
    return read_status(json.loads(body))


async def _got(admin: str, context: ssl.SSLContext | None) -> bytes:
    if admin.startswith(UNIX):
        name, opening = "localhost", asyncio.open_unix_connection(admin.removeprefix(UNIX))
        reader, writer = await opening
    else:
        parts = urlsplit(admin)
        name = parts.netloc
        tls = context if parts.scheme == "https" else None
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port, ssl=tls)
    try:
        return await get(reader, writer, name, STATUS, MAX_STATUS_BYTES)
    finally:
        writer.close()
