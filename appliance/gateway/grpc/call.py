"""One gRPC call on its HTTP/2 stream, as a method sees it: its message in, its answers out, its end.

Source: "gRPC over HTTP2" (PROTOCOL-HTTP2.md). A caller may send 64 KiB before a method reads: the stream's window. The
rest of a message is asked for while a method waits for it, so what nobody reads takes no memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Protocol, TypeVar

import grpc
from google.protobuf.message import Message

from appliance.common.errors import CancelledError, InvalidRequestError
from appliance.gateway.generate_request import Principal
from appliance.gateway.grpc.outlet import Outlet
from appliance.gateway.grpc.wire import ANSWER_ROWS, OK, CallHead, MessageReader, Rows, Status, framed, trailers_of


class CallEnded(Exception):
    """A method ends its call with this status; the call's boundary passes it on."""

    def __init__(self, status: Status) -> None:
        super().__init__(status.code, status.message)
        self.status = status


class Peer(Protocol):
    """What a call asks about who calls."""

    address: str
    """The peer's address, or the client's for which a proxy opened the connection."""
    peer_names: tuple[tuple[str, str], ...] | None
    """Alternative names of the peer's verified certificate, each with its kind; None where it has shown none."""

    def claim(self, tenant: str) -> bool:
        """Count the connection as this tenant's; False when the tenant has as many as it may."""

    def unproved(self) -> None:
        """Charge the peer for a call without a valid credential."""


class TenantCall(Protocol):
    """A call whose caller is known before its method runs."""

    wire: GrpcCall
    principal: Principal | None


C = TypeVar("C", bound=TenantCall)

Behaviours = dict[str, Callable[[C], Awaitable[Message | None]]]
"""What answers each method of a service, by the method's name: it writes its messages, or returns its only one."""


def principal_of(call: TenantCall) -> Principal:
    """Return whose call it is."""
    assert call.principal is not None, "a TENANT method runs after authentication"
    return call.principal


class GrpcCall:
    """One call. The methods that grpcio's own servicers call have grpcio's names."""

    def __init__(self, peer: Peer, outlet: Outlet, stream_id: int, head: CallHead, most: int, stall_s: float) -> None:
        """``most``: bytes of one message; ``stall_s``: seconds for which a message may wait for the peer to read."""
        self.method = head.method
        self.metadata = head.metadata
        self._peer = peer
        self._outlet = outlet
        self._stream_id = stream_id
        self._stall_s = stall_s
        self._reader = MessageReader(head.encoding, most)
        self._loop = asyncio.get_running_loop()
        self._deadline = None if head.timeout_s is None else self._loop.time() + head.timeout_s
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        """Something came, or the windows are wider, or the call is over."""
        self._half_closed = False
        """Whether the caller has said all."""
        self._gone = False
        """Whether the caller has left: nothing is sent any more."""
        self._expired = False
        self._unread = 0
        """Bytes that came and that the caller has not been given back as window."""
        self._head_sent = False

    @property
    def address(self) -> str:
        """The connection's address, without its port."""
        return self._peer.address

    @property
    def peer_names(self) -> tuple[tuple[str, str], ...] | None:
        """The alternative names of a verified client certificate, each with its kind; None where there is none."""
        return self._peer.peer_names

    @property
    def peer_uris(self) -> tuple[str, ...]:
        """The URI names among them."""
        return tuple(name for kind, name in self._peer.peer_names or () if kind == "URI")

    # ---- for methods

    def claim(self, tenant: str) -> bool:
        """Count the call's connection as this tenant's; False when the tenant has as many as it may."""
        return self._peer.claim(tenant)

    def unproved(self) -> None:
        """Charge the caller for a call without a valid credential."""
        self._peer.unproved()

    def bound(self, most: int) -> None:
        """Let no message of the call have more bytes."""
        self._reader.most = most

    def time_remaining(self) -> float | None:
        """Seconds to the caller's deadline; None where it has none."""
        return None if self._deadline is None else max(0.0, self._deadline - self._loop.time())

    async def receive(self) -> bytes | None:
        """Return the caller's next message; None behind its last one.

        Raises:
            PayloadTooLargeError, InvalidRequestError: see ``MessageReader.next``.
            InvalidRequestError: the caller said its last inside a message. What came before it is then not all.
        """
        while (message := self._reader.next()) is None:
            if self._gone:
                return None
            if self._half_closed:
                if self._reader.buffered:
                    raise InvalidRequestError("the call ended inside a message; send it whole")
                return None
            if self._unread:
                self._outlet.ask_for(self._unread, self._stream_id)
                self._unread = 0
            self._changed.clear()
            await self._changed.wait()
        return message

    async def messages(self) -> AsyncGenerator[bytes, None]:
        """The caller's messages, to the last one."""
        while (message := await self.receive()) is not None:
            yield message

    async def send_initial_metadata(self, rows: Rows) -> None:
        """Send these headers now, before the first message."""
        if not self._gone:
            self._send_head(rows)

    async def write(self, message: Message | bytes) -> None:
        """Send a message; returns once it is on its way.

        Raises:
            CancelledError: the peer took too little of what was sent for too long.
        """
        data = framed(message if isinstance(message, bytes) else message.SerializeToString())
        if self._gone:
            return
        self._send_head()
        rest = self._outlet.send(self._stream_id, data)
        if rest:
            await self._send_rest(rest)

    async def abort(self, code: grpc.StatusCode, details: str = "") -> None:
        """End the call.

        Raises:
            CallEnded: always.
        """
        raise CallEnded(Status(code.value[0], details))

    def _send_head(self, rows: Rows = ()) -> None:
        if not self._head_sent:
            self._head_sent = True
            self._outlet.send_rows(self._stream_id, [*ANSWER_ROWS, *rows], end=False)

    async def _send_rest(self, rest: bytes) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                while rest and not self._gone:
                    self._changed.clear()
                    await self._changed.wait()
                    rest = self._outlet.send(self._stream_id, rest)
        except TimeoutError:
            raise CancelledError("the client stopped reading; the request was ended") from None

    # ---- for the connection

    def start(self, serve: Callable[[GrpcCall], Awaitable[Status]]) -> asyncio.Task[None]:
        """Run the method in a task of its own, which the deadline ends."""
        self._task = task = self._loop.create_task(self._run(serve))
        if self._deadline is not None:
            # By the task's end and not inside it: one that is cancelled before its first step runs none of its code.
            timer = self._loop.call_at(self._deadline, self._expire)
            task.add_done_callback(lambda _task: timer.cancel())
        return task

    def feed(self, data: bytes, size: int) -> None:
        """Take the content of a DATA frame that took ``size`` bytes of the stream's window."""
        self._unread += size
        self._reader.feed(data)
        self._changed.set()

    def half_close(self) -> None:
        """The caller has said all."""
        self._half_closed = True
        self._changed.set()

    def widen(self) -> None:
        """There may be room again for what is to be sent."""
        self._changed.set()

    def leave(self) -> None:
        """The caller has gone: end what is done for it."""
        self._gone = True
        self._changed.set()
        task, self._task = self._task, None  # it refers to this call: kept, both would wait for the collector
        if task is not None:
            task.cancel()

    def _expire(self) -> None:
        self._expired = True
        if self._task is not None:
            self._task.cancel()

    async def _run(self, serve: Callable[[GrpcCall], Awaitable[Status]]) -> None:
        try:
            status = await serve(self)
        except asyncio.CancelledError:
            if self._gone:
                return
            # Its deadline has passed, or the appliance ends and has told it before.
            status = Status(4, "the deadline has passed") if self._expired else Status(14, "the appliance ends")
        finally:
            self._task = None
        self._end(status)

    def _end(self, status: Status) -> None:
        if self._gone:
            return
        rows = trailers_of(status)
        if not self._head_sent:
            if status.code == OK.code:
                self._send_head()
            else:
                rows = [*ANSWER_ROWS, *rows]
        self._outlet.send_rows(self._stream_id, rows, end=True)
        if not self._half_closed:
            self._outlet.reset(self._stream_id)
