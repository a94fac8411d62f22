"""HTTP/2 frames by hand, for what no client library sends (RFC 9113, section 6)."""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass

from tests.appliance.gateway.front.support import Running

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = range(10)
END_STREAM, END_HEADERS, ACK = 1, 4, 1
ENHANCE_YOUR_CALM = 11


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def literal(name: str, value: str, *, indexed: bool = False) -> bytes:
    """One header in literal form; ``indexed`` puts it into the dynamic table (RFC 7541, section 6.2)."""
    parts = [_integer(len(text)) + text.encode() for text in (name, value)]
    return (b"\x40" if indexed else b"\x00") + b"".join(parts)


def _integer(value: int) -> bytes:
    if value < 127:
        return bytes([value])
    out, value = b"\x7f", value - 127
    while value >= 128:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def head(path: str, *more: tuple[str, str], method: str = "POST", media: str = "application/grpc") -> bytes:
    """The header block of a call."""
    rows = [(":method", method), (":scheme", "http"), (":path", path), (":authority", "a"), ("te", "trailers")]
    return b"".join(literal(*row) for row in [*rows, ("content-type", media), *more])


@dataclass
class Frame:
    """A frame that was received."""

    kind: int
    flags: int
    stream: int
    payload: bytes


class Peer:
    """A connection that says what it is told to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, running: Running, *, preface: bool = True, address: str = "127.0.0.1") -> Peer:
        """Connect to the gRPC port from this address."""
        port = running.front_ends.grpc_port
        peer = cls(*await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0)))
        if preface:
            peer.say(PREFACE + frame(SETTINGS, 0, 0))
        return peer

    def say(self, data: bytes) -> None:
        """Send bytes."""
        self.writer.write(data)

    async def next(self) -> Frame | None:
        """The next frame; None behind the last one."""
        try:
            start = await self.reader.readexactly(9)
            payload = await self.reader.readexactly(int.from_bytes(start[:3]))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        return Frame(start[3], start[4], int.from_bytes(start[5:]) & 0x7FFFFFFF, payload)

    async def until(self, kind: int) -> Frame:
        """The next frame of this kind."""
        async with asyncio.timeout(20):
            while (found := await self.next()) is not None:
                if found.kind == kind:
                    return found
        raise AssertionError(f"no frame of kind {kind} came")

    async def farewell(self) -> int | None:
        """The error code of the last GOAWAY before the connection ends; None where none was received."""
        code = None
        async with asyncio.timeout(20):
            while (found := await self.next()) is not None:
                if found.kind == GOAWAY:
                    code = int.from_bytes(found.payload[4:8])
        return code

    def close(self) -> None:
        """Close the connection."""
        self.writer.close()
