"""TLS and accepting: what is counted before a handshake, how long one may last, and what a drain does with it."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import Callable

import pytest
import uvloop

from tests.appliance.gateway.front.pki import Pki
from tests.appliance.gateway.front.support import Running, post, serving
from tests.appliance.gateway.http.test_rfc9112 import BODY, LIVE, final_status, live

LOOPS = pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["stock", "uvloop"])
Make = Callable[[], asyncio.AbstractEventLoop]


def trust(pki: Pki) -> ssl.SSLContext:
    """A client's context."""
    return ssl.create_default_context(cadata=pki.authority.pem.decode())


async def connect(running: Running, pki: Pki | None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection with TLS, or plain where there is no authority."""
    context = None if pki is None else trust(pki)
    return await asyncio.open_connection("127.0.0.1", running.front_ends.http_port, ssl=context)


@LOOPS
def test_answers_over_tls(pki: Pki, loop: Make) -> None:
    """Answers, streams and pipelined requests over one connection, and a body that comes in many records."""

    async def walk() -> None:
        async with serving(pki.files) as running, asyncio.timeout(20):
            reader, writer = await connect(running, pki)
            writer.write(LIVE * 3)
            assert [await final_status(reader) for _ in range(3)] == [200] * 3
            padded = BODY + b" " * 500_000
            writer.write(post("/v1/completions", padded, running.authorization).replace(b"connection: close\r\n", b""))
            assert await final_status(reader) == 200
            writer.write(post("/v1/completions", BODY[:-1] + b', "stream": true}', running.authorization))
            assert (await reader.read()).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            writer.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(walk())


@LOOPS
def test_a_request_in_one_flight_with_the_handshake(pki: Pki, loop: Make) -> None:
    """A client that sends its request together with the handshake's last message is answered: nothing of it is lost
    while the connection is handed over."""

    async def ask(running: Running) -> None:
        outgoing, incoming = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = trust(pki).wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
        reader, writer = await connect(running, None)
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                writer.write(outgoing.read())
                incoming.write(await reader.read(1 << 16))
        tls.write(live(b"connection: close"))
        writer.write(outgoing.read())
        answer = b""
        while not answer.endswith(b'{"status":"live"}'):
            try:
                answer += tls.read(1 << 16)
            except ssl.SSLWantReadError:
                incoming.write(await reader.read(1 << 16))
        writer.close()

    async def walk() -> None:
        async with serving(pki.files) as running, asyncio.timeout(20):
            for _ in range(20):
                await ask(running)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(walk())


@LOOPS
def test_a_handshake_is_counted_and_has_a_deadline(pki: Pki, loop: Make) -> None:
    """Two connections that say nothing take all places of strangers before any TLS; with a third the oldest is closed
    at once. After the deadline, which counts from accept however they drip, the places are free."""

    async def walk() -> None:
        async with (
            serving(pki.files, max_connections=4, max_strangers=2, head_timeout_s=0.5) as running,
            asyncio.timeout(20),
        ):
            began = time.monotonic()
            silent = [await connect(running, None) for _ in range(3)]
            reader, writer = silent.pop(0)
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            assert time.monotonic() - began < 0.5, "closed at once"
            writer.close()
            silent[1][1].write(b"\x16\x03\x01\x02\x00\x01")  # a hello that never ends
            for reader, writer in silent:
                with contextlib.suppress(ConnectionError):
                    await reader.read()
                writer.close()
            assert time.monotonic() - began >= 0.45
            reader, writer = await connect(running, pki)
            writer.write(live(b"connection: close"))
            assert await final_status(reader) == 200
            writer.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(walk())


@LOOPS
@pytest.mark.parametrize("end", ["abort", "close", "garbage", "plain"])
def test_a_failed_handshake_gives_its_place_back(pki: Pki, loop: Make, end: str) -> None:
    """A peer that resets, leaves, or speaks no TLS in the handshake leaves nothing behind."""

    async def walk() -> None:
        async with serving(pki.files, max_connections=1, head_timeout_s=60.0) as running, asyncio.timeout(30):
            for _ in range(5):
                reader, writer = await connect(running, None)
                writer.write({"garbage": b"\x00" * 100, "plain": LIVE}.get(end, b"\x16\x03\x01\x02\x00\x01"))
                await asyncio.sleep(0.02)
                if end == "abort":
                    writer.transport.abort()
                elif end == "close":
                    writer.close()
                else:
                    with contextlib.suppress(ConnectionError):
                        await reader.read()
                    writer.close()
                await asyncio.sleep(0.02)
            while True:
                with contextlib.suppress(OSError):
                    reader, writer = await connect(running, pki)
                    break
            writer.write(live(b"connection: close"))
            assert await final_status(reader) == 200
            writer.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(walk())


@LOOPS
def test_a_stop_ends_handshakes(pki: Pki, loop: Make) -> None:
    """Stopping does not wait for the deadline of a handshake that nobody finishes."""

    async def walk() -> None:
        async with serving(pki.files, head_timeout_s=60.0) as running, asyncio.timeout(20):
            reader, writer = await connect(running, None)
            await asyncio.sleep(0.05)
            await running.front_ends.stop(0.1)
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(walk())
