"""Events of streams whose request goes on without its client: kept for a bounded time, so that it reads the rest later.

A stream's events are numbered from 0, and its window holds the newest of them. Its reader says the last number
that it has, and gets those behind it, each once. Single-threaded, as the event loop is.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator

from appliance.common.errors import RateLimitedError
from appliance.gateway.front.cut import Cut

WINDOW_EVENTS = 32_768
"""Newest events of a stream that are kept: one for each token of an answer, and some around them."""

WINDOW_BYTES = 4 << 20
"""Bytes of them, which some 20,000 events for one token have; the last one repeats the whole answer."""

EVENT_OVERHEAD_BYTES = 64
"""Bytes that an event takes beside its own, counted with them."""

WINDOW_S = 300.0
"""Seconds for which a stream is kept after its end."""

ALONE_S = 60.0
"""Seconds for which a request goes on while nobody reads it: a client that has lost its network is back by then, and
what nobody will read costs its tenant no more tokens."""

STREAMS_EACH = 8
"""Streams of one tenant, running or kept: 32 MiB."""

STREAMS = 64
"""Streams of all tenants: 256 MiB."""

READERS_EACH = 8
"""Clients that read one stream at a time: each is sent every token, and a stream has one reader, or two while a client
that has lost its network comes back."""

READ_BYTES = 64 << 10
"""Bytes that a reader takes at a time."""

FULL_RETRY_S = 5.0
"""When a caller with too many running streams, or too many readers of one, may try again."""


class EventWindow:
    """Newest events of one stream."""

    def __init__(self) -> None:
        self._events: list[bytes] = []
        """Those that are kept, behind ``_gone`` empty places: a reader gets at any of them at once."""
        self._gone = 0
        self._news = asyncio.Event()
        self.first = 0
        """Number of the oldest event that is kept."""
        self.size = 0
        """Bytes that the events take."""
        self.ended = False
        """Whether no event follows."""

    @property
    def next(self) -> int:
        """Number of the event that follows the newest."""
        return self.first + self._kept

    def add(self, chunk: bytes) -> None:
        """Take whole events, and give each its number as its id."""
        for event in chunk.split(b"\n\n"):
            if event:
                numbered = b"id: %d\n%b\n\n" % (self.next, event)
                self._events.append(numbered)
                self.size += len(numbered) + EVENT_OVERHEAD_BYTES
        while self._kept > WINDOW_EVENTS or (self.size > WINDOW_BYTES and self._kept > 1):
            self.size -= len(self._events[self._gone]) + EVENT_OVERHEAD_BYTES
            self._events[self._gone] = b""
            self._gone += 1
            self.first += 1
        if self._gone > self._kept:
            del self._events[: self._gone]
            self._gone = 0
        self._tell()

    def forget(self) -> None:
        """Drop all events; a reader that lacks one of them gets no more."""
        self.first = self.next
        self._events.clear()
        self._gone = 0
        self.size = 0
        self._tell()

    def end(self) -> None:
        """Note that no event follows."""
        self.ended = True
        self._tell()

    def read(self, number: int) -> tuple[bytes, int]:
        """Return some events from this number on, which is kept, and the number behind them."""
        found, size = [], 0
        for index in range(self._gone + number - self.first, len(self._events)):
            found.append(self._events[index])
            size += len(found[-1])
            if size >= READ_BYTES:
                break
        return b"".join(found), number + len(found)

    async def more(self, number: int) -> bool:
        """Wait until there is an event with this number; False where the stream ended before."""
        while self.next <= number:
            if self.ended:
                return False
            await self._news.wait()
        return True

    @property
    def _kept(self) -> int:
        return len(self._events) - self._gone

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


class BackgroundRun:
    """One request that goes on without its client."""

    def __init__(self, epoch: bytes, now: float) -> None:
        """``epoch``: what the tenant's key was when it began."""
        self.window = EventWindow()
        self.cut = Cut()
        """Ends the request."""
        self.epoch = epoch
        self.readers = 0
        """Clients that read it now."""
        self.quiet_since = now
        """When it ended, or the last reader left."""

    @contextlib.contextmanager
    def read(self, clock: Callable[[], float]) -> Iterator[EventWindow]:
        """Count a reader while the block runs.

        Raises:
            RateLimitedError: as many read it as may.
        """
        if self.readers >= READERS_EACH:
            raise RateLimitedError(
                "too many clients read this stream at once; end one of them", retry_after_s=FULL_RETRY_S
            )
        self.readers += 1
        try:
            yield self.window
        finally:
            self.readers -= 1
            self.quiet_since = clock()


class BackgroundRuns:
    """The requests of all tenants that go on without their clients, and those that have ended and are kept."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._runs: dict[tuple[str, str], BackgroundRun] = {}
        """Tenant and response -> run, the oldest first."""
        self.dropped = 0
        """Requests ended so far because nobody read them."""

    @property
    def held(self) -> int:
        """Streams kept now."""
        return len(self._runs)

    @property
    def size(self) -> int:
        """Bytes that their events take."""
        return sum(run.window.size for run in self._runs.values())

    def begin(self, tenant: str, response: str, epoch: bytes) -> BackgroundRun:
        """Return a new run; the oldest one that has ended makes room where there are too many, first one that nobody
        reads.

        Raises:
            RateLimitedError: as many run as may.
        """
        own = [key for key in self._runs if key[0] == tenant]
        if len(own) >= STREAMS_EACH:
            self._make_room(own)
        elif len(self._runs) >= STREAMS:
            self._make_room(list(self._runs))
        run = self._runs[tenant, response] = BackgroundRun(epoch, self.clock())
        return run

    def running(self) -> list[BackgroundRun]:
        """Return those that have not ended."""
        return [run for run in self._runs.values() if not run.window.ended]

    def find(self, tenant: str, response: str) -> BackgroundRun | None:
        """Return a tenant's run; None where there is none, or not any more."""
        return self._runs.get((tenant, response))

    def drop(self, tenant: str, response: str, reason: Exception) -> bool:
        """Forget a run with its events, and end it for this reason, which its readers are told or cut off for; False
        where there is none."""
        run = self._runs.pop((tenant, response), None)
        if run is not None:
            run.window.forget()
            run.cut.end(reason)
        return run is not None

    def look(self, epoch_of: Callable[[str], bytes | None], reason: Callable[[], Exception]) -> None:
        """Forget what is over for long enough, what nobody reads, and what is of a tenant whose key has changed or of
        whom nothing may be kept (None)."""
        now = self.clock()
        for (tenant, response), run in list(self._runs.items()):
            alone = not run.readers and not run.window.ended and now - run.quiet_since > ALONE_S
            over = run.window.ended and not run.readers and now - run.quiet_since > WINDOW_S
            self.dropped += alone
            if alone or over or epoch_of(tenant) != run.epoch:
                self.drop(tenant, response, reason())

    def _make_room(self, among: list[tuple[str, str]]) -> None:
        ended = [key for key in among if self._runs[key].window.ended]
        if not ended:
            raise RateLimitedError(
                "too many background responses at once; wait for one to end, or delete it", retry_after_s=FULL_RETRY_S
            )
        chosen = next((key for key in ended if not self._runs[key].readers), ended[0])
        self._runs.pop(chosen).window.forget()  # its events too: a slow reader would keep them beyond the bound
