"""Send one GET over an open connection and read a bounded answer. No redirect is followed; callers set the deadline."""

from __future__ import annotations

import asyncio
from http import HTTPStatus

import h11

MAX_HEAD_BYTES = 32 << 10
"""Most bytes of an answer's head."""

PIECE_BYTES = 16 << 10


class GetError(Exception):
    """The answer is not to be used; the message says why."""


async def get(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, target: str, max_bytes: int
) -> bytes:
    """Return the body of the answer, a JSON document of status 200. The connection is of no use afterwards.

    Args:
        reader: of the connection.
        writer: of the connection.
        host: what the header ``host`` says.
        target: path and query.
        max_bytes: most bytes of the body.

    Raises:
        GetError: the status is another one, the answer ends too early, is no HTTP, or has more bytes.
        OSError: the connection broke.
    """
    try:
        return await _exchange(reader, writer, host, target, max_bytes)
    except h11.RemoteProtocolError:
        raise GetError("it is no whole answer of HTTP") from None


async def _exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, target: str, max_bytes: int
) -> bytes:
    client = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
    headers = [("host", host), ("accept", "application/json"), ("connection", "close")]
    request = client.send(h11.Request(method="GET", target=target, headers=headers))
    writer.write((request or b"") + (client.send(h11.EndOfMessage()) or b""))
    body = bytearray()
    while True:
        event = client.next_event()
        if event is h11.NEED_DATA:
            client.receive_data(await reader.read(PIECE_BYTES))
        elif isinstance(event, h11.Response):
            if event.status_code != HTTPStatus.OK:
                raise GetError(f"its status is {event.status_code}")
        elif isinstance(event, h11.Data):
            body += event.data
            if len(body) > max_bytes:
                raise GetError(f"it has more than {max_bytes} bytes")
        elif isinstance(event, h11.EndOfMessage):
            return bytes(body)
        elif not isinstance(event, h11.InformationalResponse):
            raise GetError("it ends too early")
        # A hundred kilobytes that are here already can be twenty thousand pieces: tenants are served between them.
        await asyncio.sleep(0)
