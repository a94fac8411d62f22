"""The listening Unix socket of the operator's API, its connections, and their bounds.

HTTP/2 is that of the gateway's gRPC listener (``appliance.gateway.grpc.connection``); here the kernel tells who is at
the other end of each connection, and every call of it is that process's. Callers on other machines come by
``remote.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import structlog

from appliance.common.account_roles import Caller, Identity, Roles, caller_of
from appliance.common.errors import StartError, reason_of
from appliance.common.kept_tasks import kept
from appliance.gateway.front.allowance import StrangersAllowances
from appliance.gateway.front.connections import Places, Slot
from appliance.gateway.front.handshakes import Handshakes
from appliance.gateway.front.listener import Opened
from appliance.gateway.front.starts import Starts
from appliance.gateway.front.stranger_time import StrangerTime
from appliance.gateway.grpc.connection import STRANGER, GrpcConnection, GrpcShared
from appliance.operator.api.front import OperatorFront

MAX_CONNECTIONS = 64
"""Connections at once; one more is closed."""

MAX_EACH = 16
"""Connections of one user at once."""

MAX_ROLELESS = 8
"""Connections of all users without a role at once: enough to be told so."""

MAX_MESSAGE_BYTES = 32 << 20
"""Bytes of one message: the largest policy has less."""

ROLELESS_MESSAGE_BYTES = 4 << 10
"""Bytes of a message of a caller without a role; it is not looked at."""

STALL_S = 30.0
"""Seconds for which a caller may leave a message unread."""

BACKLOG = 64
"""Connections that the kernel may hold before they are accepted."""

TICK_S = 1.0
"""Between two looks at connections that are idle or dead."""

OWN_MODE, OPEN_MODE = 0o600, 0o666
"""Modes of the socket: for its owners alone, or for all whom its folder lets in, where others have roles. Each call is
asked for a role in any case."""

log = structlog.get_logger()


class OperatorListener:
    """The connections of one socket."""

    def __init__(self, bound: socket.socket, front: OperatorFront, roles: Roles) -> None:
        self._bound = bound
        self._front = front
        self._roles = roles
        starts = Starts(time.monotonic)
        places = Places(MAX_CONNECTIONS, MAX_CONNECTIONS, MAX_CONNECTIONS)
        self._opened = Opened(places, Handshakes(time.monotonic), starts, StrangerTime(starts.strangers))
        self._strangers = StrangersAllowances(STRANGER, time.monotonic)
        self._held: Counter[int] = Counter()
        """Connections by user; those without a role count together, as -1."""

    def accept(self) -> None:
        """Take connections from now on."""
        asyncio.get_running_loop().add_reader(self._bound.fileno(), self._take)

    def look(self) -> None:
        """Have each connection look whether it is too old, idle or dead."""
        now = asyncio.get_running_loop().time()
        for connection in list(self._opened.connections):
            connection.look(now)

    def end(self) -> None:
        """Take no connections, and close those that are open."""
        asyncio.get_running_loop().remove_reader(self._bound.fileno())
        self._bound.close()
        for task in list(self._opened.arriving):
            task.cancel()
        for connection in list(self._opened.connections):
            connection.abort()

    def _take(self) -> None:
        try:
            accepted, _ = self._bound.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            log.error("connections of the operator's API cannot be accepted", problem=reason_of(error))
            return
        try:
            caller = caller_of(accepted)
        except OSError:
            accepted.close()
            return
        rank = bool(self._roles.of_caller(caller))
        name, most = (caller.user, MAX_EACH) if rank else (-1, MAX_ROLELESS)
        slot = None if self._held[name] >= most else self._opened.places.admit("", proxy=True)
        if slot is None:
            accepted.close()
            return
        accepted.setblocking(False)
        self._held[name] += 1
        task = asyncio.get_running_loop().create_task(self._connect(accepted, slot, caller, known=rank))
        self._opened.arriving.add(task)
        task.add_done_callback(self._opened.arriving.discard)

    async def _connect(self, accepted: socket.socket, slot: Slot, caller: Caller, *, known: bool) -> None:
        identity = Identity(caller.user, self._roles.of_caller(caller))
        shared = GrpcShared(
            opened=self._opened,
            serve=partial(self._front.serve, lambda _wire: identity),
            strangers=self._strangers,
            most=MAX_MESSAGE_BYTES if known else ROLELESS_MESSAGE_BYTES,
            stall_s=STALL_S,
        )
        gone = partial(self._gone, caller.user if known else -1)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: _Connection(shared, slot, gone), accepted)
        except OSError:
            accepted.close()
            slot.release()
            gone()

    def _gone(self, name: int) -> None:
        self._held[name] -= 1
        if not self._held[name]:
            del self._held[name]


class _Connection(GrpcConnection):
    """A connection that tells when it has ended."""

    def __init__(self, shared: GrpcShared, slot: Slot, gone: partial[None]) -> None:
        super().__init__(shared, slot)
        self._gone = gone

    def connection_lost(self, exc: Exception | None) -> None:
        """End every call, and count the connection out."""
        super().connection_lost(exc)
        self._gone()


def bind(path: Path, roles: Roles) -> socket.socket:
    """Return the listening socket.

    Raises:
        StartError: the path cannot be used.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    before = os.umask(0o177)
    try:
        if path.is_socket():  # what a killed process left; anything else there is a mistake to be told
            path.unlink(missing_ok=True)
        sock.bind(str(path))
        path.chmod(OPEN_MODE if roles.open_to_others else OWN_MODE)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise StartError(
            f"cannot listen for the operator's API on {path}: {reason_of(error)}; `operator_api: socket` names another"
        ) from error
    finally:
        os.umask(before)
    sock.setblocking(False)
    return sock


def unbind(path: Path) -> None:
    """Remove the socket's file."""
    path.unlink(missing_ok=True)


@contextlib.asynccontextmanager
async def serving(
    path: Path,
    front: OperatorFront,
    roles: Roles,
    grace_s: float = 0.0,
    failed: Callable[[str], None] = lambda _why: None,
) -> AsyncIterator[None]:
    """Serve the API while the block runs; at its end, calls that change something have ``grace_s`` seconds. ``failed``
    is told in one line why it serves no more.

    Raises:
        StartError: the path cannot be used.
    """
    listener = OperatorListener(bind(path, roles), front, roles)
    listener.accept()
    try:
        with kept({"the look at the connections of operators": _tick(listener)}, failed):
            yield
    finally:
        await front.end(grace_s)
        listener.end()
        unbind(path)


async def _tick(listener: OperatorListener) -> None:
    while True:
        await asyncio.sleep(TICK_S)
        listener.look()
