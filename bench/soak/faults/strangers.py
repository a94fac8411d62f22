"""Clients that misbehave: they do not read, do not speak, speak nonsense, or break off."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Sequence

from appliance.selftest.raw_http import request_bytes
from bench.soak.ground import Fault, Ground
from bench.soak.questions import BODIES, MARK_BITS, encoded

CROWD = 24
ANSWER_S = 0.2
"""Patience with an answer to nonsense; half a head waits for its other half."""

RESET = struct.pack("ii", 1, 0)
"""SO_LINGER that makes a close a reset (socket(7))."""


def _request(ground: Ground) -> bytes:
    body = {**BODIES["stream"], "max_tokens": 400}
    proof = ("authorization", f"Bearer {ground.served.keys['alpha']}")
    return request_bytes("POST", "/v1/completions", encoded(body, 1 + ground.draw.getrandbits(MARK_BITS)), proof)


async def _connect(port: int) -> socket.socket:
    loop = asyncio.get_running_loop()
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    sock.setblocking(False)
    await loop.sock_connect(sock, ("127.0.0.1", port))
    return sock


def _is_open(sock: socket.socket) -> bool:
    """Whether the gateway still holds the other end; what it sent stays unread."""
    try:
        return sock.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def _crowd(held: Sequence[socket.socket]) -> str:
    # Not by the gateway's own count, which the load's connections change meanwhile.
    still = sum(map(_is_open, held))
    return f"the gateway holds {still} of {len(held)} connections" if still >= CROWD // 2 else ""


async def _deaf(ground: Ground) -> str:
    """Streams that nobody reads."""
    with contextlib.ExitStack() as stack:
        held = []
        for _ in range(CROWD):
            held.append(stack.enter_context(contextlib.closing(await _connect(ground.served.http_port))))
            await asyncio.get_running_loop().sock_sendall(held[-1], _request(ground))
        await ground.last(1.0, 2.0)
        found = _crowd(held)
        await ground.last(2.0, 3.0)
    return found


async def _mute(ground: Ground) -> str:
    """Connections on which nothing, half a head, or half a body comes."""
    whole = _request(ground)
    with contextlib.ExitStack() as stack:
        held = []
        for port in (ground.served.http_port, ground.served.admin_port, int(ground.served.grpc.rpartition(":")[2])):
            for cut in (0, 9, len(whole) // 2, len(whole) - 1):
                for _ in range(CROWD // 8):
                    held.append(stack.enter_context(contextlib.closing(await _connect(port))))
                    with contextlib.suppress(OSError):
                        await asyncio.get_running_loop().sock_sendall(held[-1], whole[:cut])
        await ground.last(1.0, 2.0)
        found = _crowd(held)
        await ground.last(2.0, 3.0)
    return found


async def _breaking(ground: Ground) -> str:
    """Resets in the middle of answers."""
    loop = asyncio.get_running_loop()
    for _ in range(4):
        socks = [await _connect(ground.served.http_port) for _ in range(CROWD)]
        for sock in socks:
            await loop.sock_sendall(sock, _request(ground))
        await ground.last(0.02, 0.4)
        for sock in socks:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            sock.close()
        await ground.last(0.1, 0.5)
    return f"{4 * CROWD} resets"


async def _nonsense(ground: Ground) -> str:
    """Bytes of no protocol at every door."""
    loop, refused = asyncio.get_running_loop(), 0
    for port in (ground.served.http_port, ground.served.admin_port, int(ground.served.grpc.rpartition(":")[2])):
        for _ in range(CROWD):
            with contextlib.closing(await _connect(port)) as sock, contextlib.suppress(OSError, TimeoutError):
                await loop.sock_sendall(sock, ground.draw.randbytes(ground.draw.randrange(64, 4_000)))
                async with asyncio.timeout(ANSWER_S):
                    await loop.sock_recv(sock, 4_096)
                    refused += 1
    await ground.last(0.5, 1.5)
    return f"{refused} were told so, or let go" if refused else ""


FAULTS = (
    Fault("clients-deaf", "streams that nobody reads", _deaf),
    Fault("clients-mute", "connections that begin and do not go on", _mute),
    Fault("clients-breaking", "connections reset in the middle of answers", _breaking),
    Fault("clients-nonsense", "random bytes at every door", _nonsense),
)
