"""A connection to a prefill host that is given up while it is made: nothing is left of it, and no callback fails."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import uvloop

from appliance.common.split_config import PrefillHost
from appliance.gateway.fleet.host_addresses import HostAddresses
from appliance.gateway.fleet.prefill_call import Dialer
from tests.appliance.gateway.front.test_listener import contexts

TURNS = (*range(12), None)
"""Turns of the loop after which the call is given up; None: when the other host has the first bytes of a handshake."""

END_S = 10.0


@dataclass
class Callers:
    """What the other host sees of those who call it."""

    accepted: int = 0
    called: threading.Event = field(default_factory=threading.Event)
    """Set when one has begun to speak."""
    answers: threading.Event = field(default_factory=threading.Event)
    """What is waited for before a handshake is answered."""
    answered: threading.Event = field(default_factory=threading.Event)
    """Set when one is."""
    ends: list[bytes] = field(default_factory=list)
    """What came of each over TLS: nothing, where it has gone."""

    def serve(self, bound: socket.socket, context: ssl.SSLContext) -> None:
        """Shake hands with each, and read."""
        while True:
            try:
                accepted, _ = bound.accept()
            except OSError:
                return
            self.accepted += 1
            data = b""
            with contextlib.suppress(OSError), accepted:
                data = self._shake(accepted, context)
            self.ends.append(data)

    def _shake(self, accepted: socket.socket, context: ssl.SSLContext) -> bytes:
        accepted.recv(1, socket.MSG_PEEK)
        self.called.set()
        self.answers.wait(END_S)
        with context.wrap_socket(accepted, server_side=True, do_handshake_on_connect=False) as secured:
            secured.setblocking(False)
            with contextlib.suppress(ssl.SSLWantReadError):
                secured.do_handshake()
            self.answered.set()
            secured.settimeout(END_S)
            secured.do_handshake()
            return secured.recv(1)


async def given_up(turns: int | None, tls: tuple[ssl.SSLContext, ssl.SSLContext]) -> tuple[list[str], Callers]:
    """Give a call up after so many turns, in the moment in which the other host's answer is there."""
    problems, callers = list[str](), Callers()
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: problems.append(str(context)))
    with socket.create_server(("127.0.0.1", 0)) as bound:
        threading.Thread(target=callers.serve, args=(bound, tls[0]), daemon=True).start()
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        host = PrefillHost(host="a", address=address, identity="spiffe://fleet.example/a")
        task = asyncio.ensure_future(Dialer(tls[1], HostAddresses()).open(host))
        while turns is None and not callers.called.is_set():
            await asyncio.sleep(0)
        for _ in range(turns or 0):
            await asyncio.sleep(0)
        callers.answers.set()
        # The loop stands still, as a busy machine's: time is over and the answer there in one turn.
        callers.answered.wait(END_S if turns is None else 0.01)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            _, writer = await task
            writer.transport.abort()
        until = time.monotonic() + END_S
        while len(callers.ends) < callers.accepted:
            assert time.monotonic() < until, "the other host sees no end of the connection"
            await asyncio.sleep(0.005)
        for _ in range(5):
            await asyncio.sleep(0)
        bound.shutdown(socket.SHUT_RDWR)
    return problems, callers


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["stock", "uvloop"])
def test_a_call_that_is_given_up_leaves_nothing(tmp_path: Path, loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """However far a connection has come when its call is given up, the other host sees its end, no byte comes over it,
    and the event loop has nothing to report. Control: some were given up behind the other host's accept."""
    tls, accepted = contexts(tmp_path), 0
    for turns in TURNS:
        with asyncio.Runner(loop_factory=loop) as runner:
            problems, callers = runner.run(given_up(turns, tls))
        assert problems == [], turns
        assert set(callers.ends) <= {b""}
        accepted += callers.accepted
    assert accepted
