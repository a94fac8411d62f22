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
from typing import Any

import pytest
import uvloop

from appliance.common.split_config import PrefillHost
from appliance.gateway.fleet.host_addresses import HostAddresses
from appliance.gateway.fleet.prefill_call import Dialer
from tests.appliance.gateway.front.test_listener import contexts

TURNS = (0, 1, *(2, 3) * 10, 4, 6, 9, 20, 40, 200, 400)
"""Turns of the loop after which a call is given up. In the second and third a connection is made on Linux; where its
maker was cancelled there, uvloop failed now and then."""

STANDS_S = 0.01
"""Seconds for which the loop stands still then, as a busy machine's, so that much happens to it in one turn."""

END_S = 10.0


@dataclass
class Callers:
    """What the other host sees of those who call it."""

    accepted: int = 0
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
            with contextlib.suppress(OSError), accepted, context.wrap_socket(accepted, server_side=True) as secured:
                data = secured.recv(1)
            self.ends.append(data)


async def given_up(turns: int, tls: tuple[ssl.SSLContext, ssl.SSLContext]) -> tuple[list[str], Callers]:
    """Give a call up after so many turns."""
    problems, callers = list[str](), Callers()
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: problems.append(str(context)))
    with socket.create_server(("127.0.0.1", 0)) as bound:
        threading.Thread(target=callers.serve, args=(bound, tls[0]), daemon=True).start()
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        host = PrefillHost(host="a", address=address, identity="spiffe://fleet.example/a")
        task = asyncio.ensure_future(Dialer(tls[1], HostAddresses()).open(host))
        for _ in range(turns):
            await asyncio.sleep(0)
        time.sleep(STANDS_S)  # noqa: ASYNC251 - the loop is to stand still
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            _, writer = await task
            writer.transport.abort()
        until = time.monotonic() + END_S
        while len(callers.ends) < callers.accepted or len(asyncio.all_tasks()) > 1:
            assert time.monotonic() < until, "something is left of the connection"
            await asyncio.sleep(0.005)
        for _ in range(5):
            await asyncio.sleep(0)
        bound.shutdown(socket.SHUT_RDWR)
    return problems, callers


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["stock", "uvloop"])
def test_a_call_that_is_given_up_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """However far a connection has come when its call is given up, the other host sees its end, no byte comes over it,
    the event loop has nothing to report, and no maker of a connection was cancelled. Control: some were given up behind
    the other host's accept."""
    tls, accepted = contexts(tmp_path), 0
    ends, real = list[str](), asyncio.open_connection

    async def noted(*arguments: Any, **named: Any) -> Any:
        try:
            made = await real(*arguments, **named)
        except BaseException as error:
            ends.append(type(error).__name__)
            raise
        ends.append("made")
        return made

    monkeypatch.setattr(asyncio, "open_connection", noted)
    for turns in TURNS:
        with asyncio.Runner(loop_factory=loop) as runner:
            problems, callers = runner.run(given_up(turns, tls))
        assert problems == [], turns
        assert set(callers.ends) <= {b""}
        accepted += callers.accepted
    assert accepted
    assert ends and "CancelledError" not in ends
