"""The host's side of the meeting: one socket a sandbox, used once.

The supervisor makes a directory with one listening socket in it and mounts the directory into the
sandbox read-only. The guest connects; the host looks at who that is, makes the segment and both
bells, and sends one message: the layout's bytes and, beside them, three descriptors. Then the socket
is closed and everything else goes through shared memory. Descriptors travel only from host to guest
(gVisor refuses the other way), so the host makes them all.

Who is on the other end is asked of the kernel (SO_PEERCRED, unix(7)). Behind gVisor that is the
sandbox's gofer or the sandbox process itself, depending on release and flags: the gofer connects for
a sandbox that may not open host paths. ``runsc state`` names the sandbox's pid; the gofer's stands in
runsc's state file as ``goferPid``.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import time
from collections.abc import Collection
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Self

from isolation.ipc import doorbell, segment
from isolation.ipc.channel import Channel
from isolation.ipc.errors import AttachError
from isolation.ipc.messages import Role
from isolation.ipc.segment import Layout

_log = logging.getLogger(__name__)

_SOCKET_MODE = 0o666
"""The guest's uid is none of the host's; who may reach the path is settled by the directory."""

_BACKLOG = 4
"""Connections the kernel holds for us; only one is ever right."""

_GREETING_TIMEOUT_S = 5.0
"""Seconds for one small message to fit into an empty socket buffer: any wait here is a fault."""

_UCRED = struct.Struct("3i")


class Listener:
    """A listening socket at a path that does not exist yet; a context manager."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(path)
            os.chmod(path, _SOCKET_MODE)
            self._socket.listen(_BACKLOG)
        except BaseException:
            self._socket.close()
            raise

    def accept(self, expected_pids: Collection[int] | None, timeout_s: float, layout: Layout, role: Role) -> Channel:
        """Wait for the guest and give it its half of a new channel. Blocks: call it in a thread.

        ``expected_pids`` are the processes that may be the guest, as this process numbers them.
        None admits any process of our own uid and is for the runtime without a sandbox alone.
        Everybody else is turned away and logged, and the wait goes on.

        Raises:
            AttachError: nobody admissible came in time.
        """
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            self._socket.settimeout(left)
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                break
            with connection:
                if not is_admissible(connection, expected_pids):
                    continue
                try:
                    return _introduce(connection, layout, role)
                except OSError as error:
                    _log.warning("a guest left before it had its descriptors: %s", error)
        raise AttachError(f"the sandbox did not connect within {timeout_s:g} s")

    def close(self) -> None:
        """Stop listening and remove the socket's path; the second call does nothing."""
        if self._socket.fileno() >= 0:
            self._socket.close()
            with suppress(FileNotFoundError):
                os.unlink(self._path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def is_admissible(connection: socket.socket, expected_pids: Collection[int] | None) -> bool:
    """Whether the kernel's word on the peer is one that we expect."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _gid = _UCRED.unpack(credentials)
    if expected_pids is None:
        admitted = uid == os.getuid()
    else:
        admitted = pid in expected_pids
    if not admitted:
        _log.warning("refused a connection of process %d, uid %d: not the sandbox", pid, uid)
    return bool(admitted)


def _introduce(connection: socket.socket, layout: Layout, role: Role) -> Channel:
    """Make segment and bells, send the guest its three descriptors, keep ours.

    Raises:
        OSError: the guest is gone already.
    """
    connection.settimeout(_GREETING_TIMEOUT_S)
    with ExitStack() as ours, ExitStack() as theirs:
        memfd = segment.create(layout)
        ours.callback(os.close, memfd)
        guest_in, bell_out = doorbell.create_pipe()
        theirs.callback(os.close, guest_in)
        ours.callback(os.close, bell_out)
        bell_in, guest_out = doorbell.create_pipe()
        ours.callback(os.close, bell_in)
        theirs.callback(os.close, guest_out)
        channel = Channel.host(memfd, bell_in, bell_out, layout, role)
        ours.pop_all()  # They are the channel's now.
        ours.callback(channel.close)
        # One message: descriptors attach to its bytes, and the end of the stream ends the layout.
        socket.send_fds(connection, [layout.encode()], [memfd, guest_in, guest_out])
        ours.pop_all()
        return channel
