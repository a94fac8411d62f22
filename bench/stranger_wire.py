"""Connections of strangers: from many addresses, at a fixed rate, with or without TLS, reading or not reading."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import resource
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

CONNECT_S = 5.0
"""Seconds for a connection and its handshake; then the stranger tries anew."""

CONNECTS_PER_S = 300.0
"""Connections that an attack on open connections makes a second at most: a gateway that cuts them is not to be
attacked by connecting instead, which other attacks do."""

BURST_S = 0.1
"""How much of its rate an attack that fell behind makes up for at once."""

SMALL_BUFFER_BYTES = 4_096
"""Receive buffer of a stranger that does not read."""

READ_S = 0.01
"""How long a slow reader reads: one turn of the event loop, and one receive buffer."""

IP_BIND_ADDRESS_NO_PORT = 24
"""ip(7): the port of a bound address is chosen by `connect`, so that addresses do not run out of ports."""

IPV6_FREEBIND = 78
"""linux/in6.h: an address may be bound that no interface has; loopback's route has the attackers'."""


@dataclass(frozen=True, slots=True)
class Place:
    """A listener: host and port, and by which protocol TLS would be asked for it (ALPN)."""

    host: str
    port: int
    alpn: str

    @property
    def family(self) -> int:
        """The version of IP, as `socket` names it."""
        return socket.AF_INET6 if ":" in self.host else socket.AF_INET


@dataclass(slots=True)
class Counts:
    """What an attack has done so far."""

    done: int = 0
    """Units of its rate."""
    open: int = 0
    most_open: int = 0
    refused: int = 0
    """Connections that did not come about."""
    cut: int = 0
    """Connections that the other side ended."""


class Pace:
    """So many units a second, for all connections of an attack together; what was missed is not made up for."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._next = 0.0

    async def take(self, units: float = 1) -> None:
        """Wait until so many units more are due."""
        now = asyncio.get_running_loop().time()
        self._next = max(self._next, now - BURST_S) + units / self._rate
        if self._next > now:
            await asyncio.sleep(self._next - now)


class Wire(asyncio.Protocol):
    """One connection."""

    def __init__(self, counts: Counts, *, reads: bool) -> None:
        self._counts = counts
        self.reads = reads
        self._transport = cast(asyncio.Transport, None)
        self._room = asyncio.Event()
        self._room.set()
        self.received = bytearray()
        """What came since it was last emptied; at most ``KEPT_BYTES``."""
        self.news = asyncio.Event()
        """Set with everything that comes, and at the end."""
        self.ended = False

    KEPT_BYTES = 1 << 16

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count it."""
        self._transport = cast(asyncio.Transport, transport)
        if not self.reads:
            self._transport.pause_reading()
        self._counts.open += 1
        self._counts.most_open = max(self._counts.most_open, self._counts.open)

    def data_received(self, data: bytes) -> None:
        """Keep a little: answers matter only to a handshake by hand."""
        if len(self.received) < self.KEPT_BYTES:
            self.received += data
        self.news.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """Count it out, and wake the sender."""
        self._counts.open -= 1
        self.ended = True
        self._room.set()
        self.news.set()

    def pause_writing(self) -> None:
        """Let the sender wait: the other side reads more slowly than we write."""
        self._room.clear()

    def resume_writing(self) -> None:
        """Let the sender go on."""
        self._room.set()

    async def send(self, data: bytes) -> None:
        """Send, as soon as what was sent before has nearly left.

        Raises:
            ConnectionResetError: the other side has ended the connection.
        """
        await self._room.wait()
        if self.ended:
            raise ConnectionResetError
        self._transport.write(data)

    async def last(self) -> None:
        """Wait until the other side ends it."""
        while not self.ended:
            self.news.clear()
            await self.news.wait()

    async def read_slowly(self, every_s: float) -> None:
        """Read for ``READ_S`` every so many seconds, until the end; of a connection that does not read."""
        while not self.ended:
            await asyncio.sleep(every_s)
            if not self.ended:
                self._transport.resume_reading()
                await asyncio.sleep(READ_S)
                if not self._transport.is_closing():
                    self._transport.pause_reading()

    def close(self) -> None:
        """Close in order."""
        self._transport.close()

    def reset(self) -> None:
        """Close with a reset."""
        sock = self._transport.get_extra_info("socket")
        if sock is not None:  # else it is closed already
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self._transport.abort()


@dataclass
class Assault:
    """An attack under way: whom it attacks, from where, how fast, and what it has done."""

    http: Place
    grpc: Place
    sources: tuple[str, ...]
    rate: float
    """Of its units, a second."""
    context: Callable[[str], ssl.SSLContext] | None = None
    """Gives TLS for a protocol; None where the listeners speak plain text."""
    counts: Counts = field(default_factory=Counts)
    random: random.Random = field(default_factory=lambda: random.Random(1))

    def __post_init__(self) -> None:
        self.pace = Pace(self.rate)
        self._connects = Pace(CONNECTS_PER_S)
        self._sources = itertools.cycle(self.sources)

    @property
    def secure(self) -> bool:
        """Whether the listeners speak TLS."""
        return self.context is not None

    async def connect(
        self, place: Place, *, reads: bool = True, plain: bool = False, paced: bool = True
    ) -> Wire | None:
        """Connect from the next address; None when it did not come about. ``plain``: without the handshake of TLS.
        ``paced``: at ``CONNECTS_PER_S``; an attack that connects has its own rate."""
        if paced:
            await self._connects.take()
        wire = Wire(self.counts, reads=reads)
        sock = socket.socket(place.family, socket.SOCK_STREAM)
        try:
            self._bind(sock, reads=reads)
            await self._meet(wire, sock, place, plain=plain)
        except OSError:  # TLS's own errors and TimeoutError are OSErrors as well
            self.counts.refused += 1
            sock.close()
            return None
        return wire

    def _bind(self, sock: socket.socket, *, reads: bool) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1)
        if sock.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, IPV6_FREEBIND, 1)
        sock.bind((next(self._sources), 0))
        if not reads:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER_BYTES)

    async def _meet(self, wire: Wire, sock: socket.socket, place: Place, *, plain: bool) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_S):
            await loop.sock_connect(sock, (place.host, place.port))
            if self.context is None or plain:
                await loop.create_connection(lambda: wire, sock=sock)
            else:
                context = self.context(place.alpn)
                await loop.create_connection(lambda: wire, sock=sock, ssl=context, server_hostname="localhost")

    def did(self, units: int = 1) -> None:
        """Count units of the rate."""
        self.counts.done += units

    async def until_cut(self, wire: Wire) -> None:
        """Hold a connection until the other side ends it."""
        await wire.last()
        self.counts.cut += 1


def raise_descriptors() -> int:
    """Raise this process's soft limit of descriptors to the hard one; gives it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def trusting_context(alpn: str) -> ssl.SSLContext:
    """TLS that verifies nothing: a stranger does not mind whom it attacks."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols([alpn])
    return context
