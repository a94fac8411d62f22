"""One HTTP request and the answer to it: headers in, JSON or an event stream out."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from appliance.common.errors import ApplianceError
from appliance.gateway.front.padding import Padding, Ticks
from appliance.gateway.generate_request import CallContext, Principal
from appliance.gateway.http import header_fields, sse
from appliance.gateway.http.body import Body, ClientGoneError, has_body
from appliance.gateway.http.head import RequestHead
from appliance.gateway.http.openai_objects import ERRORS
from appliance.gateway.http.paced import PacedEvents
from appliance.gateway.http.protocol import HttpConnection

WRITE_BYTES = 64 << 10
"""Bytes of content written at a time."""

LOOKS = 8
"""How often silence is looked at in the time after which a keepalive is sent."""


class Exchange:
    """What one handler works with. An answer is begun once and, streamed, ended by its handler or by ``fail``."""

    def __init__(
        self, connection: HttpConnection, head: RequestHead, body: Body, everywhere: header_fields.Headers | None = None
    ) -> None:
        """``everywhere``: headers that any answer to this request has."""
        self.connection = connection
        self.head = head
        self.body = body
        self.context = CallContext(route=f"{head.method} *", front_end="http")
        self.errors = ERRORS
        """The form of errors of the API that is asked."""
        self.principal: Principal | None = None
        self.authenticate: Callable[[], object] = lambda: None
        """Looks again whether the caller's credential holds and has the scope that is asked; raises where not."""
        self.request_id: str | None = None
        """Set when a session begins: from then on the session traces its own errors."""
        self.body_pending = has_body(head)
        """Whether the body was left unread, so that no other request can follow."""
        self.streaming = False
        self.quiet = 0
        """Looks since something was last written; a write past this exchange sets it to 0."""
        self.padding: Padding | None = None
        """Set for a tenant whose answers must not show anything by their sizes and moments."""
        self.until: float | None = None
        """Deadline after which the caller has no use for the answer, in seconds of ``time.monotonic``."""
        self.computed = False
        """Whether an engine has worked for the answer; the moment of the answer then shows how long."""
        self.everywhere = everywhere or []
        """Headers that any answer to this request has."""
        self.paced: PacedEvents | None = None
        """The padded stream, once begun."""
        self._downloading = False
        self._hurry = asyncio.Event()
        self._look: asyncio.TimerHandle | None = None
        self._begun = time.monotonic()

    @property
    def tenant(self) -> str | None:
        """The caller's tenant, once known."""
        return self.principal.tenant if self.principal is not None else None

    async def answer(
        self, status: int, document: Any, request_id: str, headers: header_fields.Headers | None = None
    ) -> None:
        """Send one JSON document, or the bytes of one, as the whole answer."""
        body = document if isinstance(document, bytes) else json.dumps(document, separators=(",", ":")).encode("ascii")
        if self.padding is not None:
            body = self.padding.body(body)
            await self._moment(self.padding)
        rows = [("content-type", "application/json"), ("content-length", str(len(body))), *(headers or [])]
        if self.body_pending:
            self.connection.end_after_answer()
        await self.connection.room()
        self.connection.answer(status, self._rows(rows, request_id), b"" if self.head.method == "HEAD" else body)

    async def answer_empty(self, headers: header_fields.Headers, request_id: str) -> None:
        """Send an answer without content."""
        if self.body_pending:
            self.connection.end_after_answer()
        await self.connection.room()
        self.connection.answer(204, self._rows(headers, request_id), b"")

    async def stream(self, request_id: str, headers: header_fields.Headers, *, record_bytes: int = 0) -> None:
        """Begin an event stream; of records of this size, where the tenant's answers are padded."""
        ticks = None
        if self.padding is not None:
            ticks = Ticks(self._begun, self.padding.tick_s)
            await ticks.next()
        rows = [
            ("content-type", sse.CONTENT_TYPE),
            ("cache-control", "no-store"),
            ("x-accel-buffering", "no"),
            *headers,
        ]
        await self.connection.room()
        self.connection.begin_stream(200, self._rows(rows, request_id))
        self.streaming = True
        self.quiet = 0
        if self.padding is not None and ticks is not None:
            self.paced = PacedEvents(self.padding, record_bytes, ticks, self._write_record, self.until)
            if self._hurry.is_set():
                self.paced.hurry()

    async def write(self, chunk: bytes) -> None:
        """Send one event; waits while the client reads more slowly than we write."""
        await (self.paced.add(chunk) if self.paced is not None else self._write(chunk))

    async def _write(self, chunk: bytes) -> None:
        await self.connection.room()
        self.connection.write(chunk)
        self.quiet = 0

    async def _write_record(self, record: bytes) -> None:
        await self._write(record)
        if not self.connection.open:
            raise ClientGoneError

    async def download(self, pieces: AsyncIterator[bytes], content_type: str, request_id: str) -> None:
        """Send content piece by piece, as fast as the client reads it. Where it ends early the connection does, so that
        what has come does not look whole.

        Raises:
            ClientGoneError: it did, or the client left.
        """
        rows = self._rows([("content-type", content_type), ("cache-control", "no-store")], request_id)
        await self.connection.room()
        if self.head.method == "HEAD":
            self.connection.answer(200, rows, b"")
            return
        self.connection.begin_stream(200, rows)
        self.request_id, self._downloading = request_id, True
        try:
            async for piece in pieces:
                for at in range(0, len(piece), WRITE_BYTES):
                    await self.connection.room()
                    self.connection.write(piece[at : at + WRITE_BYTES])
                if not self.connection.open:
                    raise ClientGoneError
        except ApplianceError as error:
            raise ClientGoneError from error
        self.connection.end_stream(b"")

    def keep_alive(self, after_s: float) -> None:
        """Write a comment after each ``after_s`` seconds of silence inside a stream, until the exchange is closed. A
        padded stream is never silent."""
        if self.quiet >= LOOKS and self.streaming and self.paced is None and self.connection.writable:
            self.connection.write(sse.KEEPALIVE)
            self.quiet = 0
        self.quiet += 1
        self._look = asyncio.get_running_loop().call_later(after_s / LOOKS, self.keep_alive, after_s)

    def when_gone(self, call: Callable[[], None]) -> None:
        """Call this when the client leaves before its answer is whole; at once when it has left."""
        if self.connection.open:
            self.connection.on_gone = call
        else:
            call()

    async def end(self, last: bytes = b"") -> None:
        """End an event stream with these last events: they leave in one piece with the end."""
        if self.paced is not None:
            last = await self.paced.end(last)
        self._stop_looking()
        await self.connection.room()
        self.connection.end_stream(last)

    async def fail(self, error: ApplianceError, request_id: str, headers: header_fields.Headers) -> None:
        """Send the error: a JSON object, or inside a stream an error event without an end mark. After a complete answer
        nothing is sent, nor inside a download, whose connection ends instead."""
        if self.connection.answered or self._downloading:
            return
        if self.streaming:
            await self.end(self.errors.event(error, request_id))
            return
        rows = [*header_fields.of_error(error), *headers]
        await self.answer(error.wire.http, self.errors.document(error, request_id), request_id, rows)

    def hurry(self) -> None:
        """End without further padding, because the appliance stops."""
        self._hurry.set()
        if self.paced is not None:
            self.paced.hurry()

    def close(self) -> None:
        """Stop its timers and its padded stream; the exchange is over, however it ended."""
        self.connection.on_gone = None
        self._stop_looking()
        if self.paced is not None:
            self.paced.stop()

    def _stop_looking(self) -> None:
        if self._look is not None:
            self._look.cancel()
            self._look = None

    async def _moment(self, padding: Padding) -> None:
        """Wait until a padded answer may leave: a tick, one of few where an engine has worked for it."""
        ticks = Ticks(self._begun, padding.tick_s).passed
        at = self._begun + padding.tick_s * (padding.records(ticks) if self.computed else ticks)
        if self.until is not None:
            at = min(at, self.until)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(at - time.monotonic()):
                await self._hurry.wait()

    def _rows(self, rows: header_fields.Headers, request_id: str) -> header_fields.Headers:
        """The headers of every answer behind these, padded where the tenant's answers are."""
        took_ms = int((time.monotonic() - self._begun) * 1_000)
        rows = [*rows, *self.everywhere, ("x-request-id", request_id), ("openai-processing-ms", str(took_ms))]
        return rows if self.padding is None else self.padding.head(rows)
