"""What gRPC puts on HTTP/2, pure: heads of calls, messages in DATA frames, the rows that end a call.

Source: "gRPC over HTTP2" (PROTOCOL-HTTP2.md) and "Compression" of gRPC's documents.
"""

from __future__ import annotations

import re
import struct
import zlib
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from appliance.common.errors import InvalidRequestError, PayloadTooLargeError

PREFIX = struct.Struct(">BI")
"""Before each message: whether it is compressed, and its length in bytes."""

MAX_HEAD_BYTES = 32 << 10
"""Bytes of a call's headers, uncompressed; a bearer token and tracing headers need 4 KiB."""

ROW_BYTES = 32
"""Bytes that each header counts beside its name and value (RFC 9113, section 10.5.1)."""

ENCODINGS = "identity,deflate,gzip"
"""Encodings of messages that are read; answers are never compressed: they would tell their lengths' secrets."""

_WINDOW_BITS = {"identity": 0, "deflate": zlib.MAX_WBITS, "gzip": zlib.MAX_WBITS | 16}
"""Encoding -> zlib's word for its format."""

_TIMEOUT = re.compile(r"([0-9]{1,8})([HMSmun])")
_UNIT_S = {"H": 3_600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_PLAIN = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")
"""Characters of ``grpc-message`` that stand for themselves."""

Rows = Sequence[tuple[str, str]]
"""Names and values of headers."""


@dataclass(frozen=True, slots=True)
class Status:
    """How a call ends. ``code`` is gRPC's number; ``details`` a serialized google.rpc.Status, or empty."""

    code: int
    message: str = ""
    details: bytes = b""
    metadata: tuple[tuple[str, str | bytes], ...] = ()
    """More trailers; the names of binary ones end with ``-bin``."""


OK = Status(0)


class CallHeadError(Exception):
    """The head begins no call. ``rows`` is the whole answer."""

    def __init__(self, rows: Rows) -> None:
        super().__init__("no gRPC call")
        self.rows = rows


@dataclass(frozen=True, slots=True)
class CallHead:
    """The headers of a call."""

    method: str
    """``/package.Service/Method``."""
    metadata: tuple[tuple[str, str], ...]
    """The caller's headers that hold text, by lower-case name, in the order in which they came."""
    timeout_s: float | None
    """How long the caller waits; None: as long as it takes."""
    encoding: str
    """How compressed messages of the caller are compressed."""


def head_of(rows: Sequence[tuple[bytes, bytes]]) -> CallHead:
    """Return the head that these headers are.

    Raises:
        CallHeadError: another HTTP method or content type, a timeout or an encoding that gRPC does not have.
    """
    # h2 has checked names and that each pseudo-header is there once; values may hold any byte above 0x20.
    text = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in rows]
    if sum(len(name) + len(value) + ROW_BYTES for name, value in text) > MAX_HEAD_BYTES:
        problem = Status(8, f"the headers of the call are larger than {MAX_HEAD_BYTES} bytes; send fewer")
        raise CallHeadError([*ANSWER_ROWS, *trailers_of(problem)])
    fields = dict(text)
    if fields.get(":method") != "POST":
        raise CallHeadError([(":status", "405"), ("allow", "POST")])
    media = fields.get("content-type", "").partition(";")[0].strip().lower()
    if media not in ("application/grpc", "application/grpc+proto"):
        raise CallHeadError([(":status", "415"), ("accept-post", "application/grpc+proto")])
    encoding = fields.get("grpc-encoding", "identity")
    if encoding not in _WINDOW_BITS:
        problem = Status(12, f"the message encoding is not one of {ENCODINGS}; send the message uncompressed")
        raise CallHeadError([*ANSWER_ROWS, ("grpc-accept-encoding", ENCODINGS), *trailers_of(problem)])
    try:
        timeout_s = _seconds(fields["grpc-timeout"]) if "grpc-timeout" in fields else None
    except ValueError:
        problem = Status(3, "grpc-timeout is not up to eight digits and a unit of H, M, S, m, u or n")
        raise CallHeadError([*ANSWER_ROWS, *trailers_of(problem)]) from None
    metadata = tuple((name, value) for name, value in text if name[0] != ":" and not name.endswith("-bin"))
    return CallHead(fields.get(":path", ""), metadata, timeout_s, encoding)


def _seconds(timeout: str) -> float:
    found = _TIMEOUT.fullmatch(timeout)
    if found is None:
        raise ValueError(timeout)
    return int(found[1]) * _UNIT_S[found[2]]


ANSWER_ROWS: Rows = ((":status", "200"), ("content-type", "application/grpc"))
"""The head of every answer."""


def trailers_of(status: Status) -> list[tuple[str, str]]:
    """Return the rows that end a call."""
    rows = [("grpc-status", str(status.code))]
    if status.message:
        rows.append(("grpc-message", quote(status.message, safe=_PLAIN)))
    if status.details:
        rows.append(("grpc-status-details-bin", _binary(status.details)))
    rows += [(name, value if isinstance(value, str) else _binary(value)) for name, value in status.metadata]
    return rows


def _binary(value: bytes) -> str:
    return b64encode(value).rstrip(b"=").decode("ascii")


def framed(message: bytes) -> bytes:
    """Return a message as it stands in DATA frames."""
    return PREFIX.pack(0, len(message)) + message


class MessageReader:
    """Takes the bytes of a call's DATA frames, gives its messages. ``most``: bytes of one message, uncompressed too."""

    def __init__(self, encoding: str, most: int) -> None:
        self._window_bits = _WINDOW_BITS[encoding]
        self.most = most
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        """Take what came."""
        self._data += data

    @property
    def buffered(self) -> int:
        """Bytes taken that no message has used."""
        return len(self._data)

    def next(self) -> bytes | None:
        """Return the next message; None while it is not whole.

        Raises:
            PayloadTooLargeError: it is larger than allowed; told by its length, before it has come.
            InvalidRequestError: it is compressed and was not announced so, or its compression is broken.
        """
        if len(self._data) < PREFIX.size:
            return None
        compressed, length = PREFIX.unpack_from(self._data)
        if length > self.most:
            raise self._too_large()
        if compressed > 1 or (compressed and not self._window_bits):
            raise InvalidRequestError("the message is marked as compressed and grpc-encoding names no compression")
        if len(self._data) < PREFIX.size + length:
            return None
        message = bytes(memoryview(self._data)[PREFIX.size : PREFIX.size + length])
        del self._data[: PREFIX.size + length]
        return self._inflated(message) if compressed else message

    def _inflated(self, message: bytes) -> bytes:
        inflater = zlib.decompressobj(self._window_bits)
        try:
            inflated = inflater.decompress(message, self.most + 1)
        except zlib.error:
            inflated = b""
        if len(inflated) > self.most:
            raise self._too_large()
        if not inflater.eof or inflater.unused_data:
            raise InvalidRequestError("the message is not compressed as grpc-encoding says")
        return inflated

    def _too_large(self) -> PayloadTooLargeError:
        return PayloadTooLargeError(f"the message is larger than {self.most} bytes; send less in one message")
