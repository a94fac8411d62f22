"""The small HTTP server of the operator's listeners: bound, bounded, ended with its block.

Bounds hold before a request is read: connections are counted when they are made, a head has a size and a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from appliance.common.account_roles import Caller, caller_of
from appliance.common.addresses import split_address
from appliance.common.errors import StartError

MAX_HEAD_BYTES = 16 << 10
"""Bytes of a request's head: curl's has 100, a browser's with cookies of other ports 8 KiB."""

KEEP_ALIVE_S = 20
"""Seconds between two requests of a connection. Longer than usual clients keep one (httpx 5, aiohttp 15), so that it is
they who close it: a request that is sent in the moment in which the server closes is lost."""

SOCKET_MODE = 0o660
"""The operator's group may use a Unix socket; the folder keeps everybody else out."""


PEER = "peer"
"""Key in a request's state: the user at the other end of a Unix socket, by the kernel's word; None over an address."""

CALLER = "caller"
"""Key in a request's state: this user with its groups; None over an address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Bounds of one listener."""

    connections: int
    """Open ones; one more is closed at once."""
    head_s: float = 10.0
    """Seconds from the connection's opening to the end of a head; behind an answer from the end of ``KEEP_ALIVE_S``."""
    answer_s: float | None = None
    """Seconds from there to the end of the answer, where the peer takes it; None: as long as it takes."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A listening socket."""

    sock: socket.socket
    shown: str
    """Its address as a URL, or ``unix:PATH``."""

    def close(self) -> None:
        """Close the socket, and remove a Unix socket's file."""
        self.sock.close()
        if self.shown.startswith("unix:"):
            Path(self.shown.removeprefix("unix:")).unlink(missing_ok=True)


def bind(address: str, name: str, backlog: int, mend: str = "") -> Bound:
    """Return the listening socket of ``HOST:PORT`` or ``unix:PATH``.

    Args:
        address: where to listen.
        name: key below ``listen:`` that has the address.
        backlog: connections that the kernel may hold before they are accepted.
        mend: a further way to name another address, for the message.

    Raises:
        StartError: the address cannot be bound.
    """
    try:
        bound = _bind_unix(address) if address.startswith("unix:") else _bind_port(address, backlog)
    except OSError as error:
        why = (os.strerror(error.errno) if error.errno else str(error)).lower()
        raise StartError(
            f"cannot listen for {name} on {address}: {why}; `athanor doctor` says who has it; `listen: {name}` in "
            f"athanor.yaml{mend} names another"
        ) from error
    bound.sock.setblocking(False)
    return bound


def _bind_unix(address: str) -> Bound:
    path = Path(address.removeprefix("unix:"))
    if path.is_socket():  # What a killed gateway left; anything else there is a mistake to be told.
        path.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(str(path))
        os.chmod(path, SOCKET_MODE)
    except OSError:
        sock.close()
        raise
    return Bound(sock, address)


def _bind_port(address: str, backlog: int) -> Bound:
    host, port = split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.create_server((host, port), family=family, backlog=backlog)
    shown_host = f"[{host}]" if family is socket.AF_INET6 else host
    return Bound(sock, f"http://{shown_host}:{sock.getsockname()[1]}")


@contextlib.asynccontextmanager
async def serving(app: ASGIApp, bound: Bound, limits: ServerLimits) -> AsyncIterator[str]:
    """Serve the application while the block runs; gives the address. The socket is closed at the end."""

    # uvicorn takes a factory as well as a class.
    server = _QuietServer(server_config(app, http=partial(BoundedConnection, limits)))
    task = asyncio.create_task(server.serve(sockets=[bound.sock]))
    try:
        yield bound.shown
    finally:
        server.should_exit = True
        server.force_exit = True
        server.ended.set()
        await task
        bound.close()


def server_config(app: ASGIApp, **more: Any) -> uvicorn.Config:
    """Return how requests are read and answered; ``more`` are further settings of uvicorn's."""
    return uvicorn.Config(
        app,
        ws="none",
        log_config=None,
        log_level="error",  # a stranger's malformed request is no news
        access_log=False,
        lifespan="off",
        server_header=False,
        date_header=False,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        timeout_keep_alive=KEEP_ALIVE_S,
        **more,
    )


class BoundedConnection(H11Protocol):
    """A connection that is closed when there are too many, and when its peer is too slow.

    h11 reads heads, and bounds them; uvicorn's other parser does not.
    """

    def __init__(self, limits: ServerLimits, **parts: Any) -> None:
        """``parts``: what uvicorn gives each of its connections."""
        super().__init__(**parts)
        self._limits = limits
        self._deadline: asyncio.TimerHandle | None = None
        self._rested = False
        """Whether the deadline is that of a rest behind an answer."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        """Count it, and start the clock for the first head."""
        super().connection_made(transport)
        caller = _caller(transport)
        self.app_state = {**self.app_state, CALLER: caller, PEER: None if caller is None else caller.user}
        if len(self.connections) > self._limits.connections:
            transport.abort()
            return
        self._arm(self._limits.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._disarm()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Start the clock for the next head."""
        self._rested = False
        self._arm(self._limits.head_s)
        super().on_response_complete()

    def _arm(self, seconds: float) -> None:
        self._disarm()
        self._deadline = self.loop.call_later(seconds, self._look)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _look(self) -> None:
        """End the connection unless its head is there. While its answer is under way, made or taken, that one has a
        deadline of its own, or none."""
        # uvicorn declares a cycle, and sets None before the first head.
        if self.cycle is None:
            self.transport.abort()
        elif not self.cycle.response_complete or self.transport.get_write_buffer_size():
            if self._limits.answer_s is None:
                self._arm(self._limits.head_s)
            else:
                self._deadline = self.loop.call_later(self._limits.answer_s, self.transport.abort)
        elif self._rested:
            self.transport.abort()
        else:  # uvicorn itself ends it after ``KEEP_ALIVE_S`` in which nothing came.
            self._rested = True
            self._arm(KEEP_ALIVE_S)


def _caller(transport: asyncio.Transport) -> Caller | None:
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family != socket.AF_UNIX:
        return None
    return caller_of(sock)


class _QuietServer(uvicorn.Server):
    """A server that leaves the process's signals alone and sleeps until it is ended, where uvicorn's own looks ten
    times a second (for that no Date header can be kept current, and none is sent)."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ended = asyncio.Event()

    async def main_loop(self) -> None:
        """Uvicorn's hook between startup and shutdown."""
        await self.ended.wait()

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]  # noqa: ANN202 - uvicorn's own signature
        yield
