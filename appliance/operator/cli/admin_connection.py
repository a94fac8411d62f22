"""HTTP over a Unix socket, for ``admin_client``, which imports this with ``http.client`` only when a command asks: TLS
comes with it, and is most of what reading a command line would load.
"""

from __future__ import annotations

import http.client
import socket


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket; the host named is the only one that makes sense there."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket's path."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
