"""HTTP's listening socket: accepts and counts connections, ends them at a drain.

A connection is counted when it is accepted, before TLS: one too many costs neither a handshake nor a buffer. So sockets
are accepted here and given to the event loop afterwards. A handshake's deadline counts from accept too.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Coroutine
from email.utils import formatdate
from typing import Any

import structlog

from appliance.gateway.front.connections import Connections, Slot
from appliance.gateway.http.body import Body
from appliance.gateway.http.head import RequestHead
from appliance.gateway.http.protocol import HttpConnection, Shared
from appliance.gateway.http.settings import HttpSettings

BACKLOG = 1_024
"""Connections that the kernel may hold before we accept them."""

ACCEPTS_A_TURN = 64
"""Connections accepted before the event loop turns: a millisecond or two."""

REST_S = 1.0
"""Pause in accepting when the process is out of descriptors or the kernel out of memory."""

LOOK_S = 0.05
"""Between two looks at whether a connection is open still."""

log = structlog.get_logger()


class HttpListener:
    """One listening socket and its connections. ``context``: TLS, None for plain text."""

    def __init__(
        self,
        settings: HttpSettings,
        serve: Callable[[HttpConnection, RequestHead, Body], Coroutine[Any, Any, None]],
        context: ssl.SSLContext | None,
        bound: socket.socket,
    ) -> None:
        counts = Connections(settings.max_connections_each, settings.max_connections)
        self._shared = Shared(settings, counts, serve)
        self._context = context
        self._bound = bound
        self._closed = False
        bound.setblocking(False)
        self.refresh()

    @property
    def tasks(self) -> set[asyncio.Task[None]]:
        """One for each request being answered."""
        return self._shared.tasks

    def accept(self) -> None:
        """Take the connections that wait at the socket, and those that come. Idempotent; nothing after the end."""
        if not self._closed:
            asyncio.get_running_loop().add_reader(self._bound.fileno(), self._take)

    def refresh(self) -> None:
        """Bring the Date header up to date; it shows whole seconds."""
        self._shared.date = formatdate(usegmt=True)

    def end_accepting(self) -> None:
        """Accept nothing more, and let each connection end with its next answer."""
        self._closed = True
        asyncio.get_running_loop().remove_reader(self._bound.fileno())
        self._bound.close()
        self._shared.ending = True
        for connection in self._shared.connections:
            connection.end_after_answer()

    async def linger(self, longest_s: float) -> float:
        """Wait while connections are open, or in their handshakes, at most so long; gives the seconds."""
        clock = asyncio.get_running_loop().time
        start = clock()
        while clock() < start + longest_s:
            await asyncio.sleep(LOOK_S)
            if not self._shared.connections and not self._shared.arriving:
                break
        return clock() - start

    def end_idle(self) -> None:
        """Close each connection that waits for a request; the others end behind their answers."""
        for connection in list(self._shared.connections):
            connection.end_if_idle()

    def abort(self) -> None:
        """Close every connection at once: handlers see that their client has gone, and return."""
        for arriving in list(self._shared.arriving):
            arriving.cancel()
        for connection in list(self._shared.connections):
            connection.abort()

    def cancel(self) -> None:
        """Cancel handlers that have not returned."""
        for task in list(self._shared.tasks):
            task.cancel()

    def _take(self) -> None:
        """Accept what waits, up to ``ACCEPTS_A_TURN``."""
        loop = asyncio.get_running_loop()
        for _ in range(ACCEPTS_A_TURN):
            try:
                accepted, peer = self._bound.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                log.error("connections cannot be accepted; trying again", error=str(error), after_s=REST_S)
                loop.remove_reader(self._bound.fileno())
                loop.call_later(REST_S, self.accept)
                return
            slot = self._shared.counts.admit(peer[0])
            if slot is None:
                accepted.close()
                continue
            accepted.setblocking(False)
            task = loop.create_task(self._connect(accepted, slot))
            self._shared.arriving.add(task)
            task.add_done_callback(self._shared.arriving.discard)

    async def _connect(self, accepted: socket.socket, slot: Slot) -> None:
        """Make a connection of an accepted socket; with TLS, after its handshake."""
        made = False
        try:
            # Not the loop's own deadline: the stock loop stops that one's clock when the peer resets the connection.
            async with asyncio.timeout(self._shared.settings.head_timeout_s):
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: HttpConnection(self._shared, slot), accepted, ssl=self._context
                )
            made = True
        except OSError:
            pass  # no TLS, another version, the peer has left, the deadline has passed: nothing for a log
        finally:
            if not made:
                slot.release()
                with contextlib.suppress(OSError):
                    accepted.shutdown(socket.SHUT_RDWR)
