"""A listening socket of either front end: accepts and counts connections, ends them at a drain.

A connection is counted when it is accepted, before TLS: one too many costs neither a handshake nor a buffer. So sockets
are accepted here and given to the event loop afterwards, with TLS when the peer has begun to speak and it is its turn
(``handshakes.py``). A handshake's deadline counts from accept too.

Where trusted proxies announce each connection's client (PROXY protocol), that is read first, from the socket itself and
no byte further; the connection is then counted as its client's. No other peer's bytes are read so.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import structlog

from appliance.common.lines import RefusedLines
from appliance.gateway.front.client_address import ProxyHeader, ProxyHeaderError, TrustedProxies
from appliance.gateway.front.connections import Places, Slot
from appliance.gateway.front.handshakes import Handshakes
from appliance.gateway.front.own_listeners import LOCAL_ADDRESS, Stalls
from appliance.gateway.front.starts import Begin, Starts
from appliance.gateway.front.stranger_time import StrangerTime

BACKLOG = 1_024
"""Connections that the kernel may hold before we accept them."""

ACCEPTS_A_TURN = 64
"""Connections accepted before the event loop turns: a millisecond or two."""

REST_S = 1.0
"""Pause in accepting when the process is out of descriptors or the kernel out of memory."""

LOOK_S = 0.05
"""Between two looks at whether a connection is open still."""

HANDSHAKE_S = 10.0
"""Seconds from accept to the end of the TLS handshake, a proxy's header before it included."""

FAREWELL_S = 5.0
"""Seconds that a closed TLS connection waits for its last bytes to go and the peer's close_notify to come: an idle
client reads neither, and the event loop's own 30 s would hold its place that long."""

Made = tuple[asyncio.Transport, asyncio.Protocol]
"""A connection of the event loop."""

log = structlog.get_logger()


class Connection(Protocol):
    """What a listener asks of its connections."""

    def end_after_answer(self) -> None:
        """Let the answers that run be the connection's last ones."""

    def end_if_idle(self) -> None:
        """Close the connection unless something is being answered; then behind that answer."""

    def abort(self) -> None:
        """Close the connection at once, whatever is on its way."""

    def look(self, now: float) -> None:
        """End the connection if it is too old, idle or dead at this time of the loop; asked every second."""


@dataclass(slots=True)
class Opened:
    """What the connections of one listener have in common."""

    places: Places
    handshakes: Handshakes
    starts: Starts
    stranger_time: StrangerTime
    ending: bool = False
    """Whether each connection ends with its next answer: the appliance stops."""
    connections: set[Connection] = field(default_factory=set)
    arriving: set[asyncio.Task[None]] = field(default_factory=set)
    """One for each connection that is accepted and not made yet: a TLS handshake takes its time."""
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    """One for each request being answered."""

    def begin(self, slot: Slot, begin: Begin) -> None:
        """Begin a request that came over a connection when it is its turn."""
        self.starts.ask(slot.owner, begin, stranger=self._strange(slot))

    def read(self, slot: Slot, read: Begin) -> None:
        """Read a piece that came over a connection: a stranger's when it is its turn, a tenant's now."""
        if self._strange(slot):
            self.stranger_time.ask(slot.network, read)
        else:
            read()

    def _strange(self, slot: Slot) -> bool:
        """Whether no credential ever came over the connection, or from its network."""
        return not (slot.proxy or slot.tenant or self.handshakes.knows(slot.network))


@dataclass(slots=True)
class _Arriving:
    """An accepted socket of which a connection is made."""

    accepted: socket.socket
    slot: Slot
    handed: bool = False
    """Whether the event loop has the socket, and closes it."""
    made: bool = False

    def end(self, _task: asyncio.Task[None]) -> None:
        """Give socket and place back where no connection was made of them."""
        if self.made:
            return
        self.slot.release()
        with contextlib.suppress(OSError):
            self.accepted.shutdown(socket.SHUT_RDWR)
        if not self.handed:
            self.accepted.close()


class Listener:
    """One listening socket and its connections. ``make`` gives the protocol of a connection; ``context``: TLS, None for
    plain text; ``proxies``: peers whose word about their clients counts."""

    def __init__(
        self,
        opened: Opened,
        make: Callable[[Slot], asyncio.Protocol],
        context: ssl.SSLContext | None,
        bound: socket.socket,
        handshake_s: float = HANDSHAKE_S,
        proxies: TrustedProxies | None = None,
        stalls: Stalls | None = None,
    ) -> None:
        """``stalls`` ends connections whose peers take nothing, at a Unix socket."""
        self._opened = opened
        self._stalls = stalls
        self._make = make
        self._context = context
        self._bound = bound
        self._handshake_s = handshake_s
        self._proxies = proxies or TrustedProxies()
        self._lines = RefusedLines(time.monotonic())
        self._closed = False
        bound.setblocking(False)

    @property
    def tasks(self) -> set[asyncio.Task[None]]:
        """One for each request being answered."""
        return self._opened.tasks

    def secure(self, context: ssl.SSLContext) -> None:
        """Use this TLS for the connections that come from now on; a Unix socket has none."""
        if self._stalls is None:
            self._context = context

    def accept(self) -> None:
        """Take the connections that wait at the socket, and those that come. Idempotent; nothing after the end."""
        if not self._closed:
            asyncio.get_running_loop().add_reader(self._bound.fileno(), self._take)

    def end_accepting(self) -> None:
        """Accept nothing more, and let each connection end with its next answer."""
        self._closed = True
        asyncio.get_running_loop().remove_reader(self._bound.fileno())
        self._bound.close()
        self._opened.ending = True
        for connection in self._opened.connections:
            connection.end_after_answer()

    def announce(self, *, ending: bool) -> None:
        """Let each connection end with its next answer while others are accepted, or no longer. Idempotent; nothing
        after ``end_accepting``."""
        if self._closed:
            return
        self._opened.ending = ending
        if ending:
            for connection in self._opened.connections:
                connection.end_after_answer()

    async def linger(self, longest_s: float) -> float:
        """Wait while connections are open, or in their handshakes, at most so long; gives the seconds."""
        clock = asyncio.get_running_loop().time
        start = clock()
        while clock() < start + longest_s:
            await asyncio.sleep(LOOK_S)
            if not self._opened.connections and not self._opened.arriving:
                break
        return clock() - start

    def end_idle(self) -> None:
        """Close each connection that waits for a request; the others end behind their answers."""
        for connection in list(self._opened.connections):
            connection.end_if_idle()

    def look(self) -> None:
        """Have each connection look whether it is too old, idle or dead."""
        now = asyncio.get_running_loop().time()
        for connection in list(self._opened.connections):
            connection.look(now)
        if self._stalls is not None:
            self._stalls.look(now)

    def abort(self) -> None:
        """Close every connection at once: handlers see that their client has gone, and return."""
        for arriving in list(self._opened.arriving):
            arriving.cancel()
        for connection in list(self._opened.connections):
            connection.abort()

    def cancel(self) -> None:
        """Cancel handlers that have not returned."""
        for task in list(self._opened.tasks):
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
            address = peer[0] if self._stalls is None else LOCAL_ADDRESS
            slot = self._opened.places.admit(address, proxy=self._proxies.trusts(address))
            if slot is None:
                accepted.close()
                continue
            accepted.setblocking(False)
            arriving = _Arriving(accepted, slot)
            task = loop.create_task(self._connect(arriving))
            slot.on_evicted = partial(_cancel, task)
            self._opened.arriving.add(task)
            # Not a part of the task, which may be cancelled before it begins.
            task.add_done_callback(arriving.end)
            task.add_done_callback(self._opened.arriving.discard)

    async def _connect(self, arriving: _Arriving) -> None:
        """Make a connection of an accepted socket; with TLS, after its handshake."""
        accepted, slot = arriving.accepted, arriving.slot
        try:
            # Not the loop's own deadline: the stock loop stops that one's clock when the peer resets the connection.
            async with asyncio.timeout(self._handshake_s):
                if self._proxies.announces(slot.address) and not await self._assign(accepted, slot):
                    return
                if self._context is not None:
                    await _first_byte(accepted)
                    if not slot.proxy:
                        await self._opened.handshakes.turn(slot.network)
                arriving.handed = True
                making = asyncio.get_running_loop().connect_accepted_socket(
                    lambda: self._make(slot), accepted, ssl=self._context, ssl_shutdown_timeout=self._farewell_s()
                )
                transport, _ = await (_made(making) if self._context is None else making)
                if self._stalls is not None:
                    self._stalls.watch(transport)
            arriving.made = True
        except ProxyHeaderError as error:
            self._report(slot.address, error)
        except OSError:
            pass  # no TLS, another version, the peer has left, the deadline has passed: nothing for a log

    def _farewell_s(self) -> float | None:
        """Seconds for TLS to end; None without TLS, which has no such end."""
        return None if self._context is None else FAREWELL_S

    async def _assign(self, accepted: socket.socket, slot: Slot) -> bool:
        """Read whose connection it is, and count it so; False when it may not be kept.

        Raises:
            ProxyHeaderError: the proxy does not say it.
        """
        loop, header = asyncio.get_running_loop(), ProxyHeader()
        while header.missing:
            data = await loop.sock_recv(accepted, header.missing)
            if not data:
                raise ConnectionResetError
            header.feed(data)
        return slot.assign(header.address() or slot.address)

    def _report(self, proxy: str, error: ProxyHeaderError) -> None:
        """Log that a trusted proxy does not announce its clients; not each time."""
        unsaid = self._lines.take(None, time.monotonic())
        if unsaid is not None:
            log.warning(
                "a connection of a trusted proxy was closed: it did not begin with the PROXY protocol; have the proxy"
                " send version 2, or set listen.client_address to the header that it writes",
                proxy=proxy,
                reason=str(error),
                unsaid=unsaid,
            )


async def _first_byte(accepted: socket.socket) -> None:
    """Wait until the peer has said something, or left: TLS takes 320 KiB, which a silent one shall not cost."""
    loop = asyncio.get_running_loop()
    spoken = asyncio.Event()
    loop.add_reader(accepted.fileno(), spoken.set)
    try:
        await spoken.wait()
    finally:
        loop.remove_reader(accepted.fileno())


async def _made(making: Coroutine[Any, Any, Made]) -> Made:
    """Wait for a connection without TLS, which waits for no peer. Where the caller is cancelled, it is made and then
    aborted: uvloop closes the transport of a cancelled maker without ``connection_lost``, though its protocol may have
    been told of it."""
    task = asyncio.ensure_future(making)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(_abort)
        raise


def _abort(task: asyncio.Task[Made]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result()[0].abort()


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
