"""Readers on the way of sealed KV: what the supervisor sends to the carrier, what the carrier and a store answer.

Each reader gets the bytes on a real socket whose other end is closed behind them.
"""

from __future__ import annotations

import socket
import tempfile
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

from appliance.carrier.service import answer as serve
from appliance.carrier.store import ObjectStore
from appliance.common.carrier_wire import (
    ANSWER,
    NAME_BYTES,
    CarrierRequest,
    ObjectStatus,
    Order,
    read_object,
    read_statuses,
)
from appliance.common.kv_store_config import KvStoreConfig

MAX_BYTES = 64 << 10
"""Bytes of one input: what a socket takes at once, so that one thread can write and then read."""

PATIENCE_S = 5.0

_FOLDER = tempfile.TemporaryDirectory(prefix="ath-fz-", dir="/tmp")
_SIZES = (3, 40)
"""Bytes of the objects that are asked for."""


class ReplyRefusedError(Exception):
    """The store's reply was not taken for the objects, as it should not be."""


def request(data: bytes) -> None:
    """Serve the bytes as requests to the carrier, whose store is away."""
    store = ObjectStore(_config("unix:/nonexistent/store"))
    mine, peer = socket.socketpair()
    with mine, peer:
        mine.sendall(data[:MAX_BYTES])
        mine.shutdown(socket.SHUT_WR)
        peer.settimeout(PATIENCE_S)
        while first := peer.recv(1):
            serve(peer, store, first)


def answer(data: bytes) -> None:
    """Read the bytes as the carrier's answers to a question for two objects, and to a write of two."""
    mine, peer = socket.socketpair()
    with mine, peer:
        mine.sendall(data[:MAX_BYTES])
        mine.shutdown(socket.SHUT_WR)
        until = time.monotonic() + PATIENCE_S
        for size in _SIZES:
            status, body = read_object(peer, size, until)
            if len(body) != (size if status is ObjectStatus.OK else 0):
                raise RuntimeError("an object has another size than what was asked for")
        if len(read_statuses(peer, len(_SIZES), until)) != len(_SIZES):
            raise RuntimeError("an object has no status")


def reply(data: bytes) -> None:
    """Read the bytes as a store's replies to a question for two objects, to a write of two and to a drop of two.

    Raises:
        ReplyRefusedError: not all were taken.
    """
    told = []
    for do in range(3):
        store = ObjectStore(_config(f"unix:{_hostile_store().give(data[:MAX_BYTES])}"))
        if do == 0:
            found = list(store.get(_NAMES, _SIZES))
            if any(len(body) != size for (status, body), size in zip(found, _SIZES, strict=True) if not status):
                raise RuntimeError("an object has another size than what was asked for")
            told += [status for status, _ in found]
        elif do == 1:
            told += store.put([(name, bytearray(size)) for name, size in zip(_NAMES, _SIZES, strict=True)], 2, 60)
        else:
            told += store.drop(_NAMES)
        store.close()
    if len(told) != 3 * len(_NAMES):
        raise RuntimeError("an object has no status")
    # No reply suits a question and a write both, so three whole pairs cannot be.
    if told.count(ObjectStatus.OK) < len(_NAMES):
        raise ReplyRefusedError


class _HostileStore:
    """Listens, and answers each connection with the same bytes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._data = b""
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(path))
        self._listening.listen()
        threading.Thread(target=self._run, name="hostile store", daemon=True).start()

    def give(self, data: bytes) -> Path:
        """Answer from now on with these bytes; returns the socket."""
        self._data = data
        return self._path

    def _run(self) -> None:
        while True:
            peer, _ = self._listening.accept()
            with peer, suppress(OSError):
                peer.sendall(self._data)
                peer.shutdown(socket.SHUT_WR)
                # What was asked is read: a connection that is closed before loses what it has sent.
                peer.settimeout(PATIENCE_S)
                while peer.recv(MAX_BYTES):
                    pass


@cache
def _hostile_store() -> _HostileStore:
    return _HostileStore(Path(_FOLDER.name, "s"))


def _config(address: str) -> KvStoreConfig:
    return KvStoreConfig.model_validate({"store": address, "size": 1 << 20})


_NAMES = (bytes(NAME_BYTES), b"\x01" * NAME_BYTES)
REQUESTS = (
    CarrierRequest(Order.GET, _NAMES, _SIZES).encode(),
    CarrierRequest(Order.PUT, _NAMES, _SIZES, 60).encode() + bytes(sum(_SIZES)),
    CarrierRequest(Order.DROP, _NAMES, (0, 0)).encode(),
)
ANSWERS = (
    ANSWER.pack(ObjectStatus.OK, 3) + b"abc" + ANSWER.pack(ObjectStatus.OK, 40) + bytes(40) + bytes(2),
    ANSWER.pack(ObjectStatus.ABSENT, 0) + ANSWER.pack(ObjectStatus.AWAY, 0) + bytes((ObjectStatus.REFUSED, 0)),
)
REPLIES = (b"$3\r\nabc\r\n$40\r\n" + bytes(40) + b"\r\n", b"+OK\r\n+OK\r\n", b":1\r\n:0\r\n")
"""Good bytes to begin from."""
