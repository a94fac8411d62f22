"""Listening sockets that outlive this process: the service manager keeps a copy while the service starts again.

Connections that come meanwhile wait in the socket's own queue, of bounded length, and are answered by the next process:
a restart refuses no connection. The addresses are the configuration's alone. A socket of another address is ended once
the new ones are there, so that a start that fails at a new address leaves the old ones to the start after it.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Callable
from pathlib import Path

from appliance.common import notify
from appliance.common.addresses import split_address

Make = Callable[[], socket.socket]
"""Binds and listens; raises ``OSError``."""

UNIX = "unix:"
"""Beginning of the address of a Unix socket; its path follows."""


class HeldSockets:
    """Sockets that the service manager kept for this start, by name. ``listen`` for each that is used, then
    ``settle``."""

    def __init__(self) -> None:
        self._held = {name: socket.socket(fileno=number) for name, number in notify.held().items()}
        self._made: dict[str, socket.socket] = {}

    def listen(self, name: str, address: str, make: Make) -> socket.socket:
        """Return the listening socket kept under ``name`` if it has this address, ``HOST:PORT`` or ``unix:PATH``; else
        a new one, which is kept from ``settle`` on.

        With port 0 nothing is kept: the address is not known before.

        Raises:
            OSError: the address cannot be bound.
        """
        held = self._held.get(name)
        port = 0 if address.startswith(UNIX) else split_address(address)[1]
        if held is not None and _fits(held, address):
            return self._held.pop(name)
        made = self._make(address, make)
        if port or address.startswith(UNIX):
            self._made[name] = made
        return made

    def settle(self) -> None:
        """End what was kept and is not used any more, then have the new sockets kept."""
        self._release(tuple(self._held))
        for name, made in self._made.items():
            notify.hold(made, name)
        self._made = {}

    def _make(self, address: str, make: Make) -> socket.socket:
        """New socket. One that was kept at the same path or port, such as that of every address in place of one, is in
        its way and is ended first."""
        try:
            return make()
        except OSError as error:
            in_the_way = tuple(name for name, one in self._held.items() if _same_place(one, address))
            if error.errno != errno.EADDRINUSE or not in_the_way:
                raise
            self._release(in_the_way)
            return make()

    def _release(self, names: tuple[str, ...]) -> None:
        """End these sockets here and at the service manager.

        The manager closes its copy some time after the message, and a bind of the address would fail meanwhile.
        A shutdown ends listening for all copies at once (shutdown(2), tcp_disconnect), so the address is free on
        return.
        """
        for name in names:
            held = self._held.pop(name)
            with contextlib.suppress(OSError):  # It does not listen, or is no socket: no address is in use.
                held.shutdown(socket.SHUT_RDWR)
            held.close()
            notify.let_go(name)


def _same_place(held: socket.socket, address: str) -> bool:
    """Whether a socket has the path, or the port on any host, of an address."""
    try:
        name = held.getsockname()
    except OSError:
        return False
    if address.startswith(UNIX):
        return bool(name == address.removeprefix(UNIX))
    port = split_address(address)[1]
    return bool(port) and isinstance(name, tuple) and len(name) > 1 and name[1] == port


def _fits(held: socket.socket, address: str) -> bool:
    """Whether a socket is one that listens at this address."""
    try:
        if held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) != 1 or held.type != socket.SOCK_STREAM:
            return False
        found = held.getsockname()
        if address.startswith(UNIX):
            path = address.removeprefix(UNIX)
            return held.family == socket.AF_UNIX and found == path and Path(path).is_socket()
        host, port = split_address(address)
        if not port or not isinstance(found, tuple):
            return False
        wanted = socket.getaddrinfo(host, port, held.family, socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        return False
    return any(found[:2] == one[4][:2] for one in wanted)
