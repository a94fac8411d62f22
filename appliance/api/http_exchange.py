"""One HTTP request and the answer to it, over ASGI: headers in, JSON or an event stream out."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from starlette.datastructures import Headers

from appliance.api import http_headers, sse
from appliance.api.http_body import Receive, drain, has_body
from appliance.api.openai_objects import error_object
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

    async def stream(self, request_id: str, headers: http_headers.Headers) -> None:
        """Begin an event stream."""
        self.streaming = True
        rows = [
            ("content-type", sse.CONTENT_TYPE),
            ("cache-control", "no-store"),
            ("x-accel-buffering", "no"),
            *headers,
        ]
        await self._start(200, rows, request_id)
        self.last_sent = time.monotonic()

    async def write(self, chunk: bytes) -> None:
        """Send one event; waits while the client reads more slowly than we write."""
        self.sending = True
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
        self.sending = False
        self.last_sent = time.monotonic()

    def note_sent(self) -> None:
        """An event was written past this exchange."""
        self.last_sent = time.monotonic()

    async def end(self, last: bytes = b"") -> None:
        """End an event stream with these last events: they leave in one piece with the end."""
        self.sending = True  # for good: no keepalive may follow the end
        await self._send({"type": "http.response.body", "body": last, "more_body": False})

    async def fail(self, error: ApplianceError, request_id: str, headers: http_headers.Headers) -> None:
        """Tell the client: a JSON error, or inside a stream an error event and no end mark."""
        if self.streaming:
            await self.end(sse.event(error_object(error)))
            return
        rows = [*http_headers.of_error(error), *headers]
        await self.answer(error.wire.http, error_object(error), request_id, rows)

    async def _start(self, status: int, rows: http_headers.Headers, request_id: str) -> None:
        took_ms = int((time.monotonic() - self._begun) * 1_000)
        rows = [*rows, ("x-request-id", request_id), ("openai-processing-ms", str(took_ms))]
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [(name.encode("ascii"), value.encode("ascii")) for name, value in rows],
            }
        )
