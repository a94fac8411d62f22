"""Attacks over the one socket and the shared memory that a sandbox has in common with the host."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket

from appliance.selftest.redteam.base import Target, attack

WAIT_S = 2.0
RINGS = "/memfd:athanor-ipc"
"""Name of a segment in /proc/PID/fd."""

_met: list[int] = []
"""Segment and both doorbells, once the handshake is done."""


@attack("ring")
def hand_over(target: Target) -> str | None:
    """Send descriptors to the host, with far more bytes than it expects (SCM_RIGHTS, unix(7))."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(WAIT_S)
        connection.connect(target["socket"])
        mine = os.open("/dev/null", os.O_RDONLY)
        said = ""
        try:
            socket.send_fds(connection, [b"x" * 4096], [mine] * 8)
        except OSError as error:
            said = f"sending: {error}"
        data, fds, _flags, _address = socket.recv_fds(connection, 65_536, 8)
        _met[:] = fds
        os.close(mine)
        if data.startswith(b"got "):
            return data.decode()
        if said:
            raise OSError(1, said)
        return None


@attack("ring")
def resize(_target: Target) -> str | None:
    """Truncate the shared memory under the host, or grow it."""
    size = os.fstat(_met[0]).st_size
    last: OSError | None = None
    for length in (0, size - 4096, size + 4096):
        try:
            os.ftruncate(_met[0], length)
        except OSError as error:
            last = error
            continue
        return f"{size} to {length} bytes"
    raise last or OSError("unreachable")


@attack("ring")
def truncate_anew(_target: Target) -> str | None:
    """Truncate the shared memory by opening it again with O_TRUNC."""
    os.close(os.open(f"/proc/self/fd/{_met[0]}", os.O_RDWR | os.O_TRUNC))
    size = os.fstat(_met[0]).st_size
    return f"{size} bytes are left" if size == 0 else None


@attack("ring")
def seal(_target: Target) -> str | None:
    """Add a seal that stops the host from writing."""
    fcntl.fcntl(_met[0], fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return "sealed"


@attack("ring")
def second_meeting(target: Target) -> str | None:
    """Open a second channel over the socket of the first."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(WAIT_S)
        connection.connect(target["socket"])
        connection.sendall(b"hello")
        return f"{len(connection.recv(4096))} bytes"


@attack("ring")
def neighbour(target: Target) -> str | None:
    """Connect to another sandbox's socket, by its host path and by indirect paths."""
    last: OSError | None = None
    for path in (target["neighbour"], "/ipc/.." + target["neighbour"], "/proc/1/root" + target["neighbour"]):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(WAIT_S)
            try:
                connection.connect(path[:100])
                return f"{len(connection.recv(64))} bytes"
            except OSError as error:
                last = error
    raise last or OSError("unreachable")


@attack("ring")
def foreign_rings(_target: Target) -> str | None:
    """Open other sandboxes' shared memory through the processes that hold it."""
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{entry}/fd"):
                if os.readlink(f"/proc/{entry}/fd/{name}").startswith(RINGS):
                    os.close(os.open(f"/proc/{entry}/fd/{name}", os.O_RDWR))
                    return f"of process {entry}"
    return None
