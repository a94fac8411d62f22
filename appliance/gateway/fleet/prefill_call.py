"""One call of ``PrefillService`` on another host: a connection of its own, over TLS with both certificates.

A connection is made for each call, because a call stands for seconds of computing and a handshake takes milliseconds:
so nothing is multiplexed, a call is cancelled by closing its connection, and a renewed certificate holds from the next
call on. ``h2`` owns the state machine and flow control. The other host is who its certificate says, by the SPIFFE id
in it; host names are not compared. What it sends is bounded before it is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.exceptions
from google.protobuf.message import DecodeError

from appliance.common.addresses import split_address
from appliance.common.errors import InvalidRequestError, PayloadTooLargeError
from appliance.common.split_config import PrefillHost, SplitTlsConfig
from appliance.gateway.fleet.generated import fleet_pb2 as pb
from appliance.gateway.fleet.host_addresses import HostAddresses
from appliance.gateway.front.operator_access import certificate_credential
from appliance.gateway.grpc.wire import MessageReader, framed

METHOD = "/athanor.fleet.v1.PrefillService/Compute"
"""Path of the one method."""

SILENCE_S = 0.25
"""Seconds without a message after which a host counts as silent: two and a half times the pause between two of them
(``prefill_service.PROGRESS_S``), and as much as a first token may wait for nothing."""

WORKING_SILENCE_S = 2.0
"""Seconds of silence of a host that has said that it works: as long as it would rest (``prefill_choice.REST_S``). Words
of a busy machine come up to half a second apart (15 processes on two cores), and to give up costs all that was
computed. A host that ends closes its connection, which is no silence; one that stands still answers no new call."""

MAX_MESSAGE_BYTES = 1 << 10
"""Bytes of a message of the other host: it has two numbers."""

MAX_RECEIVED_BYTES = 256 << 10
"""Bytes that the other host may send in a call: ten messages a second for as long as it may take have a tenth of it."""

READ_BYTES = 16 << 10
"""Bytes read at once: answers are small."""


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
"""Both directions of a connection."""


class PrefillCallError(Exception):
    """The prompt was not computed, as far as this host knows. ``outcome`` is a word of ``prefill_asking.OUTCOMES``;
    ``answered``: the other host said so itself, so that it is there."""

    def __init__(self, outcome: str, why: str, *, answered: bool = False) -> None:
        super().__init__(why)
        self.outcome, self.answered = outcome, answered


def client_context(tls: SplitTlsConfig) -> ssl.SSLContext:
    """Return TLS for calls; blocks.

    Raises:
        OSError: a file cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the SPIFFE id is compared instead
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols(["h2"])
    context.load_verify_locations(tls.ca)
    context.load_cert_chain(tls.certificate, tls.key)
    return context


@dataclass(frozen=True, slots=True)
class Dialer:
    """How other hosts are reached."""

    context: ssl.SSLContext
    """TLS of ``client_context``."""
    addresses: HostAddresses

    async def open(self, host: PrefillHost) -> Streams:
        """Return the streams of a new connection, before the other end has proved who it is. Cancelled, it leaves none.

        Raises:
            OSError: the host has no address, none of them answers, or not over TLS (``ssl.SSLError``).
        """
        name, port = split_address(host.address)
        failed = OSError("it has no address")
        for address in await self.addresses.find(name):
            try:
                return await self._connect(address, port, name)
            except OSError as error:
                failed = error
        raise failed

    async def _connect(self, address: str, port: int, name: str) -> Streams:
        loop = asyncio.get_running_loop()
        connecting = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        try:
            connecting.setblocking(False)
            connecting.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.sock_connect(connecting, (address, port))
        except BaseException:
            connecting.close()
            raise
        making = asyncio.ensure_future(
            asyncio.open_connection(sock=connecting, ssl=self.context, limit=READ_BYTES, server_hostname=name)
        )
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            # Not the maker's own cancellation: uvloop closes its transport under TLS, which then fails to write where
            # the handshake ends in that moment. The end of the peer's bytes ends the handshake as it should.
            making.add_done_callback(_abort)
            with contextlib.suppress(OSError):
                connecting.shutdown(socket.SHUT_RDWR)
            raise


def _abort(making: asyncio.Future[Streams]) -> None:
    """End a connection that nobody waits for any more, if there is one."""
    if not making.cancelled() and making.exception() is None:
        making.result()[1].transport.abort()


async def call(
    host: PrefillHost,
    way: Dialer,
    request: pb.ComputeRequest,
    traceparent: str,
    until: float,
    begun: Callable[[], None],
) -> pb.Computed:
    """Have a prompt computed; cancelled, it ends the work on the other host.

    Args:
        host: whom to ask.
        way: how it is reached.
        request: the prompt.
        traceparent: the request's span.
        until: deadline in monotonic seconds; the other host is told it too.
        begun: called with each message that says that the other host works on the prompt.

    Raises:
        PrefillCallError: the host cannot be reached, is another, refuses, is silent, breaks the protocol, or is late.
    """
    try:
        async with asyncio.timeout(SILENCE_S):
            reader, writer = await way.open(host)
    except TimeoutError:
        raise PrefillCallError("silent", "no connection in time") from None
    except (OSError, ssl.SSLError) as error:
        raise PrefillCallError("away", str(error)) from error
    try:
        names = tuple((writer.get_extra_info("peercert") or {}).get("subjectAltName", ()))
        if certificate_credential(names) != host.identity:
            raise PrefillCallError("stranger", f"the certificate at {host.address} is not that of {host.identity}")
        async with asyncio.timeout(until - time.monotonic()):
            return await _Exchange(reader, writer, begun).run(request, traceparent, until)
    except TimeoutError:
        raise PrefillCallError("late", "the prompt was not computed in time") from None
    except (OSError, ssl.SSLError, asyncio.IncompleteReadError) as error:
        raise PrefillCallError("broken", str(error)) from error
    except (h2.exceptions.H2Error, DecodeError, InvalidRequestError, PayloadTooLargeError) as error:
        raise PrefillCallError("broken", "the host does not speak the protocol") from error
    finally:
        # Not a farewell of TLS, for which a dead host would be waited.
        writer.transport.abort()


class _Exchange:
    """The frames of one call."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, begun: Callable[[], None]) -> None:
        self._reader, self._writer, self._begun = reader, writer, begun
        config = h2.config.H2Configuration(client_side=True, header_encoding="latin-1")
        self._h2 = h2.connection.H2Connection(config)
        self._messages = MessageReader("identity", MAX_MESSAGE_BYTES)
        self._body = memoryview(b"")
        self._stream = 0
        self._computed: pb.Computed | None = None
        self._status: str | None = None
        self._over = False
        self._received = 0
        self._works = False
        """Whether the host has said that it works on the prompt."""

    async def run(self, request: pb.ComputeRequest, traceparent: str, until: float) -> pb.Computed:
        left_ms = max(1, int((until - time.monotonic()) * 1_000))
        self._h2.initiate_connection()
        self._stream = self._h2.get_next_available_stream_id()
        rows = [
            *((":method", "POST"), (":scheme", "https"), (":path", METHOD), (":authority", "prefill")),
            *(("content-type", "application/grpc+proto"), ("te", "trailers"), ("traceparent", traceparent)),
            ("grpc-timeout", f"{min(left_ms, 99_999_999)}m"),
        ]
        self._h2.send_headers(self._stream, rows)
        self._body = memoryview(framed(request.SerializeToString()))
        heard = time.monotonic()
        while True:
            self._send_body()
            await self._flush()
            patience_s = WORKING_SILENCE_S if self._works else SILENCE_S
            try:
                async with asyncio.timeout(heard + patience_s - time.monotonic()):
                    data = await self._reader.read(READ_BYTES)
            except TimeoutError:
                data = await self._unread(patience_s)
            if self._take(data):
                heard = time.monotonic()
            if self._computed is not None:
                return self._computed
            if self._over or not data:
                outcome, answered = _OUTCOMES.get(self._status or "", "broken"), self._status is not None
                raise PrefillCallError(outcome, "the call ended without an answer", answered=answered)

    async def _unread(self, waited_s: float) -> bytes:
        """Return what has come after all: where this process stood still, it is late itself, and not the host.

        Raises:
            PrefillCallError: nothing has.
        """
        try:
            async with asyncio.timeout(0):
                return await self._reader.read(READ_BYTES)
        except TimeoutError:
            raise PrefillCallError("silent", f"no word for {waited_s:.2f} s") from None

    async def _flush(self) -> None:
        self._writer.write(self._h2.data_to_send())
        try:
            async with asyncio.timeout(SILENCE_S):
                await self._writer.drain()
        except TimeoutError:
            raise PrefillCallError("silent", "the host reads nothing") from None

    def _send_body(self) -> None:
        """Send of the prompt what the windows let through."""
        while self._body and not self._over:
            room = min(self._h2.local_flow_control_window(self._stream), self._h2.max_outbound_frame_size)
            if room <= 0:
                return
            part, self._body = self._body[:room], self._body[room:]
            self._h2.send_data(self._stream, bytes(part), end_stream=not self._body)

    def _take(self, data: bytes) -> bool:
        """Take what came; returns whether it says that the host works on the prompt, or reads it."""
        self._received += len(data)
        if self._received > MAX_RECEIVED_BYTES:
            raise PrefillCallError("broken", "the host sends too much")
        news = bool(self._body)
        for event in self._h2.receive_data(data) if data else ():
            if (handle := _HANDLERS.get(type(event))) is not None:
                handle(self, event)
        while (message := self._messages.next()) is not None:
            found = pb.ComputeResponse.FromString(message)
            if found.WhichOneof("event") == "computed":
                self._computed = found.computed
            self._begun()
            self._works = news = True
        return news

    def _on_data(self, event: Any) -> None:
        self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        self._messages.feed(event.data)

    def _on_end(self, event: Any) -> None:
        self._status = dict(event.headers).get("grpc-status", self._status)

    def _on_over(self, _event: Any) -> None:
        self._over = True


_HANDLERS: dict[type, Callable[[_Exchange, Any], None]] = {
    h2.events.DataReceived: _Exchange._on_data,
    h2.events.ResponseReceived: _Exchange._on_end,
    h2.events.TrailersReceived: _Exchange._on_end,
    h2.events.StreamEnded: _Exchange._on_over,
    h2.events.StreamReset: _Exchange._on_over,
    h2.events.ConnectionTerminated: _Exchange._on_over,
}
"""h2's event -> what it means to a call."""

_OUTCOMES = {"4": "late", "7": "refused", "8": "busy", "9": "refused", "12": "refused", "3": "refused", "14": "away"}
"""gRPC status -> outcome."""
