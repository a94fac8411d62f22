"""A request's head: received bytes in, a checked ``RequestHead`` out (RFC 9112, sections 2, 3, 5, 6 and 9); pure.

llhttp, by httptools, reads the syntax strictly: line ends, field names and values, methods. It accepts more than
RFC 9112 allows in the version, the form of the target, Host and Transfer-Encoding; those are decided here. Each request
has a parser of its own, so no state of one request can reach the next one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

MAX_HEAD_BYTES = 32 << 10
"""Bytes of request line and headers together; a SPIFFE-issued bearer token and tracing headers need 4 KiB."""

MAX_HEADERS = 100
"""Headers of one request, and trailers of one; browsers and SDKs send under 30."""

_REQUEST_LINE = re.compile(rb"([A-Z][A-Z-]*) ([\x21\x22\x24-\x7e]+) HTTP/([0-9])\.([0-9])")
"""The request line: method, target, version. A target has no fragment, so no number sign."""

_BLANK_LINES = re.compile(rb"(?:\r\n)*")
_ABSOLUTE = re.compile(r"(?i:https?)://([^/?#@]+)(/[^?]*)?(?:\?.*)?")
_HOST = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|(?:[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*)(?::[0-9]{0,5})?")


class HeadError(Exception):
    """The head is refused with ``status``; ``reason`` says why, for the client."""

    def __init__(self, status: int = 400, reason: str = "not a valid HTTP request") -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


@dataclass(frozen=True, slots=True)
class RequestHead:
    """A request up to its body."""

    method: str
    path: str
    """The target's path, percent-decoded; ``*`` in ``OPTIONS *``."""
    host: str | None
    """Name and port that the request is for, from an absolute target, else from the Host header."""
    fields: Mapping[str, Sequence[str]]
    """Values by lower-case name, in the order in which they came."""
    query: str
    """The target's query, as it came; empty where there is none."""
    http_11: bool
    """Whether the version is 1.1. With 1.0 neither chunks nor an interim answer may be sent, and the connection ends
    with the answer."""
    keep_alive: bool
    """Whether the client allows another request on the connection."""
    length: int | None
    """Announced bytes of the body; None for a body in chunks, whose length is not announced."""

    def values(self, name: str) -> Sequence[str]:
        """Values of every header of this lower-case name."""
        return self.fields.get(name, ())


class _TooManyFieldsError(Exception):
    """Stops the parser inside a callback."""


class _Fields:
    """The parser's callbacks. Apart from ``HeadReader``, which holds the parser, so that no reference cycle arises."""

    __slots__ = ("complete", "count", "values")

    def __init__(self) -> None:
        self.values: dict[str, list[str]] = {}
        self.count = 0
        self.complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep one header."""
        self.count += 1
        if self.count > MAX_HEADERS:
            raise _TooManyFieldsError
        self.values.setdefault(str(name, "ascii").lower(), []).append(str(value, "latin-1").strip(" \t"))

    def on_headers_complete(self) -> None:
        """The empty line has come."""
        self.complete = True


class HeadReader:
    """Reads one head. A refused one is the connection's end."""

    __slots__ = ("_blank", "_fed", "_fields", "_parser", "_raw")

    def __init__(self) -> None:
        self._fields = _Fields()
        self._parser = HttpRequestParser(self._fields)
        self._raw = b""
        self._fed = 0
        self._blank = 0

    def feed(self, data: bytes) -> tuple[RequestHead, bytes] | None:
        """Read on; gives the head and the bytes behind it once it is complete.

        Raises:
            HeadError: it is no acceptable request.
        """
        raw = self._raw + data if self._raw else data
        if not self._fed:
            raw = self._without_blank_lines(raw)
            if raw in (b"", b"\r"):
                self._raw = raw
                return None
        found = raw.find(b"\r\n\r\n", max(0, self._fed - 3))
        end = len(raw) if found < 0 else found + 4
        try:
            # No further than the limit, so that the outcome does not depend on how the bytes were cut.
            self._parser.feed_data(raw[self._fed : min(end, MAX_HEAD_BYTES)])
        except HttpParserUpgrade:
            pass  # an upgrade is ignored, as RFC 9110 (section 7.8) allows
        except HttpParserError:
            raise _too_large() if self._fields.count > MAX_HEADERS else HeadError() from None
        if end > MAX_HEAD_BYTES:
            raise _too_large()
        if found < 0:
            self._raw, self._fed = raw, len(raw)
            return None
        if not self._fields.complete:
            raise HeadError
        return _checked(raw[: raw.index(b"\r\n")], self._fields.values), raw[end:]

    def _without_blank_lines(self, raw: bytes) -> bytes:
        """Drop empty lines before the request line (RFC 9112, section 2.2); they count to the head's size."""
        match = _BLANK_LINES.match(raw)
        blank = match.end() if match is not None else 0
        self._blank += blank
        if self._blank > MAX_HEAD_BYTES:
            raise _too_large()
        raw = raw[blank:]
        if raw[:1] in (b"\r", b"\n") and raw != b"\r":
            raise HeadError
        return raw


def _checked(line: bytes, fields: Mapping[str, Sequence[str]]) -> RequestHead:
    match = _REQUEST_LINE.fullmatch(line)
    if match is None:
        raise HeadError
    if match[3] != b"1":
        raise HeadError(505, "HTTP/1.1 and HTTP/1.0 are served here")
    method, http_11 = str(match[1], "ascii"), match[4] != b"0"
    host = _host(fields.get("host", ()), required=http_11)
    target = str(match[2], "ascii")
    path, named = _path(method, target)
    keep_alive = http_11
    for value in fields.get("connection", ()):
        keep_alive = keep_alive and "close" not in [token.strip(" \t").lower() for token in value.split(",")]
    return RequestHead(
        method=method,
        path=unquote(path) if "%" in path else path,
        host=host if named is None else named,
        fields=fields,
        query=target.partition("?")[2],
        http_11=http_11,
        keep_alive=keep_alive,
        length=_length(fields, http_11=http_11),
    )


def _host(values: Sequence[str], *, required: bool) -> str | None:
    """The Host header (RFC 9112, section 3.2)."""
    if len(values) > 1 or (required and not values):
        raise HeadError(reason="not a valid HTTP request: exactly one Host header is needed")
    if values and _HOST.fullmatch(values[0]) is None:
        raise HeadError(reason="not a valid HTTP request: the Host header is not a host")
    return values[0] if values else None


def _path(method: str, target: str) -> tuple[str, str | None]:
    """The path in a target, and the host that it names itself (RFC 9112, section 3.2)."""
    if method == "CONNECT":
        raise HeadError(reason="CONNECT is not served here")
    if target.startswith("/"):
        return target.partition("?")[0], None
    if target == "*" and method == "OPTIONS":
        return target, None
    match = _ABSOLUTE.fullmatch(target)
    if match is None or not match[1] or match[1].startswith(":") or _HOST.fullmatch(match[1]) is None:
        raise HeadError
    return match[2] or "/", match[1]


def _length(fields: Mapping[str, Sequence[str]], *, http_11: bool) -> int | None:
    """How the body is framed (RFC 9112, section 6.3). Two ways at once are smuggling, so refused."""
    announced = fields.get("content-length", ())
    codings = fields.get("transfer-encoding")
    if codings is not None:
        names = [name.strip(" \t").lower() for value in codings for name in value.split(",")]
        if announced or not http_11 or names[-1] != "chunked" or names.count("chunked") > 1:
            raise HeadError
        if len(names) > 1:
            raise HeadError(501, "no transfer coding but chunked is served here")
        return None
    # llhttp has refused a second one, and anything but digits.
    return int(announced[0]) if announced else 0


def _too_large() -> HeadError:
    return HeadError(431, "the request's headers are too large")
