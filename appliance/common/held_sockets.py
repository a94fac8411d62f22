"""Listening sockets that outlive this process: the service manager keeps a copy while the service starts again.

Connections that come meanwhile wait in the socket's own queue, of bounded length, and are answered by the next process:
a restart refuses no connection. The address is the configuration's alone. A socket of another address is let go once
the new one is there, so that a start that fails at the new address leaves the old one to the start after it.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Callable

from appliance.common import notify

Make = Callable[[str, int], socket.socket]
"""Binds and listens; raises ``OSError``."""


def listen(name: str, host: str, port: int, make: Make) -> socket.socket:
    """Listening socket kept under ``name`` if its address is the wanted one; else a new one, which is kept from now on.

    With port 0 nothing is kept: nobody can know the address before.

    Raises:
        OSError: the address cannot be bound.
    """
    found = None
    others: list[tuple[str, socket.socket]] = []
    for held_name, number in notify.held().items():
        held = socket.socket(fileno=number)
        if held_name == name and port and _fits(held, host, port):
            found = held
        else:
            others.append((held_name, held))
    if found is None:
        made = _make(host, port, make, others)
        _release(others)
        if port:
            notify.hold(made, name)
        return made
    _release(others)
    return found


def _make(host: str, port: int, make: Make, others: list[tuple[str, socket.socket]]) -> socket.socket:
    """New socket. One of the ``others`` with the same port, such as that of every address in place of one, is in its
    way and is let go first."""
    try:
        return make(host, port)
    except OSError as error:
        in_the_way = [one for one in others if _port(one[1]) == port]
        if error.errno != errno.EADDRINUSE or not in_the_way:
            raise
        _release(in_the_way)
        others[:] = [one for one in others if one not in in_the_way]
        return make(host, port)


def _release(others: list[tuple[str, socket.socket]]) -> None:
    """End these sockets here and at the service manager.

    The manager closes its copy some time after the message, and a bind of the address would fail meanwhile.
    A shutdown ends listening for all copies at once (shutdown(2), tcp_disconnect), so the address is free on return.
    """
    for name, held in others:
        with contextlib.suppress(OSError):  # It does not listen, or is no socket: no address is in use.
            held.shutdown(socket.SHUT_RDWR)
        held.close()
        notify.let_go(name)


def _port(held: socket.socket) -> int:
    """Port of a TCP socket; 0 for anything else."""
    try:
        name = held.getsockname()
    except OSError:
        return 0
    return int(name[1]) if isinstance(name, tuple) and len(name) > 1 else 0


def _fits(held: socket.socket, host: str, port: int) -> bool:
    """Whether a socket is a TCP socket that listens at this address."""
    try:
        listens = held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
        found = held.getsockname()
        wanted = socket.getaddrinfo(host, port, held.family, socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        return False
    return listens and held.type == socket.SOCK_STREAM and any(found[:2] == one[4][:2] for one in wanted)
