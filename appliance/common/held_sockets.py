"""Listening sockets that outlive this process: the service manager keeps a copy while the service starts again.

Connections that come meanwhile wait in the socket's own queue, of bounded length, and are answered by the next process:
a restart refuses no connection. The address is the configuration's alone; a socket of another address is closed.
"""

from __future__ import annotations

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
    for held_name, number in notify.held().items():
        held = socket.socket(fileno=number)
        if held_name == name and port and _fits(held, host, port):
            found = held
        else:
            held.close()
            notify.let_go(held_name)
    if found is not None:
        return found
    made = make(host, port)
    if port:
        notify.hold(made, name)
    return made


def _fits(held: socket.socket, host: str, port: int) -> bool:
    """Whether a socket is a TCP socket that listens at this address."""
    try:
        listens = held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
        found = held.getsockname()
        wanted = socket.getaddrinfo(host, port, held.family, socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        return False
    return listens and held.type == socket.SOCK_STREAM and any(found[:2] == one[4][:2] for one in wanted)
