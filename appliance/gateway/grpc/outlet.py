"""What leaves on one HTTP/2 connection: h2 puts frames together, one write a turn of the event loop sends them.

h2 owns the state machine, flow control and header compression (RFC 9113, RFC 7541) with these limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Callable, Iterator
from typing import cast

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings
import hpack
import hyperframe.frame

from appliance.gateway.grpc.wire import MAX_HEAD_BYTES, Rows

MAX_STREAMS = 256
"""Calls of one connection at once."""

HEADER_LIST_BYTES = 2 * MAX_HEAD_BYTES
"""Bytes of headers, uncompressed, at which the connection ends; between the two only the call does."""

MAX_CLOSED_STREAMS = 1_024
"""Ended streams that a connection remembers, to tell frames that crossed their end from mistakes."""

CONNECTION_WINDOW_BYTES = 1 << 20
"""Bytes that the streams of a connection may send together before they are read."""

HIGH_WATER_BYTES = 256 << 10
"""Bytes that wait in the socket's buffer before a connection's methods do."""

ALL_STREAMS = (1 << 31) - 1
"""The last stream of a GOAWAY that still lets those come which are on their way."""

ENCODER_TABLE_BYTES = 4_096
"""Bytes of header fields of answers that are kept to be referred to, as by default; a peer that allows more gets no
more (RFC 7541, section 4.2). Each field of an answer is looked up from the first to the last."""

_GOAWAY = struct.Struct(">BHBBIII")
"""A GOAWAY frame without debug data (RFC 9113, section 6.8)."""


class _Encoder(hpack.Encoder):
    """Compresses headers with a table that its peer cannot make larger."""

    @property
    def header_table_size(self) -> int:
        """Bytes that the table may hold."""
        return self.header_table.maxsize

    @header_table_size.setter
    def header_table_size(self, value: int) -> None:
        size = min(value, ENCODER_TABLE_BYTES)
        if size != self.header_table.maxsize:
            self.header_table.maxsize = size
            self.table_size_changes.append(size)


class _Http2(h2.connection.H2Connection):
    MAX_CLOSED_STREAMS = MAX_CLOSED_STREAMS
    unsaid = 0
    """Frames that came and gave no event: h2 ignores them, or resets their stream, which has ended."""

    def _receive_frame(self, frame: hyperframe.frame.Frame) -> list[h2.events.Event]:
        events = super()._receive_frame(frame)
        self.unsaid += not events
        return events


def _http2() -> _Http2:
    config = h2.config.H2Configuration(
        client_side=False,
        header_encoding=None,
        validate_outbound_headers=False,  # ours; no text of a caller is in them that is not percent-encoded
        normalize_outbound_headers=False,
    )
    made = _Http2(config)
    made.encoder = _Encoder()
    codes = h2.settings.SettingCodes
    made.local_settings = h2.settings.Settings(
        client=False,
        initial_values={codes.MAX_CONCURRENT_STREAMS: MAX_STREAMS, codes.MAX_HEADER_LIST_SIZE: MAX_HEAD_BYTES},
    )
    made.decoder.max_header_list_size = HEADER_LIST_BYTES
    made.initiate_connection()
    made.increment_flow_control_window(CONNECTION_WINDOW_BYTES - 65_535)
    return made


@contextlib.contextmanager
def stream_may_be_over() -> Iterator[None]:
    """Ignore h2's refusal to send where a stream or the connection has ended: h2 reads all frames of a turn before its
    first event, and may have read the client's reset. A client that takes its call back needs no answer."""
    with contextlib.suppress(h2.exceptions.ProtocolError):
        yield


class Outlet:
    """The sending side. ``on_data`` is called for each DATA frame that is sent. Once it is not ``open`` any more, its
    methods do nothing."""

    def __init__(self, transport: asyncio.Transport, on_data: Callable[[], None]) -> None:
        transport.set_write_buffer_limits(HIGH_WATER_BYTES)
        self.h2 = _http2()
        self.writable = True
        """Whether the bytes that the peer has not taken are few."""
        self.open = True
        """Whether anything may be sent still."""
        self._transport = transport
        self._on_data = on_data
        self._loop = asyncio.get_running_loop()
        self._flushing = False

    def close(self) -> None:
        """Send nothing more, and free the connection's memory now: h2's objects refer to themselves, and the transport
        has TLS's buffers, so they would stay until the garbage collector runs."""
        self.open = False
        vars(self.h2).clear()
        self._transport = cast(asyncio.Transport, None)
        self._on_data = _nothing

    def send(self, stream_id: int, data: bytes) -> bytes:
        """Send as much as the windows and the socket take; gives the rest."""
        if not self.open:
            return data
        with stream_may_be_over():
            while data and self.writable and self.open:
                room = min(self.h2.local_flow_control_window(stream_id), self.h2.max_outbound_frame_size)
                if room <= 0:
                    break
                self.h2.send_data(stream_id, data[:room])
                data = data[room:]
                self._on_data()
        self.flush_soon()
        return data

    def send_rows(self, stream_id: int, rows: Rows, *, end: bool) -> None:
        """Send headers, or the trailers that end the stream."""
        if self.open:
            with stream_may_be_over():
                self.h2.send_headers(stream_id, rows, end_stream=end)
            self.flush_soon()

    def ask_for(self, size: int, stream_id: int | None = None) -> None:
        """Let the peer send so many more bytes on the stream, or on all together."""
        if self.open:
            with stream_may_be_over():
                self.h2.increment_flow_control_window(size, stream_id)
            self.flush_soon()

    def reset(self, stream_id: int, code: h2.errors.ErrorCodes = h2.errors.ErrorCodes.NO_ERROR) -> None:
        """End a stream; without an error: its answer is whole, and no more is read of it."""
        if self.open:
            with stream_may_be_over():
                self.h2.reset_stream(stream_id, code)
            self.flush_soon()

    def ping(self, content: bytes) -> None:
        """Ask the peer for the same eight bytes."""
        if self.open:
            with stream_may_be_over():
                self.h2.ping(content)
            self.flush_soon()

    def goaway(self, code: h2.errors.ErrorCodes, last_stream: int | None = None) -> None:
        """Say at once that no stream beyond the last one, or the highest that came, will be served.

        Past h2, which sends nothing behind a GOAWAY and could not let running calls end.
        """
        self.flush()
        if self.open:
            last = self.h2.highest_inbound_stream_id if last_stream is None else last_stream
            self._transport.write(_GOAWAY.pack(0, 8, 7, 0, 0, last, int(code)))

    def unsaid(self) -> int:
        """Return how many frames came since this was asked last that gave no event."""
        count, self.h2.unsaid = self.h2.unsaid, 0
        return count

    def flush_soon(self) -> None:
        """Send what there is when the event loop turns."""
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Send what there is."""
        self._flushing = False
        if self.open and (data := self.h2.data_to_send()):
            self._transport.write(data)


def _nothing() -> None:
    """What is done for a DATA frame that nobody sends."""
