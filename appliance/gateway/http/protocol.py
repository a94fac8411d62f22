"""HTTP/1.1 on one connection, from accept to close (RFC 9112).

``HttpConnection`` is the only owner of its connection. It reads one request at a time: what a client sends behind it
waits, bounded, until it is answered, so answers leave in the order of the requests. ``ConnectionState`` says what
received bytes are, and ``_NEXT`` which state may follow which.

A connection whose client may still be sending is not closed at once behind its last answer: the kernel would reset it,
and the client might lose the answer. It is half-closed, and what comes is dropped for a moment (RFC 9112, section 9.6).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from email.utils import formatdate
from enum import Enum
from http import HTTPStatus
from typing import Any, cast

from appliance.gateway.front.connections import Slot
from appliance.gateway.front.listener import Opened
from appliance.gateway.front.tls_files import peer_certificate
from appliance.gateway.http.body import HIGH_WATER_BYTES, Body
from appliance.gateway.http.framing import ChunkedBody, FramingError, LengthBody, framing_of
from appliance.gateway.http.head import HeadError, HeadReader, RequestHead
from appliance.gateway.http.header_fields import Headers
from appliance.gateway.http.settings import HttpSettings

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
"""The interim answer that asks for a body (RFC 9110, section 10.1.1)."""

LAST_CHUNK = b"0\r\n\r\n"

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n" for status in HTTPStatus}


def answer_head(status: int, date: str, rows: Headers, ends: Sequence[str]) -> bytes:
    """Status line, Date, the headers in their order, then those of the connection, and the empty line.

    Raises:
        ValueError: a header has a line end in it, or is not ASCII. No text of a caller may come so far.
    """
    lines = [f"{name}: {value}\r\n" for name, value in rows]
    whole = "".join((_STATUS_LINES[status], "date: ", date, "\r\n", *lines, *ends, "\r\n"))
    if whole.count("\n") != len(rows) + len(ends) + 3 or whole.count("\r") != len(rows) + len(ends) + 3:
        raise ValueError("a header of an answer has a line end in it")
    return whole.encode("ascii")


def refusal(status: int, date: str, reason: str) -> bytes:
    """The whole answer to a connection whose bytes are no acceptable request."""
    error = {"message": reason, "type": "invalid_request_error", "param": None, "code": "invalid_value"}
    body = json.dumps({"error": error}, separators=(",", ":")).encode("ascii")
    rows = [("content-type", "application/json"), ("content-length", str(len(body)))]
    return answer_head(status, date, rows, ["connection: close\r\n"]) + body


PIPELINED_BYTES = 64 << 10
"""Bytes behind the request being answered that are kept for later; more stay in the kernel's buffers."""

UNSENT_BYTES = 64 << 10
"""Bytes of answers that the peer has not taken, at which handlers wait for it; TLS's own bound is eight times that."""

DRAIN_BYTES = 1 << 20
"""Bytes read and thrown away behind the last answer; a faster sender is cut off."""

DRAIN_S = 0.5
"""Seconds spent on that."""


CERTIFIED_S = 3_600.0
"""Age at which a connection with a client certificate takes no more requests: it is looked at once, in the handshake,
and an hour bounds how long an expired one still serves, as over gRPC."""


class ConnectionState(Enum):
    """What received bytes belong to."""

    IDLE = "idle"
    """Nothing: the next byte begins a request."""
    HEAD = "reading head"
    BODY = "reading body"
    """The request's body; its handler runs already."""
    ANSWERING = "answering"
    """A later request: they wait."""
    CLOSING = "closing"
    """Nothing: they are dropped."""


_NEXT = {
    ConnectionState.IDLE: (ConnectionState.HEAD, ConnectionState.CLOSING),
    ConnectionState.HEAD: (ConnectionState.BODY, ConnectionState.ANSWERING, ConnectionState.CLOSING),
    ConnectionState.BODY: (ConnectionState.ANSWERING, ConnectionState.CLOSING),
    ConnectionState.ANSWERING: (ConnectionState.IDLE, ConnectionState.CLOSING),
    ConnectionState.CLOSING: (),
}
"""ConnectionState -> states that may follow."""


@dataclass(slots=True)
class Shared:
    """What HTTP's connections have in common."""

    settings: HttpSettings
    opened: Opened
    serve: Callable[[HttpConnection, RequestHead, Body], Coroutine[Any, Any, None]]
    """Answers one request; raises no Exception."""
    date: str = ""
    """The Date header's value now."""

    def refresh(self) -> None:
        """Bring the Date header up to date; it shows whole seconds."""
        self.date = formatdate(usegmt=True)


class HttpConnection(asyncio.Protocol):
    """One connection."""

    def __init__(self, shared: Shared, slot: Slot) -> None:
        """``slot``: the connection's place in the counts, which is given back at its end."""
        self._shared = shared
        self._slot = slot
        self._loop = asyncio.get_running_loop()
        self._born = self._loop.time()
        self._transport = cast(asyncio.Transport, None)
        self._state = ConnectionState.HEAD  # from accept on, so that one timer holds for silence and for slow heads
        self._reader = HeadReader()
        self._framing: LengthBody | ChunkedBody | None = None
        self._body: Body | None = None
        self._waiting = b""
        """What came behind the request being answered."""
        self._paused = False
        self._timer: asyncio.TimerHandle | None = None
        self.answered = False
        """Whether the answer to the present request has been written to its end."""
        self._keep_alive = True
        self._chunked = True
        self._dropped = 0
        self._room: asyncio.Event | None = None
        self.address = slot.address
        """The peer's address, or the client's for which a proxy opened the connection."""
        self.certified = False
        """Whether the peer has shown a certificate of a known authority."""
        self.peer_uris: tuple[str, ...] = ()
        """URI names of that certificate."""
        self.open = False
        """Whether an answer may be written: the peer is there, as far as is known."""
        self.writable = True
        """Whether the bytes that the peer has not taken are few."""
        self.on_writable: Callable[[], None] | None = None
        """Called each time that the peer has read so much that there is room again."""
        self.on_gone: Callable[[], None] | None = None
        """Called once when the peer has left while its request is answered."""

    # ---- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the clock for the first head. With TLS, the handshake is done."""
        self._transport = cast(asyncio.Transport, transport)
        self.open = True
        self.scheme = "http" if transport.get_extra_info("ssl_object") is None else "https"
        self.certified, self.peer_uris = peer_certificate(transport)
        self._transport.set_write_buffer_limits(UNSENT_BYTES)
        self._slot.on_evicted = self._transport.abort
        self._shared.opened.connections.add(self)
        self._arm(self._shared.settings.head_timeout_s, self._transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """Give back the timer and the place in the counts, and end what is done for the peer."""
        self._disarm()
        self._state = ConnectionState.CLOSING  # whatever it was
        self._shared.opened.connections.discard(self)
        self._waiting = b""
        self._slot.release()
        self._gone()
        self._body = None  # it refers to this connection: kept, both would wait for the collector

    def eof_received(self) -> None:
        """Treat the end of the peer's bytes as its leaving: a client that closes its socket looks the same."""
        self._gone()

    def pause_writing(self) -> None:
        """Note that the peer reads more slowly than is written."""
        self.writable = False
        self._room = asyncio.Event()

    def resume_writing(self) -> None:
        """Wake what waits for room."""
        self.writable = True
        if self._room is not None:
            self._room.set()
        if self.on_writable is not None:
            self.on_writable()

    def data_received(self, data: bytes) -> None:
        """Hand received bytes to what the state says."""
        _RECEIVE[self._state](self, data)

    # ---- reading

    def _receive_idle(self, data: bytes) -> None:
        self._reader = HeadReader()
        self._enter(ConnectionState.HEAD)
        self._disarm()
        self._receive_head(data)
        if self._state is ConnectionState.HEAD:
            self._arm(self._shared.settings.head_timeout_s, self._transport.abort)

    def _receive_head(self, data: bytes) -> None:
        try:
            read = self._reader.feed(data)
        except HeadError as error:
            self._transport.write(refusal(error.status, self._shared.date, error.reason))
            self._close(drain=True)
            return
        if read is not None:
            self._disarm()
            self._begin(*read)

    def _begin(self, head: RequestHead, rest: bytes) -> None:
        """A head is complete: have the request answered."""
        self._framing = framing_of(head)
        self._keep_alive = head.keep_alive and not self._shared.opened.ending
        self._chunked = head.http_11
        expects = head.http_11 and "100-continue" in map(str.lower, head.values("expect"))
        self._body = Body(self._ask_for_body if expects else None, self._resume_reading)
        self.answered = False
        self._enter(ConnectionState.BODY if self._framing is not None else ConnectionState.ANSWERING)
        self._body.complete = self._framing is None
        if rest:
            self.data_received(rest)
        self._shared.opened.begin(self._slot, lambda: self._start(head))

    def _start(self, head: RequestHead) -> bool:
        if self._state is ConnectionState.CLOSING or self._body is None:
            return False
        task = self._loop.create_task(self._shared.serve(self, head, self._body))
        self._shared.opened.tasks.add(task)
        task.add_done_callback(self._served)
        return True

    def _receive_body(self, data: bytes) -> None:
        body, framing = cast(Body, self._body), cast(LengthBody | ChunkedBody, self._framing)
        if body.invalid:
            return
        try:
            taken = framing.feed(data, body.data)
        except FramingError:
            body.invalid = True
            body.changed()
            return
        body.complete = framing.done
        if framing.done:
            self._enter(ConnectionState.ANSWERING)
            if taken < len(data):
                self._receive_early(data[taken:])
        elif len(body.data) > HIGH_WATER_BYTES:
            self._pause_reading()
        body.changed()

    def _receive_early(self, data: bytes) -> None:
        self._waiting += data
        if len(self._waiting) > PIPELINED_BYTES:
            self._pause_reading()

    def _drop(self, data: bytes) -> None:
        self._dropped += len(data)
        if self._dropped > DRAIN_BYTES:
            self._transport.abort()

    def _ask_for_body(self) -> None:
        if self.open:
            self._transport.write(CONTINUE)

    def _pause_reading(self) -> None:
        if not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        if self._paused and len(self._waiting) <= PIPELINED_BYTES and not self._transport.is_closing():
            self._paused = False
            self._transport.resume_reading()

    # ---- answering

    def claim(self, tenant: str) -> bool:
        """Count the connection as this tenant's; False when the tenant has as many as it may."""
        return self._slot.claim(tenant)

    async def room(self) -> None:
        """Wait until the peer has read enough."""
        while not self.writable and self.open and self._room is not None:
            await self._room.wait()

    def answer(self, status: int, rows: Headers, body: bytes) -> None:
        """Write a whole answer: head and body leave together. ``rows`` says the body's length, also of one that is
        left out because the request is HEAD."""
        ends = () if self._keep_alive else ("connection: close\r\n",)
        head = answer_head(status, self._shared.date, rows, ends)
        if self.open:
            self._transport.write(head + body)
        self._end()

    def begin_stream(self, status: int, rows: Headers) -> None:
        """Write the head of an answer whose length is unknown. Its end is its last chunk, over HTTP/1.0 the
        connection's (RFC 9112, section 6.3)."""
        ends = ["transfer-encoding: chunked\r\n"] if self._chunked else []
        if not self._keep_alive:
            ends.insert(0, "connection: close\r\n")
        head = answer_head(status, self._shared.date, rows, ends)
        if self.open:
            self._transport.write(head)

    def write(self, data: bytes) -> None:
        """Write a part of a stream, one chunk (RFC 9112, section 7.1); after the peer's end nothing."""
        if self.open:
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def end_stream(self, last: bytes) -> None:
        """Write the last part, which may be empty, and the end: both leave together."""
        if self.open:
            if not self._chunked:
                self._transport.write(last)
            elif last:
                self._transport.write(b"%x\r\n%b\r\n%b" % (len(last), last, LAST_CHUNK))
            else:
                self._transport.write(LAST_CHUNK)
        self._end()

    def _end(self) -> None:
        self.answered = True
        if not self._keep_alive and self._state is not ConnectionState.CLOSING:
            self._close(drain=self._state is ConnectionState.BODY or bool(self._waiting))

    def _served(self, task: asyncio.Task[None]) -> None:
        """The handler has returned: read the next request, where there may be one."""
        self._shared.opened.tasks.discard(task)
        self.on_gone = self.on_writable = self._body = self._framing = None
        if self._state is ConnectionState.CLOSING:
            return
        if not self.answered:
            # Cancelled, or gone: an answer that is not whole must not look whole.
            self._transport.abort()
            return
        if not self._keep_alive:
            self._close(drain=bool(self._waiting))
            return
        self._enter(ConnectionState.IDLE)
        waiting, self._waiting = self._waiting, b""
        self._resume_reading()
        if waiting:
            self._receive_idle(waiting)
        else:
            self._arm(self._shared.settings.keep_alive_s, self._transport.close)

    # ---- ending

    def end_after_answer(self) -> None:
        """Let the answer that runs, if any, be the connection's last one."""
        self._keep_alive = False

    def end_if_idle(self) -> None:
        """Close the connection unless a request is being answered; then behind that answer."""
        self._keep_alive = False
        if self._state in (ConnectionState.IDLE, ConnectionState.HEAD):
            self._close(drain=False)

    def abort(self) -> None:
        """Close the connection at once, whatever is on its way."""
        self._transport.abort()

    def look(self, now: float) -> None:
        """End the connection behind its answer if its certificate was looked at too long ago; a timer of its own holds
        for each wait."""
        if self.certified and now - self._born > CERTIFIED_S:
            self.end_if_idle()

    def _gone(self) -> None:
        """The peer has left: end what is done for it."""
        self.open = False
        if self._body is not None:
            self._body.gone = True
            self._body.changed()
        if self._room is not None:
            self._room.set()
        gone, self.on_gone = self.on_gone, None
        if gone is not None:
            gone()

    def _close(self, *, drain: bool) -> None:
        self._enter(ConnectionState.CLOSING)
        self._disarm()
        self.open = False
        self._waiting = b""
        if not drain or self._transport.is_closing():
            self._transport.close()
            return
        if self._transport.can_write_eof():
            with contextlib.suppress(OSError):  # the peer has just reset it
                self._transport.write_eof()
        self._resume_reading()
        self._arm(DRAIN_S, self._transport.close)

    def _enter(self, state: ConnectionState) -> None:
        assert state in _NEXT[self._state], f"{state} cannot follow {self._state}"
        self._state = state

    def _arm(self, seconds: float, call: Callable[[], None]) -> None:
        self._timer = self._loop.call_later(seconds, call)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


_RECEIVE = {
    ConnectionState.IDLE: HttpConnection._receive_idle,
    ConnectionState.HEAD: HttpConnection._receive_head,
    ConnectionState.BODY: HttpConnection._receive_body,
    ConnectionState.ANSWERING: HttpConnection._receive_early,
    ConnectionState.CLOSING: HttpConnection._drop,
}
"""ConnectionState -> what takes received bytes."""
