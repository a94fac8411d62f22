"""The header of a frame, and the checks that every arm of the codec shares.

A frame is ``length u32, kind u16, version u16, request u64`` and a payload, little-endian, packed
without gaps. ``length`` counts the whole frame. ``request`` is 0 in messages that name no request.

Most messages are a struct of their fields with, at most, one field behind it that runs to the end of the frame:
``record_codec`` and ``rows_codec`` make their codecs from a table of names. The others are written out, the hot ones
among them.

A message has exactly one frame and a frame at most one message: flags are 0 or 1, nothing is
padded, nothing may trail. Both directions check a message with the same function, which raises
``OutOfBoundsError``; ``codec`` alone turns that into our fault or the peer's.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import isfinite
from operator import attrgetter
from typing import Any

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
    PING = 20
    PONG = 21
    PREFETCH = 22
    ENCODE = 32
    ENCODED = 33
    DECODE = 34
    DECODED = 35
    READ_VOCABULARY = 36
    VOCABULARY = 37
    FAILED = 38
    READ_OUTPUT = 39
    OUTPUT_READ = 40
    CLOSE_OUTPUT = 41
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
    SHARE = 84
    WITHDRAW = 85
    UNWANTED = 86
    LOST = 87


class OutOfBoundsError(ValueError):
    """A message or a payload is outside the protocol's bounds; never leaves the codec."""


@dataclass(frozen=True, slots=True)
class MessageCodec:
    """How one kind of message travels; the codec runs ``check`` in both directions."""

    kind: Kind
    message: type[Any]
    check: Callable[[Any], None]
    """Raises ``OutOfBoundsError`` or another ValueError for a message outside the bounds."""
    pack: Callable[[Any], bytes]
    """The payload of a checked message."""
    unpack: Callable[[int, Frame], Any]
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


class Record:
    """Fields of a class that travel as one struct, little-endian and without gaps.

    Args:
        fields: ``NAME:CODE`` of each field in wire order, with the codes of ``struct``. Bytes have exactly that length;
            ``?`` is a byte that must be 0 or 1.
        convert: enumerations of fields.
    """

    def __init__(self, fields: str = "", **convert: Callable[[int], Any]) -> None:
        pairs = [field.split(":") for field in fields.split()]
        self.layout = struct.Struct("<" + "".join(code.replace("?", "B") for _, code in pairs))
        self.names = tuple(name for name, _ in pairs)
        # Of two names or more attrgetter gives a tuple.
        self._get: Callable[[Any], tuple[Any, ...]] = attrgetter(*self.names) if len(pairs) > 1 else self._get_one
        self._lengths = [(name, int(code[:-1])) for name, code in pairs if code.endswith("s")]
        convert |= {name: flag for name, code in pairs if code == "?"}
        self._makers = [(self.names.index(name), make) for name, make in convert.items()]

    def _get_one(self, value: Any) -> tuple[Any, ...]:
        return tuple(getattr(value, name) for name in self.names)

    def check(self, value: Any) -> None:
        """Raise ``ValueError`` for bytes of another length and for a number that is not of its enumeration."""
        for name, length in self._lengths:
            require(len(getattr(value, name)) == length, f"{name} has another length than {length} bytes")
        for place, make in self._makers:
            make(getattr(value, self.names[place]))

    def pack(self, value: Any) -> bytes:
        """The struct of a value's fields."""
        return self.layout.pack(*self._get(value))

    def read(self, numbers: tuple[Any, ...]) -> Sequence[Any]:
        """The fields in wire order, from what the struct gave."""
        if not self._makers:
            return numbers
        values = list(numbers)
        for place, make in self._makers:
            values[place] = make(values[place])
        return values


def _nothing(_message: Any) -> None:
    """Check nothing."""


def record_codec(
    kind: Kind,
    message: type[Any],
    record: Record,
    check: Callable[[Any], None] = _nothing,
    *,
    tail: str = "",
    typecode: str = "",
    names_request: bool = True,
) -> MessageCodec:
    """Codec of a message that is a record and, behind it, the field ``tail`` to the end of the frame, if it has one.

    Args:
        kind: its number.
        message: its class.
        record: its other fields, without the request id.
        check: what has to hold besides the types and lengths of the record.
        tail: field that runs to the end of the frame: bytes, or an array of ``typecode``.
        typecode: type code of the array.
        names_request: whether the message has a wire id.
    """
    start = HEADER_BYTES + record.layout.size
    names = (*(("request",) if names_request else ()), *record.names, *((tail,) if tail else ()))
    in_order = names == message.__match_args__[: len(names)]

    def check_all(one: Any) -> None:
        record.check(one)
        if typecode:
            require_array(tail, getattr(one, tail), typecode)
        check(one)

    def pack(one: Any) -> bytes:
        fixed = record.pack(one) if record.names else b""
        if not tail:
            return fixed
        rest: bytes = getattr(one, tail).tobytes() if typecode else getattr(one, tail)
        return fixed + rest

    def unpack(request: int, frame: Frame) -> Any:
        require(len(frame) == start or (bool(tail) and len(frame) > start), "the payload has another length")
        values: list[Any] = [request] if names_request else []
        if record.names:
            values += record.read(record.layout.unpack_from(frame, HEADER_BYTES))
        if typecode:
            require((len(frame) - start) % array(typecode).itemsize == 0, f"the last item of {tail} is cut off")
            values.append(take_array(typecode, frame, start, len(frame)))
        elif tail:
            values.append(take_bytes(frame, start))
        return message(*values) if in_order else message(**dict(zip(names, values, strict=True)))

    return MessageCodec(kind, message, check_all, pack, unpack, names_request)


def rows_codec(
    kind: Kind, message: type[Any], row: type[Any], record: Record, limit: int, check: Callable[[Any], None] = _nothing
) -> MessageCodec:
    """Codec of a message that names no request and has one field: a tuple of at most ``limit`` rows, as many as the
    frame holds.

    Args:
        kind: its number.
        message: its class.
        row: class of the rows.
        record: fields of a row, in the order of its class.
        limit: most rows.
        check: what has to hold for the whole message besides the types and lengths of the record.
    """
    (name,) = message.__match_args__
    size = record.layout.size

    def check_all(one: Any) -> None:
        rows = getattr(one, name)
        require_length(name, len(rows), limit)
        for each in rows:
            record.check(each)
        check(one)

    def pack(one: Any) -> bytes:
        return b"".join(map(record.pack, getattr(one, name)))

    def unpack(_request: int, frame: Frame) -> Any:
        length = len(frame) - HEADER_BYTES
        require(length % size == 0 and length <= size * limit, f"the frame holds no whole {name}, or too many")
        return message(tuple(row(*record.read(one)) for one in record.layout.iter_unpack(frame[HEADER_BYTES:])))

    return MessageCodec(kind, message, check_all, pack, unpack, names_request=False)
