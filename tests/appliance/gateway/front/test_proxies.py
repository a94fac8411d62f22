"""Clients behind proxies over real sockets: whose connection and whose request it is, and who may say so.

The trusted proxy is 127.0.0.2, a source address that the tests bind; 127.0.0.3 and the others are anybody.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
import uvloop

from appliance.common import lines
from appliance.gateway.front.client_address import FORWARDED, PROXY_PROTOCOL, X_FORWARDED_FOR, TrustedProxies
from appliance.gateway.grpc import connection
from appliance.gateway.grpc.servicer import HEALTH, SERVICE
from tests.appliance.captured_logs import capture_logs
from tests.appliance.gateway.front.pki import Pki
from tests.appliance.gateway.front.proxy_header import LOCAL, UNSPEC, header_of, raw_header
from tests.appliance.gateway.front.support import Running, serving
from tests.appliance.gateway.grpc import raw_grpc as raw
from tests.appliance.gateway.grpc.raw_grpc import PREFACE, Peer, frame

PROXY, STRANGER = "127.0.0.2", "127.0.0.3"
CLIENT, OTHER = "203.0.113.5", "203.0.113.6"
BEHIND = {source: TrustedProxies.of([PROXY], source) for source in (X_FORWARDED_FOR, FORWARDED, PROXY_PROTOCOL)}
LOOPS = pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["stock", "uvloop"])
Make = Callable[[], asyncio.AbstractEventLoop]
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def clients_context(pki: Pki, protocol: str) -> ssl.SSLContext:
    """TLS of a client that trusts the server's authority."""
    context = ssl.create_default_context(cadata=pki.authority.pem.decode())
    context.set_alpn_protocols([protocol])
    return context


async def opened(
    port: int, prefix: bytes | Sequence[bytes] = b"", *, address: str = PROXY, tls: ssl.SSLContext | None = None
) -> Streams:
    """A connection from this address that begins with these bytes, or with each of these pieces a while apart, before
    TLS where there is one."""
    loop = asyncio.get_running_loop()
    plain = socket.socket()
    plain.bind((address, 0))
    plain.setblocking(False)
    await loop.sock_connect(plain, ("127.0.0.1", port))
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for piece in [prefix] if isinstance(prefix, bytes) else prefix:
        await loop.sock_sendall(plain, piece)
        await asyncio.sleep(0 if isinstance(prefix, bytes) else 0.002)
    return await asyncio.open_connection(sock=plain, ssl=tls, server_hostname=None if tls is None else "127.0.0.1")


def http_request(running: Running, *headers: str) -> bytes:
    """A request without a credential to a path that needs one: refused, and remembered with its context."""
    return "\r\n".join(["GET /v1/models HTTP/1.1", "host: a", *headers, "", ""]).encode()


def grpc_call(*metadata: tuple[str, str]) -> bytes:
    """The start of a connection and a call without a credential."""
    head = raw.head(f"/{SERVICE}/ListModels", *metadata)
    return PREFACE + frame(raw.SETTINGS, 0, 0) + frame(raw.HEADERS, raw.END_HEADERS | raw.END_STREAM, 1, head)


async def answered(reader: asyncio.StreamReader) -> bool:
    """Whether anything comes before the connection's end."""
    async with asyncio.timeout(20):
        with contextlib.suppress(ConnectionError):
            return bool(await reader.read(1))
    return False


async def told(running: Running, count: int) -> list[object]:
    """The clients' addresses of this many refused requests, in their order."""
    async with asyncio.timeout(20):
        while len(running.service.refusals) < count:
            await asyncio.sleep(0.005)
    return [context.attributes["client.address"] for context, _, _ in running.service.refusals]


@contextlib.asynccontextmanager
async def closing() -> AsyncIterator[Callable[[Streams], asyncio.StreamReader]]:
    """Gives a function that keeps a connection open to the end of the block, and returns its reader."""
    writers: list[asyncio.StreamWriter] = []

    def keep(streams: Streams) -> asyncio.StreamReader:
        writers.append(streams[1])
        return streams[0]

    try:
        yield keep
    finally:
        for writer in writers:
            writer.transport.abort()


# ---- headers of requests


@pytest.mark.parametrize("source", [X_FORWARDED_FOR, FORWARDED])
async def test_a_request_has_the_address_that_a_trusted_proxy_names(source: str) -> None:
    """Over HTTP and gRPC; from anybody else the same header is ignored, and so is the header that is not chosen."""
    rows = {X_FORWARDED_FOR: CLIENT, FORWARDED: f"for={CLIENT};proto=https"}
    header = {source: rows[source]}
    other = {name: value.replace(CLIENT, OTHER) for name, value in rows.items() if name != source}
    async with serving(proxies=BEHIND[source]) as running, closing() as keep:
        http, grpc = running.front_ends.http_port, running.front_ends.grpc_port
        cases = [(PROXY, header | other), (STRANGER, header | other), (PROXY, other), (PROXY, {})]
        for address, headers in cases:
            _, writer = streams = await opened(http, address=address)
            keep(streams)
            writer.write(http_request(running, *(f"{name}: {value}" for name, value in headers.items())))
            await told(running, len(running.service.refusals) + 1)
        for address, headers in cases:
            _, writer = streams = await opened(grpc, address=address)
            keep(streams)
            writer.write(grpc_call(*headers.items()))
            await told(running, len(running.service.refusals) + 1)
        assert await told(running, 8) == [CLIENT, STRANGER, PROXY, PROXY] * 2


async def test_requests_of_one_connection_have_their_own_addresses() -> None:
    """A proxy sends requests of several clients over one connection; a forged left part changes none of them."""
    async with serving(proxies=BEHIND[X_FORWARDED_FOR]) as running, closing() as keep:
        reader, writer = streams = await opened(running.front_ends.http_port)
        keep(streams)
        for listed in (CLIENT, f"{CLIENT}, {OTHER}", f"{PROXY}, {OTHER}, {PROXY}"):
            writer.write(http_request(running, f"x-forwarded-for: {listed}"))
        assert await told(running, 3) == [CLIENT, OTHER, OTHER]
        assert await answered(reader)


async def test_a_proxys_connections_are_not_bounded_as_one_address() -> None:
    """A trusted proxy holds more than an address may, while anybody else is held to it; all together are bounded."""
    async with serving(proxies=BEHIND[X_FORWARDED_FOR], max_connections_each=2) as running, closing() as keep:
        for port in (running.front_ends.http_port, running.front_ends.grpc_port):
            start = http_request(running) if port == running.front_ends.http_port else grpc_call()
            for address, expected in ((PROXY, [True] * 6), (STRANGER, [True, True, False])):
                for wanted in expected:
                    streams = await opened(port, start, address=address)
                    assert await answered(keep(streams)) is wanted, (address, port)


async def test_a_proxys_connections_stay_where_strangers_make_room() -> None:
    """A flood of strangers closes its own connections, and the proxy's oldest one is served behind it."""
    async with serving(proxies=BEHIND[X_FORWARDED_FOR], max_connections=8) as running, closing() as keep:
        port = running.front_ends.http_port
        reader, writer = streams = await opened(port)
        keep(streams)
        for number in range(40):
            keep(await opened(port, address=f"127.0.0.{3 + number % 5}"))
        writer.write(http_request(running, f"x-forwarded-for: {CLIENT}"))
        assert await answered(reader)
        assert CLIENT in await told(running, 1)


async def test_calls_of_strangers_are_bounded_by_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one connection of a proxy, the client that has as many health checks open as it may is refused, its neighbour
    is served. Named by anybody else, all of them are that one's."""
    monkeypatch.setattr("appliance.gateway.grpc.servicer.STRANGER_CALLS", 2)
    head = {
        client: raw.head(f"/{HEALTH}/Check", ("x-forwarded-for", client), ("grpc-timeout", "9S"))
        for client in (CLIENT, OTHER)
    }
    message = frame(raw.DATA, raw.END_STREAM, 7, bytes(5))

    def opens(stream: int, client: str) -> bytes:
        return frame(raw.HEADERS, raw.END_HEADERS, stream, head[client])

    async with serving(proxies=BEHIND[X_FORWARDED_FOR]) as running:
        for address, refused in ((PROXY, 1), (STRANGER, 2)):
            peer = await Peer.connect(running, address=address)
            peer.say(opens(1, CLIENT) + opens(3, CLIENT) + opens(5, CLIENT) + opens(7, OTHER) + message)
            assert (await peer.until(raw.HEADERS)).stream == 5
            assert (await peer.until(raw.HEADERS)).stream == 7
            assert await told(running, refused if address == PROXY else 3)
            peer.close()
        addresses = await told(running, 3)
        assert addresses == [CLIENT, STRANGER, STRANGER]


async def test_a_proxys_connection_survives_what_ends_a_strangers() -> None:
    """Wrong keys and pings of many clients over one connection of a proxy leave it open; a stranger's is closed."""
    wrong = [
        frame(raw.HEADERS, raw.END_HEADERS | raw.END_STREAM, stream, raw.head(f"/{SERVICE}/ListModels"))
        for stream in range(1, 2_001, 2)
    ]
    pings = frame(raw.PING, 0, 0, b"12345678") * 400
    async with serving(proxies=BEHIND[X_FORWARDED_FOR]) as running:
        stranger = await Peer.connect(running, address=STRANGER)
        stranger.say(b"".join(wrong) + pings)
        assert await stranger.farewell() in (raw.ENHANCE_YOUR_CALM, None)
        peer = await Peer.connect(running, address=PROXY)
        for begin in range(0, len(wrong), 100):  # fewer than a connection may have at once
            peer.say(b"".join(wrong[begin : begin + 100]))
            for _ in range(100):
                assert await peer.until(raw.HEADERS)
        peer.say(pings)
        for _ in range(400):
            assert (await peer.until(raw.PING)).flags == raw.ACK
        flood = frame(raw.PING, 0, 0, b"x" * 8) * 20_000
        peer.say(flood)
        assert await peer.farewell() in (raw.ENHANCE_YOUR_CALM, None), "it has its bound too"


# ---- the PROXY protocol


@LOOPS
@pytest.mark.parametrize("secured", [False, True], ids=["plain", "tls"])
def test_connections_are_counted_by_the_client_that_the_header_names(pki: Pki, loop: Make, secured: bool) -> None:
    """Two of a client are served on either port and the third is closed, while another client is served; with the
    first one's end its place is free. Requests have the client's address."""
    files = pki.files.model_copy(update={"client_ca": None}) if secured else None

    async def walk() -> None:
        async with (
            serving(files, proxies=BEHIND[PROXY_PROTOCOL], max_connections_each=2) as running,
            closing() as keep,
            asyncio.timeout(60),
        ):
            for port, start, protocol in (
                (running.front_ends.http_port, http_request(running, f"x-forwarded-for: {OTHER}"), "http/1.1"),
                (running.front_ends.grpc_port, grpc_call(("x-forwarded-for", OTHER)), "h2"),
            ):
                tls = clients_context(pki, protocol) if secured else None
                del running.service.refusals[:]

                async def ask(client: str, port=port, start=start, tls=tls) -> tuple[Streams | None, bool]:
                    try:
                        streams = await opened(port, header_of(client), tls=tls)
                    except (OSError, ssl.SSLError):
                        return None, False
                    keep(streams)
                    streams[1].write(start)
                    return streams, await answered(streams[0])

                held = [await ask(CLIENT) for _ in range(2)]
                assert [served for _, served in held] == [True, True]
                assert not (await ask(CLIENT))[1]
                assert (await ask(OTHER))[1] and (await ask("2001:db8::1"))[1]
                assert await told(running, 4) == [CLIENT, CLIENT, OTHER, "2001:db8::1"]
                held[0][0][1].transport.abort()
                while not (await ask(CLIENT))[1]:
                    await asyncio.sleep(0.01)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(walk())


@LOOPS
@pytest.mark.parametrize("secured", [False, True], ids=["plain", "tls"])
def test_a_header_byte_by_byte(pki: Pki, loop: Make, secured: bool) -> None:
    """However slowly a header comes, with extensions, what follows it is whole; also in one piece with it."""

    async def walk() -> None:
        async with (
            serving(pki.files if secured else None, proxies=BEHIND[PROXY_PROTOCOL]) as running,
            closing() as keep,
            asyncio.timeout(60),
        ):
            port, tls = running.front_ends.http_port, clients_context(pki, "http/1.1") if secured else None
            header = header_of(CLIENT, b"\x03\x00\x04abcd" * 4)
            reader, writer = streams = await opened(port, [header[at : at + 1] for at in range(len(header))], tls=tls)
            keep(streams)
            writer.write(http_request(running))
            assert await answered(reader)
            if not secured:
                assert await answered(keep(await opened(port, header_of(OTHER) + http_request(running))))
                assert await told(running, 2) == [CLIENT, OTHER]
            assert (await told(running, 1))[0] == CLIENT

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(walk())


@LOOPS
def test_a_slow_header_has_the_handshakes_deadline(pki: Pki, loop: Make) -> None:
    """A header that never begins or stops half-way, and a handshake that does behind one, end with the deadline and
    give their places back."""

    async def walk() -> None:
        settings = {"proxies": BEHIND[PROXY_PROTOCOL], "max_connections": 3, "head_timeout_s": 1.0}
        async with serving(pki.files, **settings) as running, closing() as keep, asyncio.timeout(60):
            port, header = running.front_ends.http_port, header_of(CLIENT)
            began = time.monotonic()
            readers = [keep(await opened(port, prefix)) for prefix in (b"", header[:20], header + b"\x16\x03\x01")]
            assert [await answered(reader) for reader in readers] == [False] * 3
            assert time.monotonic() - began >= 0.95
            for client in (CLIENT, OTHER):
                streams = await opened(port, header_of(client), tls=clients_context(pki, "http/1.1"))
                streams[1].write(http_request(running))
                assert await answered(keep(streams))

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(walk())


@LOOPS
def test_a_forged_header_is_the_peers_own_bytes(pki: Pki, loop: Make) -> None:
    """From anybody but the proxy it is no HTTP, no HTTP/2 and no TLS, and is refused as such; without it the peer is
    served under its own address."""

    async def walk() -> None:
        async with serving(proxies=BEHIND[PROXY_PROTOCOL]) as running, closing() as keep, asyncio.timeout(60):
            port = running.front_ends.http_port
            reader = keep(await opened(port, header_of(CLIENT) + http_request(running), address=STRANGER))
            assert (await reader.readline()).startswith(b"HTTP/1.1 400")
            assert await answered(keep(await opened(port, http_request(running), address=STRANGER)))
            assert await told(running, 1) == [STRANGER]
            port = running.front_ends.grpc_port
            peer = Peer(*await opened(port, header_of(CLIENT) + grpc_call(), address=STRANGER))
            await peer.farewell()
            peer.close()
            assert await answered(keep(await opened(port, grpc_call(), address=STRANGER)))
            assert await told(running, 2) == [STRANGER, STRANGER]
        async with serving(pki.files, proxies=BEHIND[PROXY_PROTOCOL]) as running, closing() as keep:
            port, tls = running.front_ends.http_port, clients_context(pki, "http/1.1")
            with pytest.raises(OSError, match=r".*"):
                keep(await opened(port, header_of(CLIENT), address=STRANGER, tls=tls))
            keep(await opened(port, address=STRANGER, tls=tls))

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(walk())


async def test_a_proxy_without_a_header_is_closed_and_told_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request of a trusted proxy that does not announce its client is not answered. The log says so, and not each
    time; a connection of the proxy's own needs no client."""
    monkeypatch.setattr(lines, "BURST_LINES", 2)
    with capture_logs() as logged:
        async with serving(proxies=BEHIND[PROXY_PROTOCOL]) as running, closing() as keep:
            port = running.front_ends.http_port
            for start in [http_request(running), b"PROXY TCP4 203.0.113.5 10.0.0.1 1 2\r\n"] * 10:
                assert not await answered(keep(await opened(port, start)))
            assert running.service.refusals == []
            own = raw_header(LOCAL, UNSPEC, b"") + http_request(running)
            assert await answered(keep(await opened(port, own)))
            assert await told(running, 1) == [PROXY]
    found = [line for line in logged if "did not begin with the PROXY protocol" in line["event"]]
    assert 1 <= len(found) < 20
    assert (found[0]["proxy"], found[0]["level"]) == (PROXY, "warning")


async def test_a_stop_ends_headers_that_nobody_finishes() -> None:
    """Stopping does not wait for a proxy that says nothing."""
    async with serving(proxies=BEHIND[PROXY_PROTOCOL], head_timeout_s=60.0) as running, closing() as keep:
        reader = keep(await opened(running.front_ends.http_port, header_of(CLIENT)[:5]))
        await running.front_ends.stop(0.1)
        assert not await answered(reader)


async def test_an_announced_connection_has_a_strangers_allowance() -> None:
    """Behind the PROXY protocol a flood of gRPC's frames ends the connections of its client, not a neighbour's."""
    pings = frame(raw.PING, 0, 0, b"x" * 8)
    async with serving(proxies=BEHIND[PROXY_PROTOCOL]) as running, asyncio.timeout(60):
        port, few = running.front_ends.grpc_port, connection.FREE_FRAMES + 40
        greeting = PREFACE + frame(raw.SETTINGS, 0, 0)
        flooding = Peer(*await opened(port, header_of(CLIENT) + greeting + pings * 5_000))
        assert await flooding.farewell() in (raw.ENHANCE_YOUR_CALM, None)
        neighbour = Peer(*await opened(port, header_of(OTHER) + greeting + pings * few))
        for _ in range(few):
            assert (await neighbour.until(raw.PING)).flags == raw.ACK
        neighbour.close()
        flooding.close()
