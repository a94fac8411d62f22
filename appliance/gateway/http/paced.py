"""Padded event streams: events are added at any time, and one record of a fixed size is written at each tick.

Events that came since the last record are written together; what does not fit waits. The last events (reason, usage,
end mark) are held back until the stream has one of the few lengths that ``padding`` allows: a client that receives them
closes the connection or sends its next request, and that would show where the answer ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from appliance.gateway.front.padding import Padding, Ticks, fill_events, merged
from appliance.gateway.generate_request import Delta
from appliance.gateway.http.dialect import AnswerWriter

MOST_WAITING_BYTES = 64 << 10
"""Bytes that may wait for records; beyond it a session waits too, and its stream's bound holds."""

MOST_GATHERED = 1_024
"""Deltas that may wait for a tick: a token each, of a client that takes no records."""


class PacedEvents:
    """Writes one padded stream. ``send`` takes a record; ``until`` is the caller's deadline in monotonic seconds or
    None."""

    def __init__(
        self, padding: Padding, size: int, ticks: Ticks, send: Callable[[bytes], Awaitable[None]], until: float | None
    ) -> None:
        self.source: Callable[[], bytes] = bytes
        """Called at each tick, and before anything is added, for events that were gathered elsewhere."""
        self.on_room: Callable[[], None] | None = None
        """Called at each tick while there is room."""
        self._padding = padding
        self._size = size
        self._ticks = ticks
        self._send = send
        self._until = until
        self._waiting = bytearray()
        self._closing: bytes | None = None
        self._hurries = False
        self._sent = 0
        self._ticked = asyncio.Event()
        self._pump = asyncio.ensure_future(self._run())

    @property
    def has_room(self) -> bool:
        """Whether more events may be added now."""
        return len(self._waiting) < MOST_WAITING_BYTES and not self._pump.done()

    async def add(self, events: bytes) -> None:
        """Add whole events behind the others; waits for room."""
        self._waiting += self.source() + events
        await self.room()

    async def room(self) -> None:
        """Wait until more events may be added."""
        while not self.has_room and not self._pump.done():
            self._ticked.clear()
            await self._ticked.wait()

    async def end(self, last: bytes) -> bytes:
        """Return the record that ends the stream, at its tick; all records before it are sent by then.

        A second call meanwhile (the session was cut) makes the stream end soon, with the first call's last events.
        """
        if self._closing is None:
            self._waiting += self.source()
            self._closing = last
        else:
            self._hurries = True
        # When a session is cut, the stream goes on: the handler ends it with an error for the client.
        return await asyncio.shield(self._pump)

    def hurry(self) -> None:
        """End soon after the last event, whatever that shows, because the appliance stops."""
        self._hurries = True

    def stop(self) -> None:
        """Cancel the stream: no further record is sent."""
        self._pump.cancel()

    async def _run(self) -> bytes:
        while True:
            await self._ticks.next()
            self._waiting += self.source()
            last = self._closing is not None and self._may_close(self._closing)
            record = fill_events(bytes(self._waiting[: self._size]), self._size)
            del self._waiting[: self._size]
            if last and not self._waiting:
                return record
            await self._send(record)
            self._sent += 1
            self._ticked.set()
            if self.on_room is not None and self.has_room:
                self.on_room()

    def _may_close(self, closing: bytes) -> bool:
        """Return whether the stream may end now; the last events then wait with the others."""
        if not closing:
            return True
        needed = -(-(len(self._waiting) + len(closing)) // self._size)
        late = self._until is not None and time.monotonic() >= self._until - (needed + 1) * self._padding.tick_s
        if self._hurries or late or self._sent + needed == self._padding.records(self._sent + needed):
            self._waiting += closing
            self._closing = b""
            return True
        return False


class PacedSink:
    """Gathers deltas, and writes those of each choice as one event at each tick (``generate_request.Sink``)."""

    def __init__(self, writer: AnswerWriter) -> None:
        self._paced: PacedEvents | None = None
        self._writer = writer
        self._gathered: list[Delta] = []

    def attach(self, paced: PacedEvents) -> None:
        """Connect the sink to its stream, which has begun."""
        self._paced = paced
        paced.source = self._take

    @property
    def ready(self) -> bool:
        """Whether the stream has room."""
        return self._paced is not None and self._paced.has_room and len(self._gathered) < MOST_GATHERED

    def on_ready(self, call: Callable[[], None] | None) -> None:
        """Set what is called at each tick while there is room; None for nothing."""
        if self._paced is not None:
            self._paced.on_room = call

    async def event(self, delta: Delta) -> None:
        """Gather a delta that the session yields as an event; waits for room."""
        self.delta(delta)
        if not self.ready and self._paced is not None:
            await self._paced.room()

    def delta(self, delta: Delta) -> None:
        """Gather the delta for the next tick."""
        self._gathered.append(delta)

    def _take(self) -> bytes:
        gathered, self._gathered = self._gathered, []
        return b"".join(self._writer.delta(delta) for delta in merged(gathered))
