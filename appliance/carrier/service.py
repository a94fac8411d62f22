"""The carrier as a service: sealed bytes from a Unix socket to a store and back, a thread for each connection.

It has a network and no key but those by which the store knows it: it cannot read, forge or name what it carries. Under
systemd the socket is made by ``athanor-carrier.socket`` for the supervisor's user alone; the launcher's child makes it
for its own user.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import structlog

from appliance.carrier.store import ObjectStore
from appliance.common import notify
from appliance.common.carrier_wire import (
    ANSWER,
    ENTRY,
    REQUEST,
    CarrierRequest,
    Order,
    check_head,
    decode_request,
    read_exactly,
    send_all,
)
from appliance.common.config import ApplianceConfig
from appliance.common.errors import CarrierError, reason_of
from appliance.common.kv_store_config import KvStoreConfig, carrier_socket

log = structlog.get_logger()

MAX_CONNECTIONS = 16
"""Most connections at once: a supervisor has two, and four more where it is a member of a fleet; its successor has as
many, and a few are about to end, whose requests were left. A request holds one object."""

REQUEST_S = 5.0
"""Seconds in which a request comes whole once it has begun, and an answer is taken."""

BACKLOG = 2 * MAX_CONNECTIONS
"""Connections that wait to be taken: who comes to a full queue is refused by the kernel, and counts the carrier as
away."""

TURN_S = 1.0
"""Seconds of the longest wait for a connection, and so until a stop is seen."""

SAY_EVERY_S = 60.0
"""Seconds between two lines about a store that is away."""


class CarrierService:
    """Serves connections of one listening socket until ``stop``."""

    def __init__(self, config: KvStoreConfig, listening: socket.socket) -> None:
        self._config = config
        self._listening = listening
        self._stop = threading.Event()
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._said_at = -SAY_EVERY_S

    def run(self) -> None:
        """Accept connections until the stop, then close all."""
        interval = min(notify.watchdog_interval_s() or TURN_S, TURN_S)
        while not self._stop.is_set():
            notify.watchdog()
            self._listening.settimeout(interval)
            with suppress(TimeoutError, InterruptedError):
                self._take(self._listening.accept()[0])
        with self._lock:
            for peer in self._open:
                with suppress(OSError):
                    peer.shutdown(socket.SHUT_RDWR)

    def stop(self) -> None:
        """End ``run`` within ``TURN_S``."""
        self._stop.set()

    def _take(self, peer: socket.socket) -> None:
        with self._lock:
            if len(self._open) >= MAX_CONNECTIONS:
                log.warning("refused a connection: the carrier has as many as it takes", connections=MAX_CONNECTIONS)
                peer.close()
                return
            self._open.add(peer)
        threading.Thread(target=self._serve, args=(peer,), name="carrier", daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        store = ObjectStore(self._config)
        try:
            while not self._stop.is_set():
                peer.settimeout(None)
                first = peer.recv(1)
                if not first:
                    return
                answer(peer, store, first)
                self._say(store.problem)
        except (BrokenPipeError, ConnectionResetError):
            # A tenant that leaves its requests has that happen as often as it likes.
            log.debug("a question was left before its answer was taken")
        except (CarrierError, OSError) as error:
            log.warning("a connection to the carrier ended", problem=str(error))
        finally:
            store.close()
            with self._lock:
                self._open.discard(peer)
            peer.close()

    def _say(self, problem: str) -> None:
        now = time.monotonic()
        if problem and now - self._said_at > SAY_EVERY_S:
            self._said_at = now
            log.warning("the store of sealed KV does not serve; blocks are computed anew", problem=problem)


def answer(peer: socket.socket, store: ObjectStore, first: bytes) -> None:
    """Read the request whose first byte has come, carry it out at the store and answer it.

    Raises:
        CarrierError: it is no request of this release, or the peer closed the connection.
        OSError: the connection failed, or the request did not come, or the answer was not taken, in ``REQUEST_S``.
    """
    until = time.monotonic() + REQUEST_S
    head = first + bytes(read_exactly(peer, REQUEST.size - len(first), until))
    _, count, _ = check_head(head)
    request = decode_request(head, bytes(read_exactly(peer, count * ENTRY.size, until)))
    if request.order is Order.GET:
        for status, body in store.get(request.names, request.sizes):
            send_all(peer, (ANSWER.pack(status, len(body)), body), time.monotonic() + REQUEST_S)
    elif request.order is Order.PUT:
        statuses = store.put(_bodies(peer, request, until), count, request.seconds)
        send_all(peer, (bytes(statuses),), time.monotonic() + REQUEST_S)
    else:
        send_all(peer, (bytes(store.drop(request.names)),), time.monotonic() + REQUEST_S)


def _bodies(peer: socket.socket, request: CarrierRequest, until: float) -> Iterator[tuple[bytes, bytearray]]:
    for name, size in zip(request.names, request.sizes, strict=True):
        yield name, read_exactly(peer, size, until)


def run_service(load: Callable[[], ApplianceConfig]) -> None:
    """Carry until SIGTERM. Without ``kv_store`` in the configuration there is nothing to do, and the service ends at
    once, which is no failure.

    Raises:
        CarrierError: the socket cannot be used.
    """
    config = load()
    if config.kv_store is None:
        notify.ready("the configuration has no kv_store: nothing to do")
        return
    path = carrier_socket(config.kv_store, config.run_dir)
    given = notify.held().get("carrier")
    try:
        listening = listen(path) if given is None else socket.socket(fileno=given)
    except OSError as error:
        raise CarrierError(f"cannot listen on {path}: {reason_of(error)}") from error
    service = CarrierService(config.kv_store, listening)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: service.stop())
    notify.ready(f"carries sealed KV to {config.kv_store.store}")
    log.info("the carrier takes sealed KV", socket=str(path), store=config.kv_store.store)
    with listening:
        service.run()
    notify.stopping()
    if given is None:
        path.unlink(missing_ok=True)


def listen(path: Path) -> socket.socket:
    """Listen on a socket that only its user and root may open."""
    path.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    before = os.umask(0o177)
    try:
        listening.bind(str(path))
        listening.listen(BACKLOG)
    except OSError:
        listening.close()
        raise
    finally:
        os.umask(before)
    return listening
