"""A session's deltas as server-sent events, written straight into the connection: no task, no await, no ASGI message.

Only the middle of an answer goes this way. Its head and its end go through ASGI like every other answer's, so uvicorn
keeps its own account of the exchange; in between it would only frame the bytes, which ``GuardedProtocol`` does.
"""

from __future__ import annotations

from collections.abc import Callable

from appliance.api.http_exchange import Exchange
from appliance.api.http_protocol import GuardedProtocol, connection_of
from appliance.api.openai_objects import Writer
from appliance.request import Delta


class SseSink:
    """``appliance.request.Sink`` over one exchange that has begun its event stream."""

    def __init__(self, exchange: Exchange, connection: GuardedProtocol, writer: Writer) -> None:
        self._exchange = exchange
        self._connection = connection
        self._writer = writer

    @property
    def ready(self) -> bool:
        """Whether the connection's buffer has room."""
        return self._connection.writable

    def on_ready(self, call: Callable[[], None] | None) -> None:
        """Call this when room came."""
        self._connection.on_writable = call

    def delta(self, delta: Delta) -> None:
        """Write the event for it, if it has one."""
        chunk = self._writer.delta(delta)
        if chunk is not None:
            self._connection.write_chunk(chunk)
            self._exchange.note_sent()


def sink_of(exchange: Exchange, writer: Writer) -> SseSink | None:
    """The sink of an exchange; None where it does not come over a connection of ours, or is padded."""
    if exchange.padding is not None:
        return None
    connection = connection_of(exchange.scope)
    return SseSink(exchange, connection, writer) if connection is not None else None
