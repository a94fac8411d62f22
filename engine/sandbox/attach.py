"""How a guest meets its host: the one module inside a sandbox that uses a socket.

It runs before lock-down. The guest connects to a path on a read-only mount and receives the layout
of the shared memory with three descriptors beside it; after that the socket is closed for good. A
sandbox that is checkpointed waits here, in the loop that finds nobody, since no descriptor of the host may be open when
the image is taken. Who comes out of here may be one of several that were saved as one, so generators of random numbers
are seeded anew (``engine.sandbox.reseed``).

The processes of a text sandbox hand each other pipes by the same means (``socket_pair``), which end in the sandbox.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from typing import TypeAlias

from engine.sandbox.reseed import reseed
from isolation.ipc.channel import Channel
from isolation.ipc.errors import AttachError
from isolation.ipc.messages import PROTOCOL_VERSION, WAITS_LINE, Configure, Hello, Role
from isolation.ipc.segment import MAX_LAYOUT_BYTES, Layout
from isolation.ipc.weights_names import WRITTEN

CONNECT_TIMEOUT_S = 120.0
"""Seconds to find the host, all tries together; the host listens before it starts the sandbox."""

CONFIGURE_TIMEOUT_S = 30.0
"""Seconds between Hello and Configure; the host has nothing else to do meanwhile."""

_RETRY_S = 0.01
"""Seconds between two tries: above the millisecond to which gVisor rounds shorter sleeps up."""

PACKET_BYTES = 64
"""Most bytes of a packet between processes of one sandbox."""

_NUM_FDS = 3

_MOST = MAX_LAYOUT_BYTES + 1
"""Bytes read of an introduction: one more than the longest, so that a longer one is noticed."""

LocalSocket: TypeAlias = socket.socket
"""One end of a ``socket_pair``."""

_NOT_YET = (FileNotFoundError, ConnectionRefusedError)


def attach(
    path: str,
    role: Role,
    *,
    connect_timeout_s: float = CONNECT_TIMEOUT_S,
    configure_timeout_s: float = CONFIGURE_TIMEOUT_S,
) -> tuple[Channel, bytes]:
    """Connect to the host's socket; return the channel and the configuration, as JSON bytes.

    The channel has said ``Hello`` and heard ``Configure``. The ready message is the caller's.

    Raises:
        AttachError: no host, no descriptors or no configuration in time.
        RemoteProtocolError: what the host sent is not this protocol.
        PeerGoneError: the host went away.
    """
    layout, fds = _introduced(path, connect_timeout_s)
    reseed()
    try:
        channel = Channel.guest(*fds, layout, role)
    except BaseException:
        _close_all(fds)
        raise
    try:
        channel.send(Hello(PROTOCOL_VERSION, role))
        return channel, _configuration(channel, configure_timeout_s)
    except BaseException:
        channel.close()
        raise


def attach_spill(path: str, *, connect_timeout_s: float = CONNECT_TIMEOUT_S) -> Channel:
    """Connect a second time: the channel over which blocks of KV leave the engine and come back.

    It has said ``Hello``; the host answers nothing.

    Raises:
        AttachError, RemoteProtocolError, PeerGoneError: as ``attach``.
    """
    layout, fds = _introduced(path, connect_timeout_s)
    try:
        channel = Channel.guest(*fds, layout, Role.SPILL)
    except BaseException:
        _close_all(fds)
        raise
    try:
        channel.send(Hello(PROTOCOL_VERSION, Role.SPILL))
    except BaseException:
        channel.close()
        raise
    return channel


def send_weights(path: str, pieces: list[memoryview]) -> bool:
    """Send bytes to the host of a template, which writes them into a file in this order; False where no host takes
    them or it has no room for so many: they stay in memory then. The connection is closed behind it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.connect(path)
            for piece in pieces:
                connection.sendall(piece)
            connection.shutdown(socket.SHUT_WR)
            return connection.recv(1) == WRITTEN
        except OSError:
            return False


def socket_pair() -> tuple[LocalSocket, LocalSocket]:
    """Two ends over which processes of one sandbox hand each other descriptors; packets keep their bounds."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send_packet(end: LocalSocket, data: bytes, fds: tuple[int, ...] = ()) -> None:
    """Send a short packet with copies of these descriptors.

    Raises:
        OSError: the other end is gone.
    """
    socket.send_fds(end, [data], fds)


def receive_packet(end: LocalSocket, most_fds: int) -> tuple[bytes, list[int]]:
    """The next packet and its descriptors, which the caller then owns; no bytes at the other end's end."""
    data, fds, _flags, _address = socket.recv_fds(end, PACKET_BYTES, most_fds)
    return data, fds


def _introduced(path: str, timeout_s: float) -> tuple[Layout, tuple[int, int, int]]:
    """Layout and descriptors: memfd, inbound bell, outbound bell; the caller owns them."""
    with _connected(path, timeout_s) as connection:
        received: list[int] = []
        try:
            data, received, _flags, _address = socket.recv_fds(connection, _MOST, _NUM_FDS)
            while more := connection.recv(_MOST - len(data)):
                data += more
            if len(received) != _NUM_FDS:
                raise AttachError(
                    f"the host sent {len(received)} descriptors where {_NUM_FDS} belong; it may "
                    "have turned this process away, its log says so"
                )
            return Layout.decode(data), (received[0], received[1], received[2])
        except OSError as error:
            _close_all(received)
            raise AttachError(f"the host's introduction did not arrive: {error}") from error
        except BaseException:
            _close_all(received)
            raise


def _connected(path: str, timeout_s: float) -> socket.socket:
    """A connection to the path, which may come into being only now."""
    # Tries are counted and no clock is asked: a restored sandbox finds that its clock has jumped.
    for attempt in range(max(1, round(timeout_s / _RETRY_S))):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(CONFIGURE_TIMEOUT_S)
            connection.connect(path)
        except _NOT_YET:
            connection.close()
            if attempt == 0:
                sys.stderr.write(WAITS_LINE + "\n")
            time.sleep(_RETRY_S)
        except OSError as error:
            connection.close()
            raise AttachError(f"cannot connect to the host's socket: {error}") from error
        else:
            return connection
    raise AttachError(f"no host listens at {path} after {timeout_s:g} s")


def _configuration(channel: Channel, timeout_s: float) -> bytes:
    deadline = time.monotonic() + timeout_s
    while (left := deadline - time.monotonic()) > 0:
        if channel.wait(left):
            for message in channel.receive(limit=1):
                # The channel has refused everything else that could come here.
                assert isinstance(message, Configure)
                return message.config
    raise AttachError(f"the host sent no configuration within {timeout_s:g} s")


def _close_all(fds: list[int] | tuple[int, ...]) -> None:
    for fd in fds:
        os.close(fd)
