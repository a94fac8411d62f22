"""What the supervisor and the carrier of sealed KV say to each other: frames on a Unix stream socket.

A request is ``version u8, order u8, count u16, seconds u32``, then ``name 32, size u32`` for each object, all
little-endian. The bytes of the objects of a ``PUT`` follow, in their order. Answers come in that order too: a status
byte for each object of a ``PUT`` or ``DROP``; ``status u8, size u32`` and the bytes for each object of a ``GET``.

Nothing here is a key and nothing is in clear: names are HMACs, bytes are ciphertext without the header that names
object and KEK (``isolation.keys.seal``).
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from appliance.common.errors import CarrierError

VERSION = 1

NAME_BYTES = 32
"""Bytes of an object's name."""

MAX_OBJECTS = 64
"""Most objects of one request."""

MAX_OBJECT_BYTES = 6 << 20
"""Most bytes of an object: the largest block that is spilled has 5 MiB."""

MAX_SECONDS = 7 * 86_400
"""Longest time for which an object is kept."""

REQUEST = struct.Struct("<BBHI")
ENTRY = struct.Struct(f"<{NAME_BYTES}sI")
ANSWER = struct.Struct("<BI")


class Order(IntEnum):
    """What a request asks for."""

    PUT = 1
    GET = 2
    DROP = 3


class ObjectStatus(IntEnum):
    """What became of one object."""

    OK = 0
    ABSENT = 1
    """The store has nothing under the name."""
    OTHER_LENGTH = 2
    """The store has something of another length, which was not read."""
    REFUSED = 3
    """The store says no: it is full, or its user may not."""
    AWAY = 4
    """The store does not answer, or says what no store says."""


@dataclass(frozen=True, slots=True)
class CarrierRequest:
    """One request without the bytes that follow it."""

    order: Order
    names: tuple[bytes, ...]
    sizes: tuple[int, ...]
    """Bytes of each object; 0 in a ``DROP``."""
    seconds: int = 0
    """Time for which a ``PUT`` is kept."""

    def encode(self) -> bytes:
        """Return the request's bytes."""
        head = REQUEST.pack(VERSION, self.order, len(self.names), self.seconds)
        return head + b"".join(map(ENTRY.pack, self.names, self.sizes))


def decode_request(head: bytes, entries: bytes) -> CarrierRequest:
    """Read a request from its head and its entries.

    Raises:
        CarrierError: it is none of this release, or beyond its bounds.
    """
    order, count, seconds = check_head(head)
    if len(entries) != count * ENTRY.size:
        raise CarrierError("a request to the carrier is cut off")
    found = list(ENTRY.iter_unpack(entries))
    names, sizes = tuple(name for name, _ in found), tuple(size for _, size in found)
    if not all((size == 0) == (order is Order.DROP) and size <= MAX_OBJECT_BYTES for size in sizes):
        raise CarrierError("a request to the carrier names an object of a size that none has")
    return CarrierRequest(order, names, sizes, seconds)


def check_head(head: bytes) -> tuple[Order, int, int]:
    """Read the head of a request: order, number of objects and seconds.

    Raises:
        CarrierError: it is none of this release, or beyond its bounds.
    """
    version, order, count, seconds = REQUEST.unpack(head)
    if version != VERSION or order not in list(Order):
        raise CarrierError("no request of this release; install one release alone and restart the carrier")
    if not 1 <= count <= MAX_OBJECTS or seconds > MAX_SECONDS or (seconds > 0) != (order == Order.PUT):
        raise CarrierError("a request to the carrier is beyond its bounds")
    return Order(order), count, seconds


def read_object(peer: socket.socket, size: int, until: float) -> tuple[ObjectStatus, bytes | bytearray]:
    """Read the carrier's answer for one object of a ``GET``, which has ``size`` bytes or none.

    Raises:
        CarrierError: it is none of this release, or the carrier closed the connection.
        OSError: the connection failed, or the time is over (``TimeoutError``).
    """
    status, length = ANSWER.unpack(read_exactly(peer, ANSWER.size, until))
    if status not in list(ObjectStatus) or length != (size if status == ObjectStatus.OK else 0):
        raise CarrierError("the carrier answers what none of this release does")
    return ObjectStatus(status), read_exactly(peer, length, until) if length else b""


def read_statuses(peer: socket.socket, count: int, until: float) -> list[ObjectStatus]:
    """Read the carrier's answer to a ``PUT`` or ``DROP`` of ``count`` objects.

    Raises:
        CarrierError: it is none of this release, or the carrier closed the connection.
        OSError: the connection failed, or the time is over (``TimeoutError``).
    """
    answers = read_exactly(peer, count, until)
    if not all(status in list(ObjectStatus) for status in answers):
        raise CarrierError("the carrier answers what none of this release does")
    return [ObjectStatus(status) for status in answers]


def read_exactly(peer: socket.socket, count: int, until: float | None = None) -> bytearray:
    """Read so many bytes; with ``until``, a time of ``time.monotonic``, all of them before it.

    Raises:
        CarrierError: the peer closed the connection.
        OSError: the connection failed, or the time is over (``TimeoutError``).
    """
    data = bytearray(count)
    view, at = memoryview(data), 0
    while at < count:
        if until is not None:
            peer.settimeout(left(until))
        read = peer.recv_into(view[at:])
        if read == 0:
            raise CarrierError("the connection was closed")
        at += read
    return data


def send_all(peer: socket.socket, parts: Sequence[bytes | bytearray | memoryview], until: float) -> None:
    """Send bytes before a time of ``time.monotonic``.

    Raises:
        OSError: the connection failed, or the time is over (``TimeoutError``).
    """
    for part in parts:
        peer.settimeout(left(until))
        peer.sendall(part)


def left(until: float) -> float:
    """Return the seconds until a time.

    Raises:
        TimeoutError: it is over.
    """
    rest = until - time.monotonic()
    if rest <= 0:
        raise TimeoutError("the time is over")
    return rest
