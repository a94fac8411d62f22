"""One request to an external model's endpoint over a connection of its own: events as they come, everything bounded.

TLS is verified, redirections are refused, and only an answer of status 200 that streams events is read. The connection
has ``CONNECT_S`` seconds, everything after it those of the caller's ``asyncio.timeout``. Leaving the block closes the
connection at once, so that the cluster computes nothing more for it.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import h11

from appliance.common.external_config import ExternalConfig
from appliance.common.strict_json import JsonError, parse_json
from appliance.gateway.external.completion import MAX_EVENT_CONTAINERS, WrongAnswerError

CONNECT_S = 5.0
"""Seconds for the look-up of the name, the connection and the handshake of TLS."""

MAX_HEAD_BYTES = 32 << 10
"""Most bytes of an answer's head."""

PIECE_BYTES = 16 << 10
"""Bytes taken from a connection before other work gets its turn."""

MAX_KEY_BYTES = 8 << 10
"""Most bytes of the file with the endpoint's key."""

MAX_TOLD_CHARS = 200
"""Characters of an endpoint's refusal that the log has."""

MAX_REFUSAL_BYTES = 16 << 10
"""Bytes of a refusal that are read."""

_EVENT_STREAM = "text/event-stream"
_DONE = b"[DONE]"


class EndpointError(Exception):
    """The endpoint does not serve the request; the message is for the operator. ``again``: whether it has seen nothing
    of the request, which may be sent once more."""

    def __init__(self, message: str, *, status: int = 0, again: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.again = again

    @property
    def busy(self) -> bool:
        """Whether it takes no more requests now."""
        return self.status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)


@dataclass(frozen=True)
class Endpoint:
    """Where a model is computed, and what connections to it need."""

    config: ExternalConfig

    @cached_property
    def host(self) -> str:
        """Host name or address."""
        return urlsplit(self.config.url).hostname or ""

    @cached_property
    def port(self) -> int:
        """Port of the endpoint."""
        parts = urlsplit(self.config.url)
        return parts.port or (443 if parts.scheme == "https" else 80)

    @cached_property
    def target(self) -> str:
        """Path of the resource."""
        return urlsplit(self.config.url).path.rstrip("/") + "/completions"

    @cached_property
    def context(self) -> ssl.SSLContext | None:
        """What connections are verified with; None without TLS. Reads the authorities.

        Raises:
            OSError: they cannot be read.
        """
        if urlsplit(self.config.url).scheme != "https":
            return None
        return ssl.create_default_context(cafile=self.config.ca_file)

    def key(self) -> str:
        """Return the endpoint's key, empty for none. Reads its file.

        Raises:
            EndpointError: it cannot be read, or holds no key.
        """
        path = self.config.api_key_file
        return "" if path is None else read_key(path)


def read_key(path: Path) -> str:
    """Return the key in a file.

    Raises:
        EndpointError: it cannot be read, or holds no key.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_KEY_BYTES + 1)
    except OSError as error:
        raise EndpointError(f"the key in {path} cannot be read: {error.strerror}") from None
    try:
        key = data.decode("ascii").strip()
    except UnicodeDecodeError:
        key = ""
    if not key or len(data) > MAX_KEY_BYTES or not key.isprintable() or " " in key:
        raise EndpointError(f"{path} holds no key: one line of printable ASCII is needed")
    return key


@asynccontextmanager
async def asked(
    endpoint: Endpoint, body: Mapping[str, Any], *, most_bytes: int, most_events: int
) -> AsyncIterator[AsyncGenerator[Any]]:
    """Ask an endpoint; the block gets its events, which end where the endpoint says that it has ended.

    Args:
        endpoint: the endpoint.
        body: JSON of the request.
        most_bytes: most bytes of one event.
        most_events: most lines of the answer, empty ones left out.

    Raises:
        EndpointError: it cannot be reached, refuses, or breaks off; at any point of the block.
        WrongAnswerError: its answer is none, or exceeds a bound; at any point of the block.
    """
    reader, writer = await _connect(endpoint)
    try:
        connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
        events = _Events(connection, reader, most_bytes, most_events)
        key = await asyncio.to_thread(endpoint.key)
        writer.write(_request(connection, endpoint, json.dumps(body).encode(), key))
        await writer.drain()
        await events.begin()
        yield events.each()
    except h11.RemoteProtocolError as error:
        raise WrongAnswerError(f"it does not speak HTTP/1.1: {error}") from None
    except OSError as error:
        raise EndpointError(f"the connection broke: {error}") from None
    finally:
        writer.transport.abort()  # A goodbye of TLS could be waited for without end.


async def _connect(endpoint: Endpoint) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    try:
        context = await asyncio.to_thread(lambda: endpoint.context)
        async with asyncio.timeout(CONNECT_S):
            return await asyncio.open_connection(endpoint.host, endpoint.port, ssl=context, limit=PIECE_BYTES)
    except TimeoutError:
        raise EndpointError(f"no connection within {CONNECT_S:g} s") from None
    except (OSError, ValueError) as error:  # An ssl.SSLError is an OSError.
        raise EndpointError(f"no connection: {error}", again=isinstance(error, ConnectionError)) from None


def _request(connection: h11.Connection, endpoint: Endpoint, body: bytes, key: str) -> bytes:
    headers = [
        ("host", urlsplit(endpoint.config.url).netloc),
        ("content-type", "application/json"),
        ("accept", _EVENT_STREAM),
        ("accept-encoding", "identity"),
        ("content-length", str(len(body))),
        ("connection", "close"),
    ]
    if key:
        headers.append(("authorization", f"Bearer {key}"))
    head = connection.send(h11.Request(method="POST", target=endpoint.target, headers=headers)) or b""
    return head + (connection.send(h11.Data(data=body)) or b"") + (connection.send(h11.EndOfMessage()) or b"")


class _Events:
    """Events of one answer."""

    def __init__(
        self, connection: h11.Connection, reader: asyncio.StreamReader, most_bytes: int, most_events: int
    ) -> None:
        self._connection = connection
        self._reader = reader
        self._most_bytes = most_bytes
        self._left = most_events

    async def begin(self) -> None:
        """Read the head of the answer.

        Raises:
            EndpointError: it is a refusal.
            WrongAnswerError: it is no stream of events.
        """
        head = await self._next()
        while isinstance(head, h11.InformationalResponse):
            self._count()
            head = await self._next()
        if not isinstance(head, h11.Response):
            raise EndpointError("it closed the connection without an answer")
        status = head.status_code
        if status != HTTPStatus.OK:
            raise EndpointError(f"it answers {status}{await self._refusal(status)}", status=status)
        kinds = [value for name, value in head.headers if name == b"content-type"]
        kind = kinds[0].decode("latin-1") if kinds else ""
        if kind.partition(";")[0].strip().lower() != _EVENT_STREAM:
            raise WrongAnswerError("its answer is no stream of events")

    async def each(self) -> AsyncGenerator[Any]:
        """Yield the events up to the end that the endpoint says.

        Raises:
            EndpointError: the answer was cut.
            WrongAnswerError: it is malformed or exceeds a bound.
        """
        rest = b""
        while isinstance(event := await self._next(), h11.Data):
            *lines, rest = (rest + bytes(event.data)).split(b"\n")
            if max(len(rest), *map(len, lines), 0) > self._most_bytes:
                raise WrongAnswerError(f"one of its events has more than {self._most_bytes} bytes")
            for line in lines:
                value = self._value(line.rstrip(b"\r"))
                if value == _DONE:
                    return
                if value:
                    yield _parsed(value)
        raise EndpointError("it broke off before the end of its answer")

    def _value(self, line: bytes) -> bytes:
        """Return the data of a line, empty for none."""
        if not line:
            return b""
        self._count()
        name, _, value = line.partition(b":")
        return value.strip() if name == b"data" else b""

    def _count(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise WrongAnswerError("its answer has more events than its tokens can have")

    async def _refusal(self, status: int) -> str:
        """Return what a refusal says, for the log."""
        if HTTPStatus.MULTIPLE_CHOICES <= status < HTTPStatus.BAD_REQUEST:
            return ", and redirections are not followed"
        said = b""
        while len(said) < MAX_REFUSAL_BYTES and isinstance(event := await self._next(), h11.Data):
            said += bytes(event.data)
        text = "".join(one if one.isprintable() else " " for one in said.decode("utf-8", "replace"))
        return f": {text[:MAX_TOLD_CHARS]}" if text else ""

    async def _next(self) -> object:
        """Return h11's next event."""
        while (event := self._connection.next_event()) is h11.NEED_DATA:
            piece = await self._reader.read(PIECE_BYTES)
            self._connection.receive_data(piece)
            if not piece:
                return self._last()
            await asyncio.sleep(0)  # A flood is read in turns with everything else.
        return event

    def _last(self) -> object:
        """Return what the end of the connection means: the end of an answer without a length, or a cut."""
        try:
            return self._connection.next_event()
        except h11.RemoteProtocolError:
            raise EndpointError("it closed the connection in the middle of its answer") from None


def _parsed(value: bytes) -> Any:
    try:
        return parse_json(value, max_containers=MAX_EVENT_CONTAINERS)
    except JsonError as error:
        raise WrongAnswerError(f"it gives an event that is not acceptable JSON: {error}") from None
