"""One HTTP request and the answer to it, over ASGI: headers in, JSON or an event stream out."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from starlette.datastructures import Headers

from appliance.api import http_headers, sse
from appliance.api.http_body import ClientGoneError, Receive, drain, has_body
from appliance.api.http_protocol import connection_of
from appliance.api.openai_objects import error_object
from appliance.api.paced import PacedEvents
from appliance.api.padding import Padding, Ticks
from appliance.errors import ApplianceError
from appliance.request import CallContext, Principal

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Exchange:
    """What one handler works with. An answer is begun once and, streamed, ended by its handler or by ``fail``."""

    def __init__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        self.headers = Headers(raw=list(scope["headers"]))
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.scope = scope
        self.receive = receive
        self.context = CallContext(route=f"{self.method} *", front_end="http")
        self.principal: Principal | None = None
        self.request_id: str | None = None
        """Set when a session begins: from then on the session traces its own errors."""
        self.body_pending = has_body(self.headers)
        """Whether the client may still be sending."""
        self.streaming = False
        self.last_sent = 0.0
        self.sending = False
        self.padding: Padding | None = None
        """Set for a tenant whose answers shall tell nothing by their sizes and moments."""
        self.until: float | None = None
        """When the caller no longer wants the answer, in seconds of ``time.monotonic``."""
        self.computed = False
        """Whether an engine has worked for the answer: its moment then tells how long."""
        self.paced: PacedEvents | None = None
        """The padded stream, once begun."""
        self._hurry = asyncio.Event()
        self._send = send
        self._begun = time.monotonic()

    @property
    def tenant(self) -> str | None:
        """The caller's tenant, once known."""
        return self.principal.tenant if self.principal is not None else None

    async def answer(
        self, status: int, document: Any, request_id: str, headers: http_headers.Headers | None = None
    ) -> None:
        """Send one JSON document, or the bytes of one, as the whole answer."""
        body = document if isinstance(document, bytes) else json.dumps(document, separators=(",", ":")).encode("ascii")
        if self.padding is not None:
            body = self.padding.body(body)
            await self._moment(self.padding)
        rows = [("content-type", "application/json"), ("content-length", str(len(body))), *(headers or [])]
        closing = self.body_pending
        if closing:
            rows.append(("connection", "close"))
        await self._start(status, rows, request_id)
        if closing:
            await self._send({"type": "http.response.body", "body": body, "more_body": True})
            await drain(self.receive)
            body = b""
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def stream(self, request_id: str, headers: http_headers.Headers, *, record_bytes: int = 0) -> None:
        """Begin an event stream; of records of this size, where the tenant's answers are padded."""
        ticks = None
        if self.padding is not None:
            ticks = Ticks(self._begun, self.padding.tick_s)
            await ticks.next()
        self.streaming = True
        rows = [
            ("content-type", sse.CONTENT_TYPE),
            ("cache-control", "no-store"),
            ("x-accel-buffering", "no"),
            *headers,
        ]
        await self._start(200, rows, request_id)
        self.last_sent = time.monotonic()
        if self.padding is not None and ticks is not None:
            self.paced = PacedEvents(self.padding, record_bytes, ticks, self._write_record, self.until)
            if self._hurry.is_set():
                self.paced.hurry()

    async def write(self, chunk: bytes) -> None:
        """Send one event; waits while the client reads more slowly than we write."""
        await (self.paced.add(chunk) if self.paced is not None else self._write(chunk))

    async def _write(self, chunk: bytes) -> None:
        self.sending = True
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
        self.sending = False
        self.last_sent = time.monotonic()

    async def _write_record(self, record: bytes) -> None:
        await self._write(record)
        connection = connection_of(self.scope)
        if connection is not None and connection.transport.is_closing():
            raise ClientGoneError

    def note_sent(self) -> None:
        """An event was written past this exchange."""
        self.last_sent = time.monotonic()

    async def end(self, last: bytes = b"") -> None:
        """End an event stream with these last events: they leave in one piece with the end."""
        if self.paced is not None:
            last = await self.paced.end(last)
        self.sending = True  # for good: no keepalive may follow the end
        await self._send({"type": "http.response.body", "body": last, "more_body": False})

    async def fail(self, error: ApplianceError, request_id: str, headers: http_headers.Headers) -> None:
        """Tell the client: a JSON error, or inside a stream an error event and no end mark."""
        if self.streaming:
            await self.end(sse.event(error_object(error)))
            return
        rows = [*http_headers.of_error(error), *headers]
        await self.answer(error.wire.http, error_object(error), request_id, rows)

    def hurry(self) -> None:
        """The appliance stops: keep nobody waiting for the sake of padding."""
        self._hurry.set()
        if self.paced is not None:
            self.paced.hurry()

    def close(self) -> None:
        """The exchange is over, however it ended."""
        if self.paced is not None:
            self.paced.stop()

    async def _moment(self, padding: Padding) -> None:
        """Wait until a padded answer may leave: a tick, one of few where an engine has worked for it."""
        ticks = Ticks(self._begun, padding.tick_s).passed
        at = self._begun + padding.tick_s * (padding.records(ticks) if self.computed else ticks)
        if self.until is not None:
            at = min(at, self.until)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(at - time.monotonic()):
                await self._hurry.wait()

    async def _start(self, status: int, rows: http_headers.Headers, request_id: str) -> None:
        took_ms = int((time.monotonic() - self._begun) * 1_000)
        rows = [*rows, ("x-request-id", request_id), ("openai-processing-ms", str(took_ms))]
        if self.padding is not None:
            rows = self.padding.head(rows)
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [(name.encode("ascii"), value.encode("ascii")) for name, value in rows],
            }
        )
