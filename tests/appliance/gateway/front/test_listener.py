"""Connections that end while they are made: the event loop tells each one's protocol, whenever that happens."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest
import uvloop
from cryptography import x509

from appliance.gateway.front.connections import Places, Slot
from appliance.gateway.front.handshakes import Handshakes
from appliance.gateway.front.listener import Listener, Opened
from appliance.gateway.front.starts import Starts
from appliance.gateway.front.stranger_time import StrangerTime
from tests.appliance.gateway.front.pki import Authority

TURNS = 40
"""Turns of the loop in which a connection is made, also over TLS; behind them it is open."""

END_S = 10.0


@dataclass
class Told:
    """What protocols were told."""

    opened: Opened
    made: int = 0
    lost: int = 0
    problems: list[str] = field(default_factory=list)


class Noting(asyncio.Protocol):
    """A connection that counts its begin and its end."""

    def __init__(self, told: Told, slot: Slot) -> None:
        self._told, self._slot = told, slot

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._slot.on_evicted = self._transport.abort
        self._told.made += 1
        self._told.opened.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._told.lost += 1
        self._told.opened.connections.discard(self)
        self._slot.release()

    def end_after_answer(self) -> None: ...

    def end_if_idle(self) -> None: ...

    def abort(self) -> None:
        self._transport.abort()

    def look(self, now: float) -> None: ...


def contexts(folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """TLS of a server and of its client."""
    authority = Authority.create("listener")
    key, chain = authority.issue(x509.DNSName("localhost"))
    (folder / "chain.pem").write_bytes(chain)
    (folder / "key.pem").write_bytes(key)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "chain.pem", folder / "key.pem")
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    return server, client


async def cancelled_after(turns: int, tls: tuple[ssl.SSLContext, ssl.SSLContext] | None) -> Told:
    """Have a listener end its connections so many turns of the loop after it has accepted one."""
    loop = asyncio.get_running_loop()
    handshakes, starts = Handshakes(time.monotonic), Starts(time.monotonic)
    opened = Opened(Places(9, 9, 9), handshakes, starts, StrangerTime(starts.strangers))
    told = Told(opened)
    loop.set_exception_handler(lambda _loop, context: told.problems.append(str(context)))
    bound = socket.create_server(("127.0.0.1", 0))
    listener = Listener(opened, lambda slot: Noting(told, slot), tls[0] if tls else None, bound)
    listener.accept()
    client = asyncio.ensure_future(
        asyncio.open_connection("127.0.0.1", bound.getsockname()[1], ssl=tls[1] if tls else None)
    )
    while not opened.arriving and not told.made:
        await asyncio.sleep(0)
    for _ in range(turns):
        await asyncio.sleep(0)
    listener.abort()
    async with asyncio.timeout(END_S):
        try:
            reader, writer = await client
            await reader.read()
            writer.close()
        except OSError:
            pass  # the end that is meant
        while opened.arriving or told.made > told.lost:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0)
    assert opened.places.held == 0
    listener.end_accepting()
    return told


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["stock", "uvloop"])
def test_a_connection_that_ends_while_it_is_made_leaves_nothing(
    tmp_path: Path, loop: Callable[[], asyncio.AbstractEventLoop], encrypted: bool
) -> None:
    """A listener ends its connections in each turn of the loop from accept on: who was told that a connection was made
    is told that it ended, its place is free, and the client sees the end. Control: connections are ended before their
    protocol has been told of them, and others behind that."""
    tls = contexts(tmp_path) if encrypted else None
    made = list[int]()
    for turns in range(TURNS):
        with asyncio.Runner(loop_factory=loop) as runner:
            told = runner.run(cancelled_after(turns, tls))
        assert (told.made, told.problems) == (told.lost, []), turns
        assert not told.opened.connections
        made.append(told.made)
    assert made[-1] == 1 and (0 in made)
