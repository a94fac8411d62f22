"""What the connections of strangers do; ``bench/strangers.py`` has the table of attacks."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import ssl
from collections.abc import Awaitable, Callable, Iterator

from bench import stranger_frames as frames
from bench.stranger_wire import Assault, Place, Wire, trusting_context

DRIBBLE_S = 1.0
"""Between two bytes of everything that is slow."""

GREETING_S = 2.0
"""For how long a flood over HTTP/2 waits for the server's settings, which it then acknowledges as a client does."""

WRONG_KEY = "Bearer ath_alpha-1_" + "5" * 64
"""A credential of the right form, with the name of a key that there is."""

STREAMS_EACH = 200
"""Streams that are opened on a connection before the next connection is made, where open streams are the point."""

Run = Callable[[Assault, int], Awaitable[None]]
Batches = Callable[[Assault], Iterator[tuple[int, bytes]]]
"""Makes, for one connection, units and bytes of each of its sends."""


def place_of(assault: Assault, number: int) -> Place:
    """HTTP for one connection, gRPC for the next."""
    return assault.grpc if number % 2 else assault.http


# ---- connections that are held


def holding(
    begin: Callable[[Assault, Wire, int], Awaitable[None]],
    place: Callable[[Assault, int], Place] = place_of,
    *,
    plain: bool = False,
    reads: bool = True,
) -> Run:
    """Connect, begin something, and wait until the other side ends it."""

    async def run(assault: Assault, number: int) -> None:
        while True:
            await assault.pace.take()
            wire = await assault.connect(place(assault, number), reads=reads, plain=plain, paced=False)
            assault.did()
            if wire is None:
                continue
            try:
                await begin(assault, wire, number)
            except (ConnectionError, ssl.SSLError):
                wire.reset()
            await assault.until_cut(wire)

    return run


async def nothing(assault: Assault, wire: Wire, number: int) -> None:
    """Say nothing."""


async def half_hello(assault: Assault, wire: Wire, number: int) -> None:
    """Half of the first message of TLS; of every other connection all of it, so that its answer is never answered."""
    hello = ByHand(place_of(assault, number).alpn).hello()
    await wire.send(hello if number % 4 < 2 else hello[: len(hello) // 2])


async def h2_opening(assault: Assault, wire: Wire, number: int) -> None:
    """Preface and SETTINGS, and nothing else."""
    await wire.send(frames.opening())


async def dribble(assault: Assault, wire: Wire, data: bytes) -> None:
    """A byte every ``DRIBBLE_S``."""
    await asyncio.sleep(assault.random.random() * DRIBBLE_S)
    for at in range(len(data)):
        await wire.send(data[at : at + 1])
        await asyncio.sleep(DRIBBLE_S)


async def slow_head(assault: Assault, wire: Wire, number: int) -> None:
    """The head of a request, and headers without an end."""
    await dribble(assault, wire, frames.http_request("GET", "/health", [("x-a", "a" * 60)] * 100))


async def slow_body(assault: Assault, wire: Wire, number: int) -> None:
    """A head at once and its body slowly: a request that needs a credential, or one that does not."""
    framing = [("content-length", "1000000"), ("authorization", WRONG_KEY)][: 1 + number % 2]
    method, path = ("POST", "/v1/completions") if number % 2 else ("GET", "/health")
    await wire.send(frames.http_request(method, path, framing))
    await dribble(assault, wire, b" " * 1_000_000)


async def slow_frames(assault: Assault, wire: Wire, number: int) -> None:
    """The preface slowly; or it at once and a call slowly; or a call's headers at once and its message slowly."""
    block = frames.grpc_headers(frames.HEALTH_CHECK, secure=assault.secure)
    headers = frames.frame(frames.HEADERS, frames.END_HEADERS, 1, block)
    message = frames.frame(frames.DATA, 0, 1, bytes(frames.MAX_FRAME_BYTES))
    quick = (b"", frames.opening(), frames.opening() + headers)[number % 3]
    if quick:
        await wire.send(quick)
    await dribble(assault, wire, (frames.opening() + headers + message)[len(quick) :])


async def slow_tls(assault: Assault, wire: Wire, number: int) -> None:
    """The first message of TLS slowly; or, behind a whole handshake, a record slowly."""
    by_hand = ByHand(place_of(assault, number).alpn)
    if number % 4 < 2:
        await dribble(assault, wire, by_hand.hello())
        return
    await by_hand.shake(wire)
    await dribble(assault, wire, by_hand.seal(b"GET /health HTTP/1.1\r\n" + b"x" * 8_000))


async def slow_reader(assault: Assault, wire: Wire, number: int) -> None:
    """Many requests whose answers are hardly read; of gRPC, with a window in which no answer fits."""
    if number % 2:
        block = frames.grpc_headers(frames.HEALTH_CHECK, secure=assault.secure)
        calls = (frames.call(stream, block) for stream in itertools.islice(frames.streams(), 100))
        await wire.send(frames.opening((4, 0)) + b"".join(calls))
    else:
        await wire.send(frames.http_request("GET", "/health") * 2_000)
    await wire.read_slowly(DRIBBLE_S)


class ByHand:
    """TLS of which every byte is seen before it is sent."""

    def __init__(self, alpn: str) -> None:
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = trusting_context(alpn).wrap_bio(self._in, self._out, server_hostname="localhost")

    def hello(self) -> bytes:
        """The first message."""
        with contextlib.suppress(ssl.SSLWantReadError):
            self._tls.do_handshake()
        return self._out.read()

    async def shake(self, wire: Wire) -> None:
        """The whole handshake.

        Raises:
            ConnectionResetError: the other side has ended the connection.
            SSLError: it does not agree.
        """
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                await wire.send(self._out.read())
                wire.news.clear()
                if not wire.received:
                    await wire.news.wait()
                self._in.write(bytes(wire.received))
                wire.received.clear()
            else:
                await wire.send(self._out.read())
                return

    def seal(self, data: bytes) -> bytes:
        """A record with this in it."""
        self._tls.write(data)
        return self._out.read()


# ---- connections that are ended at once


def churning(begin: bytes = b"", *, plain: bool = True) -> Run:
    """Connect and close: in order, or with a reset."""

    async def run(assault: Assault, number: int) -> None:
        for turn in itertools.count():
            await assault.pace.take()
            wire = await assault.connect(place_of(assault, number), plain=plain, paced=False)
            assault.did()
            if wire is None:
                continue
            try:
                if begin:
                    await wire.send(begin)
            except ConnectionError:
                continue
            if turn % 2:
                wire.reset()
            else:
                wire.close()

    return run


async def heads_without_end(assault: Assault, number: int) -> None:
    """Heads of 200 KB: one long header, or as many as fit."""
    header = ("x-a", "a" * 200_000) if number % 2 else ("x-a", "a" * 20)
    head = frames.http_request("GET", "/health", [header] * (1 if number % 2 else 7_000))
    while True:
        await assault.pace.take()
        wire = await assault.connect(assault.http, paced=False)
        assault.did()
        if wire is None:
            continue
        try:
            await wire.send(head)
        except ConnectionError:
            assault.counts.cut += 1
            continue
        await assault.until_cut(wire)


# ---- connections on which much is sent


async def acknowledge(wire: Wire) -> None:
    """Wait for the settings of the server and acknowledge them; of a connection that reads nothing, do not.

    Raises:
        ConnectionResetError: the other side has ended the connection.
    """
    if wire.reads:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GREETING_S):
                await wire.news.wait()
            await wire.send(frames.frame(frames.SETTINGS, frames.ACK, 0))


def flooding(
    batches: Batches, place: Callable[[Assault], Place] = lambda assault: assault.grpc, *, deaf: bool = False
) -> Run:
    """Send one batch after the other, at the attack's rate. ``deaf``: every other connection reads no answer."""

    async def run(assault: Assault, number: int) -> None:
        while True:
            wire = await assault.connect(place(assault), reads=not (deaf and number % 2))
            if wire is None:
                continue
            try:
                for units, data in batches(assault):
                    await assault.pace.take(units)
                    await wire.send(data)
                    assault.did(units)
                    if data.startswith(frames.PREFACE):
                        await acknowledge(wire)
            except ConnectionError:
                assault.counts.cut += 1
                continue
            wire.close()

    return run


def repeating(unit: bytes, times: int = 50) -> Batches:
    """The same frame again and again, behind the opening of HTTP/2."""

    def batches(assault: Assault) -> Iterator[tuple[int, bytes]]:
        yield 0, frames.opening()
        while True:
            yield times, unit * times

    return batches


def pairs(pair: Callable[[int, bytes], bytes], times: int = 20) -> Batches:
    """Two frames on one stream after the other."""

    def batches(assault: Assault) -> Iterator[tuple[int, bytes]]:
        block = frames.grpc_headers(frames.HEALTH_CHECK, secure=assault.secure)
        yield 0, frames.opening()
        numbers = frames.streams()
        while True:
            yield times, b"".join(pair(stream, block) for stream in itertools.islice(numbers, times))

    return batches


def on_open_stream(unit: bytes, times: int = 50) -> Batches:
    """The same frame again and again on a stream whose request has not ended."""

    def batches(assault: Assault) -> Iterator[tuple[int, bytes]]:
        block = frames.grpc_headers(frames.HEALTH_CHECK, secure=assault.secure)
        yield 0, frames.opening() + frames.frame(frames.HEADERS, frames.END_HEADERS, 1, block)
        while True:
            yield times, unit * times

    return batches


def hpack_bombs(assault: Assault) -> Iterator[tuple[int, bytes]]:
    """One entry of 3.9 KB, referenced 3,000 times in the headers of each of 200 streams; nothing is ended."""
    first, later = frames.bomb_blocks()
    yield 0, frames.opening()
    for stream in itertools.islice(frames.streams(), STREAMS_EACH):
        yield 1, frames.frame(frames.HEADERS, frames.END_HEADERS, stream, first if stream == 1 else later)


def continuations(part: bytes, times: int) -> Batches:
    """Headers that never end."""

    def batches(assault: Assault) -> Iterator[tuple[int, bytes]]:
        block = frames.grpc_headers(frames.HEALTH_CHECK, secure=assault.secure)
        yield 0, frames.opening() + frames.frame(frames.HEADERS, 0, 1, block)
        while True:
            yield times, part * times

    return batches


def wrong_calls(assault: Assault) -> Iterator[tuple[int, bytes]]:
    """Calls with a credential that is wrong."""
    block = frames.grpc_headers(frames.GENERATE, ("authorization", WRONG_KEY), secure=assault.secure)
    yield 0, frames.opening()
    for stream in frames.streams():
        yield 1, frames.call(stream, block)


def wrong_requests(assault: Assault) -> Iterator[tuple[int, bytes]]:
    """HTTP requests with a credential that is wrong."""
    body = b'{"model":"athanor-mini","prompt":"a","max_tokens":1}'
    framing = [("content-length", str(len(body))), ("authorization", WRONG_KEY)]
    request = frames.http_request("POST", "/v1/completions", framing, body)
    while True:
        yield 1, request


def pipelined(assault: Assault) -> Iterator[tuple[int, bytes]]:
    """Requests without a pause, 50 in one segment."""
    while True:
        yield 50, frames.http_request("GET", "/health") * 50


def chunk_extensions(assault: Assault) -> Iterator[tuple[int, bytes]]:
    """A body of one byte a chunk, each with a kilobyte of extension."""
    yield 0, frames.http_request("GET", "/health", [("transfer-encoding", "chunked")])
    while True:
        yield 10, (b"1;a=" + b"a" * 1_000 + b"\r\nx\r\n") * 10


def to_http(assault: Assault) -> Place:
    """HTTP alone."""
    return assault.http


def http_only(assault: Assault, number: int) -> Place:
    """HTTP alone, whatever the connection's number."""
    return assault.http


def grpc_only(assault: Assault, number: int) -> Place:
    """Return gRPC alone, whatever the connection's number."""
    return assault.grpc
