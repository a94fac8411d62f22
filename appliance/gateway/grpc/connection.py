"""HTTP/2 on one connection of a gRPC client, from accept to close (RFC 9113).

``h2`` owns the state machine, header compression and its limits; this module owns the socket, who may make us work how
much, and when a connection ends. Answers of one turn of the event loop leave in one write, whatever their streams.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import h2.events
import h2.exceptions
from h2.errors import ErrorCodes

from appliance.gateway.front.allowance import Allowance, Rate, StrangersAllowances
from appliance.gateway.front.connections import Slot
from appliance.gateway.front.listener import Opened
from appliance.gateway.front.tls_files import peer_names
from appliance.gateway.grpc.call import GrpcCall
from appliance.gateway.grpc.inbox import STRANGER_TURN_BYTES, TURN_BYTES, Inbox
from appliance.gateway.grpc.outlet import ALL_STREAMS, CONNECTION_WINDOW_BYTES, Outlet
from appliance.gateway.grpc.wire import CallHeadError, Status, head_of

SILENT_BYTES = 64 << 10
"""Bytes without a whole frame or header block: twice the largest of each."""

SMALL_BYTES = 1 << 10
"""Bytes of a message in one frame, not the last, below which the frame counts as one that serves nothing."""

STRANGER = Rate(burst=200, per_s=50)
"""Frames that serve nothing, of all connections of an address without a credential."""

TENANT = Rate(burst=2_000, per_s=200)
"""Frames that serve nothing, of one connection with a credential or of a trusted proxy; each DATA frame sent to it
earns ``EARNED``."""

EARNED = 4
"""Window updates of stream and connection, a ping that measures, and its acknowledgement."""

DRAIN_BYTES = 1 << 20
"""Bytes read and thrown away behind the last frame; a faster sender is cut off."""

DRAIN_S = 0.5
"""Seconds spent on that."""

FREE_FRAMES = 16
"""Frames at a connection's start that every client sends; what calls cost when they begin is none of them."""

UNPROVED_UNITS = 4
"""Units that a call without a valid credential costs, refused or a health check: as much work as so many frames."""

RESET_UNITS = 4
"""Units that a call costs which its client takes back."""

FIRST_S = 10.0
"""Seconds from accept to the first call."""

STRANGER_IDLE_S = 75.0
"""Seconds without a call that a connection without a credential has; longer than health checks pause."""

IDLE_S = 600.0
"""Seconds without a call that a connection with a credential has."""

PING_S = 30.0
"""Silence of a peer with running calls before it is asked whether it is there."""

PONG_S = 10.0
"""Seconds that it has to answer."""

AGE_S = 3_600.0
"""Age at which a connection takes no more calls: a certificate is looked at once, in the handshake, and an hour bounds
how long an expired one still serves. Calls that run have as long again."""

ALIVE = b"athanor?"
"""What a ping says that asks whether the peer is there."""

GOODBYE = b"goodbye!"
"""What the ping behind a GOAWAY says."""

NOT_HTTP_2 = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\nconnection: close\r\n\r\n"
    b"this port speaks gRPC over HTTP/2; the OpenAI HTTP API has a port of its own, which `athanor status` shows\n"
)


@dataclass(slots=True)
class GrpcShared:
    """What gRPC's connections have in common."""

    opened: Opened
    serve: Callable[[GrpcCall], Awaitable[Status]]
    """Answers one call; raises no Exception."""
    strangers: StrangersAllowances
    most: int
    """Bytes of one message."""
    stall_s: float
    """Seconds for which a client may leave a message unread."""


class GrpcConnection(asyncio.Protocol):
    """One connection: the ``Peer`` of its calls, a ``Connection`` of its listener."""

    def __init__(self, shared: GrpcShared, slot: Slot) -> None:
        """``slot``: the connection's place in the counts, which is given back at its end."""
        self._shared = shared
        self._slot = slot
        self._loop = asyncio.get_running_loop()
        self._transport = cast(asyncio.Transport, None)
        self._outlet = cast(Outlet, None)
        self._inbox = cast(Inbox, None)
        self._calls: dict[int, GrpcCall] = {}
        self._born = self._heard = self._idle_since = self._loop.time()
        self._known = slot.proxy
        """Whether a credential came over it, or it is a trusted proxy's, which has clients with one."""
        self._allowance = Allowance(TENANT, self._born) if slot.proxy else shared.strangers.of(slot.network)
        self._free = FREE_FRAMES
        self._silent = 0
        self._dropped = self._unacknowledged = 0
        """Bytes taken of the connection's window and not given back."""
        self._closing = False
        self._ending = self._refusing = False
        """Whether the client was told to open no more streams, and whether one that it opens still is refused."""
        self._asked = False
        """Whether a call ever came."""
        self._pinged_at: float | None = None
        self.address = slot.address
        self.peer_names: tuple[tuple[str, str], ...] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say our settings."""
        self._transport = cast(asyncio.Transport, transport)
        self._outlet = Outlet(self._transport, lambda: self._allowance.earn(EARNED if self._known else 0))
        turn_bytes = TURN_BYTES if self._known else STRANGER_TURN_BYTES
        self._inbox = Inbox(self._transport, partial(self._shared.opened.read, self._slot), self._read, turn_bytes)
        self.peer_names = peer_names(transport)
        self._slot.on_evicted = self._transport.abort
        self._shared.opened.connections.add(self)
        self._outlet.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        """End every call, and give back the place in the counts."""
        self._closing = True
        self._inbox.close()
        self._shared.opened.connections.discard(self)
        self._slot.release()
        self._leave_all()
        self._outlet.close()
        self._transport = cast(asyncio.Transport, None)

    def pause_writing(self) -> None:
        """Note that the peer reads more slowly than is written."""
        self._outlet.writable = False

    def resume_writing(self) -> None:
        """Wake the calls that wait for room."""
        self._outlet.writable = True
        self._widen()

    def data_received(self, data: bytes) -> None:
        """Read what came, when it is the connection's turn."""
        if self._closing:
            self._dropped += len(data)
            if self._dropped > DRAIN_BYTES:
                self._transport.abort()
            return
        self._heard = self._loop.time()
        self._pinged_at = None
        self._inbox.take(bytes(data))

    def eof_received(self) -> None:
        """Treat the end of the peer's bytes as its leaving: the transport closes."""

    def _read(self, data: bytes) -> None:
        try:
            events = self._outlet.h2.receive_data(data)
        except h2.exceptions.ProtocolError:
            self._close(last=NOT_HTTP_2 if not self._asked and b" HTTP/1." in data[:4_096] else b"")
            return
        self._silent = 0 if events else self._silent + len(data)
        if self._silent > SILENT_BYTES:
            self._close(ErrorCodes.ENHANCE_YOUR_CALM)
            return
        for event in events:
            handle = _HANDLERS.get(type(event), GrpcConnection._on_other)
            handle(self, event)
            if self._closing:
                return
        self._spend(self._outlet.unsaid())
        self._outlet.flush_soon()

    # ---- what comes

    def _on_request(self, event: Any) -> None:
        stream_id = event.stream_id
        self._asked = True
        if self._refusing:
            self._outlet.reset(stream_id, ErrorCodes.REFUSED_STREAM)
            return
        try:
            head = head_of(event.headers)
        except CallHeadError as error:
            self._outlet.send_rows(stream_id, error.rows, end=True)
            self._outlet.reset(stream_id)
            self.unproved()
            return
        call = GrpcCall(self, self._outlet, stream_id, head, self._shared.most, self._shared.stall_s)
        self._calls[stream_id] = call
        if event.stream_ended is not None:
            call.half_close()
        self._shared.opened.begin(self._slot, lambda: self._begin(stream_id))
        if not self._known:
            self._spend(1)  # now: it may wait for its turn, and what it costs then is charged then

    def _begin(self, stream_id: int) -> bool:
        if (call := self._calls.get(stream_id)) is not None:
            task = call.start(self._shared.serve)
            self._shared.opened.tasks.add(task)
            task.add_done_callback(lambda task: self._served(task, stream_id))
        return call is not None

    def _on_data(self, event: Any) -> None:
        size = event.flow_controlled_length
        self._unacknowledged += size
        if self._unacknowledged >= CONNECTION_WINDOW_BYTES // 2:
            self._outlet.ask_for(self._unacknowledged)
            self._unacknowledged = 0
        if (call := self._calls.get(event.stream_id)) is not None:
            call.feed(event.data, size)
        if not event.data or (len(event.data) < SMALL_BYTES and event.stream_ended is None):
            self._spend(1)

    def _on_stream_ended(self, event: Any) -> None:
        if (call := self._calls.get(event.stream_id)) is not None:
            call.half_close()

    def _on_reset(self, event: Any) -> None:
        if (call := self._calls.pop(event.stream_id, None)) is not None:
            call.leave()
            self._note_idle()
        self._spend(RESET_UNITS)

    def _on_window(self, event: Any) -> None:
        if event.stream_id:
            if (call := self._calls.get(event.stream_id)) is not None:
                call.widen()
        else:
            self._widen()
        self._spend(1)

    def _on_settings(self, _event: Any) -> None:
        self._widen()  # its window may have grown
        self._spend(1)

    def _on_goaway(self, _event: Any) -> None:
        """The client opens no more streams. h2 sends nothing behind it, so what runs ends."""
        self._close()

    def _on_ping_answered(self, event: Any) -> None:
        if event.ping_data == GOODBYE and self._ending:
            self.end_if_idle()
        else:
            self._spend(1)

    def _on_other(self, _event: Any) -> None:
        self._spend(1)

    def _widen(self) -> None:
        for call in list(self._calls.values()):
            call.widen()

    def _spend(self, units: float) -> None:
        """Charge the peer for what serves nothing; a connection that only makes work ends."""
        if units == 1 and self._free > 0:
            self._free -= 1
        elif not self._allowance.spend(units, self._loop.time()):
            self._close(ErrorCodes.ENHANCE_YOUR_CALM)

    # ---- what calls ask of their connection

    def claim(self, tenant: str) -> bool:
        """Count the connection as this tenant's; False when the tenant has as many as it may."""
        if not self._slot.claim(tenant):
            return False
        if not self._known:
            self._known = True
            self._inbox.turn_bytes = TURN_BYTES
            self._allowance = Allowance(TENANT, self._loop.time())
        return True

    def unproved(self) -> None:
        """Charge the peer for a call without a valid credential."""
        if not self._slot.proxy:  # its other clients would lose their calls with the connection
            self._spend(UNPROVED_UNITS)

    # ---- ending

    def _served(self, task: asyncio.Task[None], stream_id: int) -> None:
        self._shared.opened.tasks.discard(task)
        self._calls.pop(stream_id, None)
        self._note_idle()

    def _note_idle(self) -> None:
        if not self._calls:
            self._idle_since = self._loop.time()
            if self._refusing:
                self.end_if_idle()

    def end_after_answer(self) -> None:
        """Tell the client to open no more streams here (RFC 9113, section 6.8). Those on their way are still answered:
        when the ping comes back, there are none any more."""
        if not self._ending and not self._closing:
            self._ending = True
            self._outlet.goaway(ErrorCodes.NO_ERROR, ALL_STREAMS)
            self._outlet.ping(GOODBYE)

    def end_if_idle(self) -> None:
        """Close the connection unless a call runs; then behind the last one."""
        self.end_after_answer()
        self._refusing = True
        if not self._calls:
            self._close(ErrorCodes.NO_ERROR)

    def abort(self) -> None:
        """Close the connection at once, whatever is on its way."""
        self._transport.abort()

    def look(self, now: float) -> None:
        """End the connection if it is too old, idle or dead; asked every second."""
        if self._closing:
            return
        idle_s = now - self._idle_since
        if self._calls:
            self._look_for_life(now)
        elif self._ending or not self._asked:
            if idle_s > (FIRST_S if not self._asked else 1.0):
                self.end_if_idle()
        elif idle_s > (IDLE_S if self._known else STRANGER_IDLE_S):
            self.end_if_idle()
        if now - self._born > 2 * AGE_S:
            self.abort()
        elif now - self._born > AGE_S:
            self.end_after_answer()

    def _look_for_life(self, now: float) -> None:
        if self._pinged_at is not None:
            if now - self._pinged_at > PONG_S:
                self.abort()
        elif now - self._heard > PING_S:
            self._pinged_at = now
            self._outlet.ping(ALIVE)

    def _close(self, code: ErrorCodes | None = None, last: bytes = b"") -> None:
        """Say goodbye with this code, or with ``last``, or with what h2 has to say, and close."""
        if self._closing:
            return
        if code is not None:
            self._outlet.goaway(code)
        elif last:
            self._transport.write(last)
        else:
            self._outlet.flush()
        self._closing = True
        self._outlet.open = False
        self._inbox.clear()
        self._leave_all()
        if self._transport.can_write_eof():
            # Closed at once, the kernel would reset it, and the client might lose what was said (as in HTTP/1.1).
            with contextlib.suppress(OSError):  # the peer has just reset it
                self._transport.write_eof()
            self._loop.call_later(DRAIN_S, self._transport.abort)
        else:
            self._transport.close()

    def _leave_all(self) -> None:
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.leave()


_HANDLERS: dict[type, Callable[[GrpcConnection, Any], None]] = {
    h2.events.RequestReceived: GrpcConnection._on_request,
    h2.events.DataReceived: GrpcConnection._on_data,
    h2.events.StreamEnded: GrpcConnection._on_stream_ended,
    h2.events.StreamReset: GrpcConnection._on_reset,
    h2.events.WindowUpdated: GrpcConnection._on_window,
    h2.events.RemoteSettingsChanged: GrpcConnection._on_settings,
    h2.events.PingAckReceived: GrpcConnection._on_ping_answered,
    h2.events.ConnectionTerminated: GrpcConnection._on_goaway,
}
"""h2's event -> what it means to us."""
