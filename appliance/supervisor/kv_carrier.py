"""Supervisor's way to the carrier of sealed KV: one connection that asks, and a thread with one that writes.

Nothing here waits long. A question has ``PATIENCE_S``; what is written lies in a queue of bounded bytes, and what does
not fit, or is beyond its owner's part (``kv_queue``), is refused at once. After a failure the carrier counts as away
for ``RETRY_S``. Names that it or the store did not take to drop are told again once both serve.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from appliance.common.carrier_wire import (
    NAME_BYTES,
    CarrierRequest,
    ObjectStatus,
    Order,
    left,
    read_object,
    read_statuses,
    send_all,
)
from appliance.common.errors import CarrierError
from appliance.common.kv_store_state import KvStoreState
from appliance.supervisor.kv_queue import NOT_TAKEN, Put, WriteQueue

log = structlog.get_logger()

PATIENCE_S = 0.2
"""Seconds for all objects of one question. An engine computes a block for which it has waited 0.25 s
(``engine.core.kv.spill.PATIENCE_NS``)."""

WRITE_S = 5.0
"""Seconds for one request of the writing thread and its answer."""

REST_BYTES = 256 << 10
REST_S = 0.02
"""Most bytes that are read of the rest of an answer that is of no use any more, a millisecond of them, and seconds for
that: a new connection is one of the carrier to the store as well, with its handshake and password."""

RETRY_S = 2.0
"""Seconds after a failure in which the carrier is not asked."""

SAY_EVERY_S = 60.0
"""Seconds between two lines about a carrier that does not serve."""

PROBE_S = 5.0
"""Seconds without anything to write after which a name that nobody has is dropped, to see whether the store serves;
and between two looks for the mark."""

LATE_S = 10.0
"""Seconds for which the store counts as away after an answer did not come in ``PATIENCE_S``: longer than from one
question to the next while requests come."""

REFUSED_S = 60.0
"""Seconds for which the store counts as refusing after it has refused something."""

LINGER_S = 1.0
"""Seconds for which ``close`` waits for the writing thread."""


class KvCarrier:
    """Client of one carrier; all methods may be called from any thread."""

    def __init__(self, path: Path, seconds: int, *, names_recur: bool = False) -> None:
        """``seconds``: time for which the store keeps an object. ``names_recur``: as ``WriteQueue``."""
        self._path = path
        self._seconds = seconds
        self._asking = threading.Lock()
        self._peer: socket.socket | None = None
        self._away_until, self._broken_until = 0.0, 0.0
        """Monotonic times until which nothing is asked, and nothing taken to be written."""
        self._said_at = -SAY_EVERY_S
        self._state = KvStoreState.SERVES
        self._refused_at, self._late_at = -REFUSED_S, -LATE_S
        self.on_look: Callable[[bool], None] | None = None
        """Called from the thread that writes each time that it finds the store serving, with whether the store has lost
        all that it had. None: nobody asks, and no loss is noticed. Set by the owner."""
        self._mark = b""
        """Name, and bytes, of an object that is in the store as long as it loses nothing; empty: none is there."""
        self._mark_at, self._look_at = 0.0, 0.0
        """Monotonic times at which the mark was written, and at which it is looked for next."""
        self._changed = threading.Condition()
        self._queue = WriteQueue(names_recur=names_recur)
        self._closing = False
        self._thread = threading.Thread(target=self._write, name="kv carrier", daemon=True)
        self._thread.start()

    @property
    def state(self) -> KvStoreState:
        """State of carrier and store as the last answers told it, or the last ones that did not come."""
        now = time.monotonic()
        if self._state is not KvStoreState.SERVES:
            return self._state
        if now - self._late_at < LATE_S:
            return KvStoreState.STORE_AWAY
        return KvStoreState.REFUSES if self.refuses else KvStoreState.SERVES

    @property
    def refuses(self) -> bool:
        """Whether the store has refused something in the last ``REFUSED_S``."""
        return time.monotonic() - self._refused_at < REFUSED_S

    def get(
        self, names: Sequence[bytes], sizes: Sequence[int], wanted: Callable[[], bool] = lambda: True
    ) -> list[tuple[ObjectStatus, bytes | bytearray]]:
        """Ask for objects of these names and sizes; gives what became of each within ``PATIENCE_S``. Where they are not
        ``wanted`` any more, which is asked between two of them, all counts as away, and nothing of the rest is kept."""
        until = time.monotonic() + PATIENCE_S
        found: list[tuple[ObjectStatus, bytes | bytearray]] = []
        # Who waited long for another's question does not ask: too short a time would look like a carrier that is away.
        if time.monotonic() >= self._away_until and self._asking.acquire(timeout=PATIENCE_S / 2):
            try:
                peer = self._peer = self._peer or self._connect(left(until))
                send_all(peer, (CarrierRequest(Order.GET, tuple(names), tuple(sizes)).encode(),), until)
                for place, size in enumerate(sizes):
                    if not wanted():
                        found.clear()
                        self._pass_over(peer, sizes[place:], until)
                        break
                    found.append(read_object(peer, size, until))
                if found:  # Else nothing was read that tells whether it serves.
                    self._note(_answered([status for status, _ in found]))
            except (CarrierError, OSError) as error:
                late = isinstance(error, TimeoutError) and self._peer is not None
                if late and found:  # It serves, and is slow: who asks for less, or again, gets it.
                    self._disconnect()
                else:
                    # Which of both is slow is not known here; the writing thread has the patience to find out.
                    self._fail(error, late=late)
            finally:
                self._asking.release()
        return found + [(ObjectStatus.AWAY, b"")] * (len(names) - len(found))

    def _pass_over(self, peer: socket.socket, sizes: Sequence[int], until: float) -> None:
        """Read the rest of an answer, or close the connection where that is much or late. It says nothing of whether
        the store serves."""
        if sum(sizes) > REST_BYTES:
            self._disconnect()
            return
        until = min(until, time.monotonic() + REST_S)
        try:
            for size in sizes:
                read_object(peer, size, until)
        except (CarrierError, OSError):
            self._disconnect()

    def offer(
        self,
        name: bytes,
        body: memoryview,
        done: Callable[[ObjectStatus], None],
        wanted: Callable[[], bool] = lambda: True,
        *,
        owner: str,
    ) -> bool:
        """Queue an object; False where there is no room for its ``owner``, or the carrier is away. ``done`` is called
        from the thread, and ``wanted`` before the object is sent: where it says no, the object is not sent and ``done``
        is not called."""
        with self._changed:
            away = self._closing or time.monotonic() < self._broken_until
            if away or not self._queue.offer(Put(name, body, done, wanted, owner)):
                return False
            self._changed.notify()
        return True

    def drop(self, name: bytes, *, later: bool = False) -> None:
        """Have the store forget an object, as soon as it serves; ``later``: behind what is written meanwhile. One that
        is not on its way yet is not written, and its ``done`` is not called."""
        with self._changed:
            self._queue.drop(name, later=later)
            self._changed.notify()

    def close(self) -> None:
        """End the thread and both connections; what waits is not written."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(LINGER_S)
        with self._asking:
            self._disconnect()

    def _connect(self, patience_s: float) -> socket.socket:
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        peer.settimeout(patience_s)
        try:
            peer.connect(str(self._path))
        except OSError:
            peer.close()
            raise
        return peer

    def _fail(self, error: Exception, *, late: bool = False) -> None:
        """Note that the carrier is away, or that an answer of it is late, and close the connection that asks: an answer
        may still be on it."""
        now = time.monotonic()
        if now - self._said_at >= SAY_EVERY_S:
            self._said_at = now
            log.warning("the carrier of sealed KV does not serve", problem=str(error) or type(error).__name__)
        self._away_until = now + RETRY_S
        if late:  # What is written has more patience: where it were refused, all of it would be sent again.
            self._late_at = now
        else:
            self._broken_until = self._away_until
            self._state = KvStoreState.CARRIER_AWAY
        self._disconnect()

    def _disconnect(self) -> None:
        peer, self._peer = self._peer, None
        if peer is not None:
            peer.close()

    def _write(self) -> None:
        """Write what is queued until the end."""
        peer: socket.socket | None = None
        while self._has_work():
            peer = self._look(self._write_some(peer))
        if peer is not None:
            peer.close()

    def _has_work(self) -> bool:
        """Wait for something in the queue; False at the end."""
        with self._changed:
            while not (self._queue or self._closing):
                if not self._changed.wait(PROBE_S):
                    self._queue.probe()
            return not self._closing

    def _write_some(self, peer: socket.socket | None) -> socket.socket | None:
        """Write one request of at most ``BATCH_BYTES``; gives the connection, or None where it failed."""
        with self._changed:
            batch = puts, drops = self._queue.batch()
        if not (puts or drops):
            return peer
        bodies = tuple(body for _, body in puts)
        statuses = [ObjectStatus.AWAY] * (len(puts) + len(drops))
        try:
            peer = peer or self._connect(WRITE_S)
            if drops:
                statuses = self._send(peer, CarrierRequest(Order.DROP, drops, (0,) * len(drops)), ())
            else:
                names = tuple(one.name for one, _ in puts)
                request = CarrierRequest(Order.PUT, names, tuple(map(len, bodies)), self._seconds)
                statuses = self._send(peer, request, bodies)
        except (CarrierError, OSError) as error:
            if peer is not None:
                peer.close()
            peer = None
            with self._asking:
                self._fail(error)
        with self._changed:
            self._queue.over(batch, statuses)
        for (one, _), status in zip(puts, statuses if puts else (), strict=True):
            one.done(status)
        return peer

    def _look(self, peer: socket.socket | None) -> socket.socket | None:
        """See every ``PROBE_S`` whether the store still has the mark of this process; gives the connection, or None
        where it failed."""
        now = time.monotonic()
        if self.on_look is None or peer is None or now < self._look_at:
            return peer
        self._look_at = now + PROBE_S
        try:
            self._compare(peer, self.on_look, now)
        except (CarrierError, OSError) as error:
            peer.close()
            with self._asking:
                self._fail(error)
            return None
        return peer

    def _compare(self, peer: socket.socket, on_look: Callable[[bool], None], now: float) -> None:
        mark, lost = self._mark, False
        if mark:
            until = now + WRITE_S
            send_all(peer, (CarrierRequest(Order.GET, (mark,), (len(mark),)).encode(),), until)
            status, body = read_object(peer, len(mark), until)
            if status in NOT_TAKEN:
                return  # Away, or reading its memory back: what it has is seen later.
            lost = status is not ObjectStatus.OK or body != mark
        if lost or not mark or now - self._mark_at >= self._seconds / 2:
            # A new name where the old one is gone: a replica that lags behind may still have that.
            fresh = mark if mark and not lost else secrets.token_bytes(NAME_BYTES)
            request = CarrierRequest(Order.PUT, (fresh,), (len(fresh),), self._seconds)
            written = self._send(peer, request, (memoryview(fresh),)) == [ObjectStatus.OK]
            if written or lost:
                self._mark, self._mark_at = fresh if written else b"", now
            if not (written or lost):
                return  # It is away, or full.
        if lost:
            log.warning("the store of sealed KV has lost what it had; hosts write what they compute anew")
        on_look(lost)

    def _send(self, peer: socket.socket, request: CarrierRequest, bodies: tuple[memoryview, ...]) -> list[ObjectStatus]:
        until = time.monotonic() + WRITE_S
        send_all(peer, (request.encode(), *bodies), until)
        found = read_statuses(peer, len(request.names), until)
        self._note(found)
        return found

    def _note(self, statuses: Sequence[ObjectStatus]) -> None:
        """Take from an answer whether the store serves."""
        away = ObjectStatus.AWAY in statuses
        self._state = KvStoreState.STORE_AWAY if away else KvStoreState.SERVES
        if ObjectStatus.REFUSED in statuses:
            self._refused_at = time.monotonic()


def _answered(statuses: list[ObjectStatus]) -> list[ObjectStatus]:
    """Return the answers up to the first of another length: behind that the carrier reads nothing."""
    other = ObjectStatus.OTHER_LENGTH
    return statuses[: statuses.index(other) + 1] if other in statuses else statuses
