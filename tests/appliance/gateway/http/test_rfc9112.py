"""RFC 9112 as a table: bytes of a connection, the statuses of the answers, and whether the connection stays open.

Each case is sent whole and again in pieces (byte by byte where it is short); both must come to the same end. Interim
answers are left out of the statuses: they depend on whether the body came with the head.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
from dataclasses import dataclass

import pytest

from appliance.gateway.generate_request import Started
from appliance.gateway.http.framing import MAX_CHUNKS, MAX_EXTENSION_BYTES
from appliance.gateway.http.head import MAX_HEAD_BYTES, MAX_HEADERS
from tests.appliance.gateway.front.support import MODEL, Running, serving, text_script

BODY = json.dumps({"model": MODEL, "prompt": "hi"}).encode()
SIZE = len(BODY)
LIVE = b"GET /health/live HTTP/1.1\r\nhost: a\r\n\r\n"


def cut_at(size: int) -> int:
    """Bytes of the pieces in which a case of this size is sent: one where that takes no time."""
    return 1 if size <= 2_000 else 97 if size <= 50_000 else 4_099


def get(line: bytes = b"GET /health/live HTTP/1.1", *headers: bytes, host: bytes = b"host: a") -> bytes:
    """A request without a body; ``host`` empty leaves that header out."""
    rows = [line, *([host] if host else []), *headers]
    return b"\r\n".join(rows) + b"\r\n\r\n"


def live(*headers: bytes) -> bytes:
    """The question whether the process lives, with these headers."""
    return get(b"GET /health/live HTTP/1.1", *headers)


def post(*headers: bytes, body: bytes = BODY, version: bytes = b"1.1") -> bytes:
    """A completion whose framing the headers give; KEY becomes a tenant's key."""
    line = b"POST /v1/completions HTTP/" + version
    return get(line, b"authorization: Bearer KEY", *headers) + body


def chunked(body: bytes, *headers: bytes) -> bytes:
    """A completion whose body in chunks is this."""
    return post(b"transfer-encoding: chunked", *headers, body=body)


CHUNK = b"%x\r\n%b\r\n" % (SIZE, BODY)
END = b"0\r\n\r\n"
SPLIT = b"%x\r\n%b\r\n%x\r\n%b\r\n" % (5, BODY[:5], SIZE - 5, BODY[5:])


@dataclass(frozen=True)
class Case:
    """What is sent and what must come of it."""

    section: str
    name: str
    sent: bytes
    statuses: tuple[int, ...]
    stays_open: bool


def ok(section: str, name: str, sent: bytes, *statuses: int) -> Case:
    """Answered, and the connection goes on."""
    return Case(section, name, sent, statuses or (200,), True)


def ends(section: str, name: str, sent: bytes, *statuses: int) -> Case:
    """Answered, and the connection is closed."""
    return Case(section, name, sent, statuses or (400,), False)


REQUEST_LINES = [
    ok("3.2.1", "origin form", LIVE),
    ok("3.2.1", "query", get(b"GET /health/live?a=b&c=%20 HTTP/1.1")),
    ok("3.2.1", "escaped letter", get(b"GET /health/%6Cive HTTP/1.1")),
    ok("3.2.1", "broken escape", get(b"GET /health/live%zz HTTP/1.1"), 401),
    ok("3.2.1", "escaped NUL", get(b"GET /health/live%00 HTTP/1.1"), 401),
    ok("3.2.2", "absolute form", get(b"GET http://a/health/live HTTP/1.1")),
    ok("3.2.2", "absolute form with port and query", get(b"GET http://a.example:8080/health/live?x HTTP/1.1")),
    ok("3.2.2", "absolute form, scheme in capitals", get(b"GET HTTPS://a/health/live HTTP/1.1")),
    ok("3.2.2", "absolute form with an IPv6 address", get(b"GET http://[::1]:80/health/live HTTP/1.1")),
    ok("3.2.2", "absolute form without a path", get(b"GET http://a HTTP/1.1"), 401),
    ends("3.2.2", "absolute form with a user", get(b"GET http://u@a/health/live HTTP/1.1")),
    ends("3.2.2", "absolute form without a host", get(b"GET http:///health/live HTTP/1.1")),
    ends("3.2.2", "absolute form with a port alone", get(b"GET http://:80/health/live HTTP/1.1")),
    ends("3.2.2", "absolute form of another scheme", get(b"GET ftp://a/health/live HTTP/1.1")),
    ends("3.2.2", "absolute form without Host", get(b"GET http://a/health/live HTTP/1.1", host=b"")),
    ends("3.2.3", "authority form", get(b"CONNECT a:80 HTTP/1.1")),
    ends("3.2.3", "authority form with GET", get(b"GET a:80 HTTP/1.1")),
    ok("3.2.4", "asterisk form", get(b"OPTIONS * HTTP/1.1"), 401),
    ends("3.2.4", "asterisk form with GET", get(b"GET * HTTP/1.1")),
    ends("3.2", "relative target", get(b"GET health/live HTTP/1.1")),
    ends("3.2", "fragment", get(b"GET /health/live#x HTTP/1.1")),
    ends("3.2", "empty target", get(b"GET  HTTP/1.1")),
    ends("3.2", "space in the target", get(b"GET /health /live HTTP/1.1")),
    ends("3.2", "control character in the target", get(b"GET /health/\x01 HTTP/1.1")),
    ends("3.2", "high byte in the target", get(b"GET /health/\xe9 HTTP/1.1")),
    ends("3", "two spaces behind the method", get(b"GET  /health/live HTTP/1.1")),
    ends("3", "two spaces before the version", get(b"GET /health/live  HTTP/1.1")),
    ends("3", "tab for a space", get(b"GET\t/health/live HTTP/1.1")),
    ends("3", "space behind the version", get(b"GET /health/live HTTP/1.1 ")),
    ends("3", "space before the method", get(b" GET /health/live HTTP/1.1")),
    ends("3.1", "method in small letters", get(b"get /health/live HTTP/1.1")),
    ends("3.1", "unknown method", get(b"FETCH /health/live HTTP/1.1")),
    ok("3.1", "method without a route", get(b"TRACE /health/live HTTP/1.1"), 401),
    ends("2.3", "HTTP in small letters", get(b"GET /health/live http/1.1")),
    ends("2.3", "no version", get(b"GET /health/live")),
    ends("2.3", "HTTP/0.9", get(b"GET /health/live HTTP/0.9"), 505),
    ends("2.3", "HTTP/2.0", get(b"GET /health/live HTTP/2.0"), 505),
    ends("2.3", "a minor version that does not exist", get(b"GET /health/live HTTP/1.2")),
    ends("2.3", "three digits", get(b"GET /health/live HTTP/1.10")),
    ends("2.3", "another protocol", get(b"GET /health/live RTSP/1.0")),
    ends("2.3", "the preface of HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    ok("2.2", "empty line before", b"\r\n" + LIVE),
    ok("2.2", "empty lines before", b"\r\n" * 5 + LIVE),
    ok("2.2", "empty lines between", LIVE + b"\r\n" + LIVE, 200, 200),
    ends("2.2", "empty lines without end", b"\r\n" * MAX_HEAD_BYTES, 431),
    ends("2.2", "bare LF before", b"\n" + LIVE),
    ends("2.2", "bare CR before", b"\r" + LIVE),
    ends("2.2", "bare LF as line ends", LIVE.replace(b"\r\n", b"\n")),
    ends("2.2", "bare LF behind the request line", LIVE.replace(b"\r\n", b"\n", 1)),
    ends("2.2", "bare LF behind a header", b"GET /health/live HTTP/1.1\r\nhost: a\n\r\n"),
    ends("2.2", "bare CR behind the request line", LIVE.replace(b"\r\n", b"\r", 1)),
    ends("2.2", "bare CR in a value", live(b"x: a\rb")),
    ends("2.2", "bare CR behind a header", b"GET /health/live HTTP/1.1\r\nhost: a\rx: b\r\n\r\n"),
    ends("2.2", "space before the first header", get(host=b" host: a")),
    ends("2.2", "TLS hello", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
    ends("3", "request line without end", b"GET /" + b"a" * MAX_HEAD_BYTES, 431),
]

FIELDS = [
    ok("5", "name in capitals", get(host=b"HOST: a")),
    ok("5", "no value", live(b"x:")),
    ok("5", "blanks around a value", get(host=b"host: \t a \t ")),
    ok("5", "tab in a value", live(b"x: a\tb")),
    ok("5", "high bytes in a value", live(b"x: \xe9\xff")),
    ends("5.1", "space before the colon", get(host=b"host : a")),
    ends("5.1", "no name", live(b": a")),
    ends("5.1", "no colon", live(b"bad header")),
    ends("5.1", "bracket in a name", live(b"x(y): a")),
    ends("5.1", "high byte in a name", live(b"x\xe9: a")),
    ends("5.2", "folded with a space", live(b"x: a\r\n b")),
    ends("5.2", "folded with a tab", live(b"x: a\r\n\tb")),
    ends("5.2", "folded framing", post(b"transfer-encoding:\r\n chunked")),
    ends("5", "NUL in a value", live(b"x: a\x00b")),
    ends("5", "NUL in a name", live(b"x\x00: a")),
    ends("5", "control character in a value", live(b"x: a\x01b")),
    ok("5", "as many as allowed", live(*[b"x: a"] * (MAX_HEADERS - 1))),
    ends("5", "one too many", live(*[b"x: a"] * MAX_HEADERS), 431),
    ok("5", "as long as allowed", live(b"x: " + b"a" * (MAX_HEAD_BYTES - len(LIVE) - 5))),
    ends("5", "a byte longer", live(b"x: " + b"a" * (MAX_HEAD_BYTES - len(LIVE) - 4)), 431),
    ends("5", "header without end", b"GET / HTTP/1.1\r\nx: " + b"a" * MAX_HEAD_BYTES, 431),
]

HOSTS = [
    ends("3.2", "no Host", get(host=b"")),
    ends("3.2", "two", live(b"host: b")),
    ends("3.2", "the same twice", live(b"host: a")),
    ends("3.2", "space in it", get(host=b"host: a b")),
    ends("3.2", "path in it", get(host=b"host: a/b")),
    ends("3.2", "user in it", get(host=b"host: u@a")),
    ends("3.2", "port of letters", get(host=b"host: a:http")),
    ends("3.2", "high byte in it", get(host=b"host: \xe9")),
    ends("3.2", "open bracket", get(host=b"host: [::1")),
    ok("3.2", "IPv6 address", get(host=b"host: [::1]:8080")),
    ok("3.2", "name and port", get(host=b"host: ai.example:8080")),
    ok("3.2", "empty", get(host=b"host:")),
    ends("3.2", "none in HTTP/1.0", get(b"GET /health/live HTTP/1.0", host=b""), 200),
    ends("3.2", "two in HTTP/1.0", get(b"GET /health/live HTTP/1.0", b"host: a")),
]

LENGTHS = [
    ok("6.2", "length", post(b"content-length: %d" % SIZE)),
    ok("6.2", "length with zeros before", post(b"content-length: 00%d" % SIZE)),
    ok("6.2", "length and blanks", post(b"content-length:  %d \t" % SIZE)),
    ok("6.2", "length of nothing", live(b"content-length: 0")),
    ok("6.3", "neither length nor chunks", post(body=b""), 400),
    ends("6.3", "two lengths", post(b"content-length: %d" % SIZE, b"content-length: 5")),
    ends("6.3", "one length twice", post(b"content-length: %d" % SIZE, b"content-length: %d" % SIZE)),
    ends("6.3", "one length twice in a list", post(b"content-length: %d, %d" % (SIZE, SIZE))),
    ends("6.2", "plus sign", post(b"content-length: +%d" % SIZE)),
    ends("6.2", "minus sign", post(b"content-length: -1")),
    ends("6.2", "hexadecimal", post(b"content-length: 0x10")),
    ends("6.2", "two numbers", post(b"content-length: 5 5")),
    ends("6.2", "no number", post(b"content-length:")),
    ends("6.2", "letters behind", post(b"content-length: 5a")),
    ends("6.2", "decimal point", post(b"content-length: 5.0")),
    ends("6.2", "beyond 64 bits", post(b"content-length: 99999999999999999999999")),
    ends("6.2", "more than is taken", post(b"content-length: 104857600", body=b""), 413),
    ends("9.3", "an answer without reading the body", live(b"content-length: 3") + b"abc", 200),
]

CODINGS = [
    ok("7.1", "chunks", chunked(CHUNK + END)),
    ok("7", "coding in capitals", post(b"transfer-encoding: Chunked", body=CHUNK + END)),
    ends("6.1", "length and chunks", chunked(CHUNK + END, b"content-length: %d" % SIZE)),
    ends("6.1", "chunks and length", post(b"content-length: 5", b"transfer-encoding: chunked", body=CHUNK + END)),
    ends("6.1", "chunks in HTTP/1.0", post(b"transfer-encoding: chunked", body=CHUNK + END, version=b"1.0")),
    ends("6.1", "a coding besides", post(b"transfer-encoding: gzip, chunked", body=CHUNK + END), 501),
    ends("6.3", "another coding", post(b"transfer-encoding: gzip", body=BODY)),
    ends("6.3", "chunks not last", post(b"transfer-encoding: chunked, gzip", body=CHUNK + END)),
    ends("7", "chunks twice", post(b"transfer-encoding: chunked, chunked", body=CHUNK + END)),
    ends("7", "chunks twice in two headers", chunked(CHUNK + END, b"transfer-encoding: chunked")),
    ends("7", "identity", post(b"transfer-encoding: identity", body=BODY)),
    ends("7", "something like it", post(b"transfer-encoding: xchunked", body=CHUNK + END)),
    ends("7", "with a parameter", post(b"transfer-encoding: chunked;q=1", body=CHUNK + END)),
    ends("7", "with a vertical tab", post(b"transfer-encoding: \x0bchunked", body=CHUNK + END)),
    ends("7", "empty", post(b"transfer-encoding:", body=CHUNK + END)),
]

CHUNKS = [
    ok("7.1", "several", chunked(SPLIT + END)),
    ok("7.1", "size in capitals", chunked(b"%X\r\n%b\r\n" % (SIZE, BODY) + END)),
    ok("7.1", "size with zeros before", chunked(b"0000%x\r\n%b\r\n" % (SIZE, BODY) + b"0000\r\n\r\n")),
    ok("7.1.1", "extension", chunked(b'%x;a=b;c="d e"\r\n%b\r\n' % (SIZE, BODY) + END)),
    ok("7.1.1", "extension of the last one", chunked(CHUNK + b"0;a\r\n\r\n")),
    ok("7.1.1", "extension behind a blank", chunked(b"%x ;a=b\r\n%b\r\n" % (SIZE, BODY) + END)),
    ends("7.1.1", "bare LF in an extension", chunked(b"%x;a=\nb\r\n%b\r\n" % (SIZE, BODY) + END)),
    ends("7.1.1", "bare CR in an extension", chunked(b"%x;a=\rb\r\n%b\r\n" % (SIZE, BODY) + END)),
    ends("7.1.1", "one long extension", chunked(b"5;" + b"a" * MAX_EXTENSION_BYTES + b"\r\nabcde\r\n" + END)),
    ends("7.1.1", "many extensions", chunked(b"1;aaaaaaaaa\r\n \r\n" * (MAX_EXTENSION_BYTES // 10 + 1) + END)),
    ends("7.1", "an extension without end", chunked(b"5;" + b"a" * MAX_HEAD_BYTES)),
    ends("7.1", "more than anybody needs", chunked(b"1\r\n \r\n" * (MAX_CHUNKS + 1))),
    ends("7.1", "no size", chunked(b"\r\nabc\r\n" + END)),
    ends("7.1", "size with 0x", chunked(b"0x5\r\nabcde\r\n" + END)),
    ends("7.1", "size with a sign", chunked(b"+5\r\nabcde\r\n" + END)),
    ends("7.1", "negative size", chunked(b"-5\r\nabcde\r\n" + END)),
    ends("7.1", "size beyond 32 bits", chunked(b"100000000\r\nabcde\r\n" + END)),
    ends("7.1", "size beyond 64 bits", chunked(b"10000000000000005\r\nabcde\r\n" + END)),
    ends("7.1", "space behind the size", chunked(b"5 \r\nabcde\r\n" + END)),
    ends("7.1", "space before the size", chunked(b" 5\r\nabcde\r\n" + END)),
    ends("7.1", "underscore in the size", chunked(b"1_0\r\n" + b"a" * 16 + b"\r\n" + END)),
    ends("7.1", "bare LF behind the size", chunked(b"5\nabcde\r\n" + END)),
    ends("7.1", "bare CR behind the size", chunked(b"5\rabcde\r\n" + END)),
    ends("7.1", "more than the size says", chunked(b"5\r\nabcdef\r\n" + END)),
    ends("7.1", "less than the size says", chunked(b"7\r\nabcde\r\n" + END)),
    ends("7.1", "nothing between two", chunked(b"5\r\nabcde5\r\nabcde\r\n" + END)),
    ends("7.1", "bare LF behind a chunk", chunked(b"5\r\nabcde\n" + END)),
]

TRAILERS = [
    ok("7.1.2", "one", chunked(CHUNK + b"0\r\nx: y\r\n\r\n")),
    ok("7.1.2", "as many as allowed", chunked(CHUNK + b"0\r\n" + b"x: y\r\n" * MAX_HEADERS + b"\r\n")),
    ends("7.1.2", "one too many", chunked(CHUNK + b"0\r\n" + b"x: y\r\n" * (MAX_HEADERS + 1) + b"\r\n")),
    ends("7.1.2", "too long", chunked(CHUNK + b"0\r\nx: " + b"y" * MAX_HEAD_BYTES + b"\r\n\r\n")),
    ok("7.1.2", "a length says nothing", chunked(CHUNK + b"0\r\ncontent-length: 9\r\n\r\n")),
    ok("7.1.2", "another key is no second one", chunked(CHUNK + b"0\r\nauthorization: Bearer x\r\n\r\n")),
    ends(
        "7.1.2",
        "a key is none",
        get(b"POST /v1/completions HTTP/1.1", b"transfer-encoding: chunked")
        + CHUNK
        + b"0\r\nauthorization: Bearer KEY\r\n\r\n",
        401,
    ),
    ends("7.1.2", "folded", chunked(CHUNK + b"0\r\nx: a\r\n b\r\n\r\n")),
    ends("7.1.2", "no colon", chunked(CHUNK + b"0\r\nbad trailer\r\n\r\n")),
    ends("7.1.2", "space before the colon", chunked(CHUNK + b"0\r\nx : y\r\n\r\n")),
    ends("7.1.2", "bare LF", chunked(CHUNK + b"0\r\nx: y\n\r\n")),
    ends("7.1.2", "NUL", chunked(CHUNK + b"0\r\nx: \x00\r\n\r\n")),
]

CONNECTIONS = [
    ok("9.3", "keep-alive", live(b"connection: keep-alive")),
    ends("9.6", "close", live(b"connection: close"), 200),
    ends("9.6", "close in capitals", live(b"connection: CLOSE"), 200),
    ends("9.6", "close in a list", live(b"connection: keep-alive , close"), 200),
    ends("9.6", "close in a second header", live(b"connection: x", b"connection: close"), 200),
    ok("9.6", "part of another word", live(b"connection: x-close, closed")),
    ends("9.3", "HTTP/1.0", get(b"GET /health/live HTTP/1.0"), 200),
    ends("9.3", "keep-alive in HTTP/1.0", get(b"GET /health/live HTTP/1.0", b"connection: keep-alive"), 200),
    ok("9.3.2", "three at once", LIVE * 3, 200, 200, 200),
    ok("9.3.2", "fifty at once", LIVE * 50, *[200] * 50),
    ok("9.3.2", "behind a body", post(b"content-length: %d" % SIZE) + LIVE, 200, 200),
    ok("9.3.2", "behind chunks", chunked(CHUNK + END) + LIVE, 200, 200),
    ok("9.3.2", "behind trailers", chunked(CHUNK + b"0\r\nx: y\r\n\r\n") + LIVE, 200, 200),
    ok("9.3.2", "behind an error", post(b"content-length: 1", body=b"{") + LIVE, 400, 200),
    ends("9.3.2", "garbage behind a good one", LIVE + b"\x00\x00", 200, 400),
    ends("9.3.2", "what follows the last one", live(b"connection: close") + LIVE, 200),
    ends("9.3.2", "what follows a malformed one", get(b"GET  / HTTP/1.1") + LIVE),
    ends("9.3.2", "what follows malformed chunks", chunked(b"x\r\n") + LIVE),
    ok(
        "7.8 of RFC 9110",
        "upgrade to WebSocket",
        get(b"GET /ws HTTP/1.1", b"upgrade: websocket", b"connection: upgrade"),
        401,
    ),
    ok(
        "7.8 of RFC 9110",
        "upgrade to HTTP/2",
        live(b"upgrade: h2c", b"connection: upgrade, http2-settings") + LIVE,
        200,
        200,
    ),
    ok(
        "7.8 of RFC 9110",
        "upgrade of a body",
        post(b"content-length: %d" % SIZE, b"upgrade: h2c", b"connection: upgrade"),
    ),
    ok("10.1.1 of RFC 9110", "expectation", post(b"content-length: %d" % SIZE, b"expect: 100-continue")),
    ok("10.1.1 of RFC 9110", "another expectation", post(b"content-length: %d" % SIZE, b"expect: wonders")),
    ends(
        "9.3", "a body that a stranger sends", get(b"POST /v1/completions HTTP/1.1", b"content-length: 3") + b"abc", 401
    ),
]

CASES = {
    f"{case.section}: {group}: {case.name}": case
    for group, cases in {
        "request line": REQUEST_LINES,
        "header": FIELDS,
        "Host": HOSTS,
        "length": LENGTHS,
        "coding": CODINGS,
        "chunks": CHUNKS,
        "trailer": TRAILERS,
        "connection": CONNECTIONS,
    }.items()
    for case in cases
}


async def final_status(reader: asyncio.StreamReader) -> int:
    """The status of the next answer that is final, read to its end; 0 at the connection's end."""
    status = 100
    while status == 100:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError as error:
            assert error.partial == b""
            return 0
        found = re.match(rb"HTTP/1\.1 (\d{3}) [A-Z][A-Za-z ]*\r\n", head)
        assert found is not None, head
        status = int(found[1])
    length = re.search(rb"content-length: (\d+)\r\n", head)
    assert length is not None
    await reader.readexactly(int(length[1]))
    return status


async def replay(running: Running, case: Case, piece: int) -> tuple[tuple[int, ...], bool]:
    """Send the case in pieces of so many bytes; gives the statuses, and whether the connection served one more."""
    reader, writer = await asyncio.open_connection("127.0.0.1", running.front_ends.http_port)
    writer.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sent = case.sent.replace(b"KEY", running.key.encode())
    statuses = []
    try:
        async with asyncio.timeout(20):
            for start in range(0, len(sent), piece):
                writer.write(sent[start : start + piece])
                await writer.drain()
                await asyncio.sleep(0)
            while len(statuses) < len(case.statuses):
                statuses.append(await final_status(reader))
            if not case.stays_open:
                return tuple(statuses), await final_status(reader) != 0
            writer.write(LIVE)
            return tuple(statuses), await final_status(reader) == 200
    finally:
        writer.close()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
async def test_each_case_whole_and_in_pieces(running: Running, case: Case) -> None:
    """The statuses and the connection's end are those of the table, however the bytes are cut."""
    expected = (case.statuses, case.stays_open)
    assert await replay(running, case, len(case.sent)) == expected
    assert await replay(running, case, cut_at(len(case.sent))) == expected


def test_there_are_enough_cases() -> None:
    """No name is taken twice, and the table has not shrunk."""
    assert len(CASES) >= 180


async def _connect(running: Running, sent: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", running.front_ends.http_port)
    writer.write(sent.replace(b"KEY", running.key.encode()))
    return reader, writer


async def test_a_client_that_waits_is_told_to_go_on(running: Running) -> None:
    """``Expect: 100-continue``: the interim answer comes when the body is wanted, and never without a key, nor over
    HTTP/1.0 (RFC 9110, section 10.1.1)."""
    headers = (b"content-length: %d" % SIZE, b"expect: 100-continue")
    async with asyncio.timeout(20):
        reader, writer = await _connect(running, post(*headers, body=b""))
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(BODY)
        assert await final_status(reader) == 200
        writer.close()
        reader, writer = await _connect(running, post(*headers, body=b"").replace(b"Bearer KEY", b"Bearer x"))
        assert (await reader.read()).startswith(b"HTTP/1.1 401 ")
        writer.close()
        reader, writer = await _connect(running, post(*headers, body=b"", version=b"1.0"))
        await asyncio.sleep(0.05)
        writer.write(BODY)
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
        writer.close()


async def test_a_stream_over_http_1_0_ends_with_its_connection(running: Running) -> None:
    """HTTP/1.0 knows no chunks: events come as they are (RFC 9112, section 6.3); control: 1.1 has chunks."""
    body = BODY[:-1] + b', "stream": true}'
    answers = {}
    for version in (b"1.0", b"1.1"):
        length = b"content-length: %d" % len(body)
        reader, writer = await _connect(running, post(length, b"connection: close", body=body, version=version))
        async with asyncio.timeout(20):
            answers[version] = await reader.read()
        writer.close()
    head, _, events = answers[b"1.0"].partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert events.startswith(b"data: {")
    assert events.endswith(b"data: [DONE]\n\n")
    head, _, events = answers[b"1.1"].partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head
    assert events.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def test_head_has_the_length_and_no_body(running: Running) -> None:
    """The next answer follows at once (RFC 9112, section 6.3)."""
    async with asyncio.timeout(20):
        reader, writer = await _connect(running, LIVE.replace(b"GET", b"HEAD") + LIVE)
        assert b"content-length: 17\r\n" in await reader.readuntil(b"\r\n\r\n")
        assert await final_status(reader) == 200
        writer.close()


async def test_the_target_names_the_host_where_it_has_one() -> None:
    """With a list of hosts, an absolute target counts and Host does not (RFC 9112, section 3.2.2)."""
    async with serving(allowed_hosts=frozenset({"ai.example"})) as running, asyncio.timeout(20):
        for target, host, status in (
            (b"http://ai.example/health/live", b"evil.example", 200),
            (b"http://evil.example/health/live", b"ai.example", 400),
        ):
            reader, writer = await _connect(running, get(b"GET " + target + b" HTTP/1.1", host=b"host: " + host))
            assert await final_status(reader) == status
            writer.close()


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"", id="before a request"),
        pytest.param(b"GET /health/live HTT", id="in a head"),
        pytest.param(post(b"content-length: 900"), id="in a body"),
        pytest.param(chunked(CHUNK), id="before the last chunk"),
        pytest.param(post(b"content-length: %d" % SIZE), id="while an answer is computed"),
    ],
)
async def test_who_sends_nothing_more_has_left(running: Running, sent: bytes) -> None:
    """A half-closed connection is closed without an answer that is not complete, and no session is left behind."""
    running.service.script = [Started(1, 0), asyncio.Event()]
    reader, writer = await _connect(running, sent)
    await asyncio.sleep(0.05)
    writer.write_eof()
    async with asyncio.timeout(20):
        assert await reader.read() == b""
        if running.service.requests:
            await running.service.closed.wait()
    writer.close()


async def test_the_answer_survives_what_is_still_being_sent(running: Running) -> None:
    """A refusal in the middle of a large body reaches its sender: no reset takes it away (RFC 9112, section 9.6)."""
    request = get(b"POST /v1/completions HTTP/1.1", b"content-length: 900000") + b" " * 900_000
    for _ in range(10):
        reader, writer = await _connect(running, request)
        async with asyncio.timeout(20):
            assert (await reader.read()).startswith(b"HTTP/1.1 401 ")
        writer.close()


async def test_answers_of_sessions_keep_their_order(running: Running) -> None:
    """A slow answer holds up the quick one behind it, and a stream is whole before the next answer begins."""
    running.service.script = [*text_script("a")[:1], 0.1, *text_script("a")[1:]]
    body = BODY[:-1] + b', "stream": true}'
    last = live(b"connection: close")
    reader, writer = await _connect(running, post(b"content-length: %d" % len(body), body=body) + last)
    async with asyncio.timeout(20):
        answer = await reader.read()
    writer.close()
    stream, _, second = answer.partition(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert stream.startswith(b"HTTP/1.1 200 OK")
    assert second.startswith(b"HTTP/1.1 200 OK")
    assert second.endswith(b'{"status":"live"}')
