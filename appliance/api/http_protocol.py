"""uvicorn's HTTP/1.1 protocol with the limits it lacks: size and count of headers, time to send them, connections.

The parser (llhttp) bounds nothing: a request line or a header may grow without end, and a socket may stay silent for
ever. Pipelining is refused too: no client of ours uses it, and it lets one connection queue work that nobody counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from appliance.api.connections import Connections
from appliance.api.http_settings import MAX_HEAD_BYTES, MAX_HEADERS, HttpSettings

_REFUSAL = '{"error":{"message":"%s","type":"invalid_request_error","param":null,"code":"invalid_value"}}'
_STATUS = {400: "Bad Request", 431: "Request Header Fields Too Large"}


class _StopParsingError(Exception):
    """Stops the parser inside a callback; never seen outside."""


class GuardedProtocol(HttpToolsProtocol):
    """One connection. An answer that has begun chunked can be gone on with by ``write_chunk``, past ASGI."""

    EXTENSION = "athanor.connection"
    """Key of the connection among the ASGI scope's extensions."""

    def __init__(self, settings: HttpSettings, counts: Connections, **options: Any) -> None:
        super().__init__(**options)
        self._settings = settings
        self._counts = counts
        self._counted: dict[str, str] = {}
        self._head_timer: asyncio.TimerHandle | None = None
        self._answering = False
        self._in_head = True
        self._head_bytes = 0
        self._head_fields = 0
        self._too_large = False
        self.on_writable: Callable[[], None] | None = None
        """Called each time that the peer has read so much that there is room again."""

    @property
    def writable(self) -> bool:
        """Whether the bytes that the peer has not taken are few."""
        return not self.flow.write_paused

    def write_chunk(self, data: bytes) -> None:
        """Write one chunk of a body (RFC 9112, section 7.1); after the peer's end nothing."""
        if not self.transport.is_closing():
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def resume_writing(self) -> None:
        """There is room again."""
        super().resume_writing()
        if self.on_writable is not None:
            self.on_writable()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection in, or close it when there are too many."""
        super().connection_made(transport)  # type: ignore[arg-type]
        address = self.client[0] if self.client else ""
        if len(self.connections) > self._settings.max_connections or not self._count("address", address):
            self.transport.abort()
            return
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timer with the connection."""
        self._disarm()
        for kind, name in self._counted.items():
            self._counts.leave(kind, name)
        self._counted.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser, counting while a head is incomplete."""
        if not self._answering and self._head_timer is None:
            # The next request's head, or the tail of a body that was refused: either must end soon.
            self._in_head = True
            self._head_bytes = 0
            self._arm()
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            self._too_large = True
            self.send_400_response("")

    def on_message_begin(self) -> None:
        """A request begins; one that comes before the last one's answer ends the connection."""
        if self._answering:
            self.transport.abort()
            raise _StopParsingError
        self._in_head = True
        self._head_fields = 0
        super().on_message_begin()
        self.scope["extensions"] = {self.EXTENSION: self}  # type: ignore[dict-item]

    def on_url(self, url: bytes) -> None:
        """Part of the request target."""
        super().on_url(url)
        self._check_head(len(self.url), 0)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header, or one trailer after the body."""
        self._check_head(len(name) + len(value), 1)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is complete: the body has its own limits."""
        self._in_head = False
        self._answering = True
        self._disarm()
        super().on_headers_complete()
        if self._counts.ending:
            self.cycle.keep_alive = False

    def end_after_answer(self) -> None:
        """Close the connection behind the answer that it waits for, if it waits for one."""
        if self._answering:
            self.cycle.keep_alive = False

    def on_response_complete(self) -> None:
        """The answer is out: the next request may begin."""
        self._answering = False
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what cannot be parsed, and close."""
        if self.transport.is_closing():
            return
        status = 431 if self._too_large else 400
        text = "the request's headers are too large" if self._too_large else "not a valid HTTP request"
        body = _REFUSAL % text
        self.transport.write(
            (
                f"HTTP/1.1 {status} {_STATUS[status]}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n{body}"
            ).encode("ascii")
        )
        self.transport.close()

    def claim(self, tenant: str) -> bool:
        """Count the connection as this tenant's; False when the tenant has as many as it may."""
        return self._counted.get("tenant") == tenant or self._count("tenant", tenant)

    def _count(self, kind: str, name: str) -> bool:
        before = self._counted.pop(kind, None)
        if before is not None:
            self._counts.leave(kind, before)
        entered = self._counts.enter(kind, name)
        if entered:
            self._counted[kind] = name
        return entered

    def _check_head(self, size: int, fields: int) -> None:
        self._head_fields += fields
        if size > MAX_HEAD_BYTES or self._head_fields > MAX_HEADERS:
            self._too_large = True
            raise _StopParsingError

    def _arm(self) -> None:
        self._head_timer = self.loop.call_later(self._settings.head_timeout_s, self._head_timeout)

    def _disarm(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_timeout(self) -> None:
        self._head_timer = None
        self.transport.abort()


def connection_of(scope: Mapping[str, Any]) -> GuardedProtocol | None:
    """The connection that an ASGI scope came over; None where another server made it."""
    found = scope.get("extensions", {}).get(GuardedProtocol.EXTENSION)
    return found if isinstance(found, GuardedProtocol) else None
