"""Names of what lies in the run directory; read by both host processes."""

from __future__ import annotations

import os
from pathlib import Path

CONTROL_SOCKET = "control.sock"
"""The socket on which the supervisor waits for the gateway."""

OPERATOR_SOCKET = "operator.sock"
"""Socket for the operator's commands about tenants' keys; the gateway cannot open it."""

OPERATOR_API_SOCKET = "operator-api.sock"
"""Socket of the operator's gRPC API, where the configuration names no other."""

FETCH_SOCKET = "fetch.sock"
"""Socket for orders to the downloader, where the launcher runs it and the configuration names no other."""

MEND_S = 2.0
"""How often the supervisor looks whether its sockets can still be found."""


def identity(path: Path) -> tuple[int, int] | None:
    """Device and inode of what this path names now; None where it names nothing."""
    try:
        found = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    return found.st_dev, found.st_ino
