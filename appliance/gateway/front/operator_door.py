"""A listener over TLS for operators on other machines, or for other hosts: bound, bounded, its certificates followed.

It accepts as the listeners of tenants do (``listener.py``), with places and turns of its own: no tenant and no stranger
at a tenant's port takes any of these. Changed files are used by the connections that come from then on; when the
operators' authorities change, open connections take no more requests.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import time
from collections.abc import Callable

from appliance.common.addresses import split_address
from appliance.common.aligned_sleep import aligned_sleep
from appliance.common.errors import StartError
from appliance.common.listen_config import TlsConfig
from appliance.gateway.front.connections import Places, Slot
from appliance.gateway.front.handshakes import Handshakes
from appliance.gateway.front.listener import Listener, Opened
from appliance.gateway.front.starts import Starts
from appliance.gateway.front.stranger_time import StrangerTime
from appliance.gateway.front.tls_files import TlsContexts, TlsFiles

MAX_CONNECTIONS = 64
"""Connections at once: dashboards, scrapers and programs of operators. Each listener has its own."""

MAX_EACH = 16
"""Connections of one address, or of one operator, at once."""

MAX_STRANGERS = 16
"""Connections without a credential at once."""

BACKLOG = 64
"""Connections that the kernel may hold before they are accepted."""

STALL_MS = 30_000
"""Milliseconds for which a peer may take nothing (RFC 5482)."""

TICK_S = 1.0
"""Between two looks at files and connections."""


def bind_port(address: str, name: str) -> socket.socket:
    """Return the listening socket of ``HOST:PORT``.

    Args:
        address: where to listen; port 0 is a free one.
        name: key of the configuration with the address, for the message.

    Raises:
        StartError: the address cannot be bound.
    """
    host, port = split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        why = (os.strerror(error.errno) if error.errno else str(error)).lower()
        raise StartError(
            f"cannot listen for {name} on {address}: {why}; `{name}` in athanor.yaml names another address"
        ) from error


class OperatorDoor:
    """One listener of operators, or of hosts. ``run`` keeps it, until cancelled; ``close`` ends it."""

    def __init__(
        self,
        bound: socket.socket,
        tls: TlsConfig,
        pick: Callable[[TlsContexts], ssl.SSLContext],
        make: Callable[[Opened, Slot], asyncio.Protocol],
        connections: int = MAX_CONNECTIONS,
    ) -> None:
        """Load the certificates; blocks.

        Args:
            bound: the listening socket, which is closed with the door.
            tls: certificates.
            pick: the context of the protocol that is spoken here.
            make: gives the protocol of a connection, a ``listener.Connection``.
            connections: most of them at once.

        Raises:
            StartError: a file of the certificates cannot be used.
        """
        self._files, self._pick = TlsFiles(tls), pick
        self._contexts = self._files.load()
        handshakes, starts = Handshakes(time.monotonic), Starts(time.monotonic)
        places = Places(MAX_EACH, connections, MAX_STRANGERS, handshakes.credential)
        self.opened = Opened(places, handshakes, starts, StrangerTime(starts.strangers))
        """What its connections have in common."""
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STALL_MS)  # accepted sockets inherit it
        opened = self.opened
        self._listener = Listener(opened, lambda slot: make(opened, slot), pick(self._contexts), bound)

    async def run(self) -> None:
        """Take connections, and look at files and connections, until cancelled."""
        self._listener.accept()
        while True:
            await aligned_sleep(TICK_S)
            self._listener.look()
            await self.renew()

    async def renew(self) -> None:
        """Use certificates that have changed since the last look."""
        found = await self._files.renewed()
        if found is None:
            return
        before, self._contexts = self._contexts, found
        self._listener.secure(self._pick(found))
        if before.authorities != found.authorities:
            self._listener.end_idle()

    def close(self) -> None:
        """Take no connection any more, and close those that are open."""
        self._listener.end_accepting()
        self._listener.abort()
        self._listener.cancel()
