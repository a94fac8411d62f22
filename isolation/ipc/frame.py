"""The header of a frame, and the checks that every arm of the codec shares.

A frame is ``length u32, kind u16, version u16, request u64`` and a payload, little-endian, packed
without gaps. ``length`` counts the whole frame. ``request`` is 0 in messages that name no request.

A message has exactly one frame and a frame at most one message: flags are 0 or 1, nothing is
padded, nothing may trail. Both directions check a message with the same function, which raises
``OutOfBoundsError``; ``codec`` alone turns that into our fault or the peer's.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from math import isfinite
from typing import Any

from isolation.ipc.messages import Message

HEADER = struct.Struct("<IHHQ")
HEADER_BYTES = HEADER.size

Frame = bytes | bytearray
"""One whole frame: the receiver's own copy, which it overwrites once it is decoded. An arm keeps no view of it."""

MAX_U32 = 0xFFFF_FFFF
MAX_U64 = 0xFFFF_FFFF_FFFF_FFFF


class Kind(IntEnum):
    """The number of each message on the wire; a number is never given to another message."""

    HELLO = 1
    CONFIGURE = 2
    ENGINE_READY = 3
    TEXT_READY = 4
    SUBMIT = 16
    ABORT = 17
    DRAIN = 18
    STEP_OUTPUT = 19
    ENCODE = 32
    ENCODED = 33
    DECODE = 34
    DECODED = 35
    READ_VOCABULARY = 36
    VOCABULARY = 37
    FAILED = 38
    EMBED = 50
    EMBEDDING = 51
    KV_QUOTAS = 56
    KV_USAGE = 57
    PUBLIC_PREFIXES = 58
    PUBLIC_USAGE = 59
    OPEN_GRAMMAR = 64
    ADVANCE = 65
    CLOSE_GRAMMAR = 66
    MASKS = 67
    KEEP = 80
    FETCH = 81
    FETCHED = 82
    FORGET = 83


class OutOfBoundsError(ValueError):
    """A message or a payload is outside the protocol's bounds; never leaves the codec."""


@dataclass(frozen=True, slots=True)
class Arm:
    """How one kind of message travels; the codec runs ``check`` in both directions."""

    kind: Kind
    message: type[Message]
    check: Callable[[Any], None]
    """Raises ``OutOfBoundsError`` or another ValueError for a message outside the bounds."""
    pack: Callable[[Any], bytes]
    """The payload of a checked message."""
    unpack: Callable[[int, Frame], Message]
    """The message of a request id and a whole frame; raises ValueError or ``struct.error``."""
    names_request: bool = True
    """Whether the message has a wire id."""


def require(holds: bool, what: str) -> None:
    """Raise ``OutOfBoundsError`` with this text unless the condition holds."""
    if not holds:
        raise OutOfBoundsError(what)


def require_range(name: str, value: float, low: float, high: float) -> None:
    """Raise ``OutOfBoundsError`` unless ``low <= value <= high``; NaN and infinity never pass."""
    if not (low <= value <= high and isfinite(value)):
        raise OutOfBoundsError(f"{name} is {value}, outside {low}..{high}")


def require_length(name: str, length: int, limit: int) -> None:
    """Raise ``OutOfBoundsError`` when there are more bytes or items than the limit."""
    if length > limit:
        raise OutOfBoundsError(f"{name} has {length} bytes or items, above the limit of {limit}")


def require_array(name: str, values: array[int] | array[float], typecode: str) -> None:
    """Raise ``OutOfBoundsError`` unless this is an array of that typecode."""
    if values.typecode != typecode:
        raise OutOfBoundsError(f"{name} is not an array of typecode {typecode}")


def require_utf8(name: str, data: bytes) -> None:
    """Raise ``OutOfBoundsError`` unless the bytes are UTF-8."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        raise OutOfBoundsError(f"{name} is not UTF-8 at byte {error.start}") from None


def flag(byte: int) -> bool:
    """A byte that must be 0 or 1, as a truth value."""
    if byte > 1:
        raise OutOfBoundsError(f"a flag is {byte}, neither 0 nor 1")
    return byte == 1


def take_array(typecode: str, frame: Frame, start: int, end: int) -> array[int]:
    """An array of the frame's bytes ``start:end``, which the caller has checked to be there."""
    values: array[int] = array(typecode)
    # The frame is our own copy, so a view of it reads nothing that the peer can still change.
    values.frombytes(memoryview(frame)[start:end])
    return values


def take_bytes(frame: Frame, start: int, end: int | None = None) -> bytes:
    """A copy of the frame's bytes ``start:end``."""
    return bytes(memoryview(frame)[start:end])
