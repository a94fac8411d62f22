"""HTTP/2 by the letter of RFC 9113: what each wrong frame leads to, whole and byte by byte.

``STREAM`` errors end one call, ``CONNECTION`` errors the connection; RFC 9113 lets a server treat the first as the
second (section 5.4.2), and an answer with HTTP status 400 is one to a malformed request (section 8.1.1). ``SERVED``
rows are the control: strange and allowed.
"""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass
from enum import Enum

import pytest

from appliance.gateway.grpc.servicer import SERVICE
from tests.appliance.gateway.grpc import raw_grpc as raw
from tests.appliance.gateway.grpc.grpc_client import proof_of
from tests.appliance.gateway.grpc.raw_grpc import Peer, frame, literal

LIST = f"/{SERVICE}/ListModels"
HEADERS, DATA, END = raw.HEADERS, raw.DATA, raw.END_HEADERS | raw.END_STREAM


class Outcome(Enum):
    """What the server does."""

    SERVED = "the call behind it is answered"
    STREAM = "the stream is reset, or the connection ends"
    CONNECTION = "the connection ends"


@dataclass(frozen=True)
class Case:
    """Bytes behind preface and settings; ``section`` of RFC 9113, unless it says otherwise."""

    section: str
    data: bytes
    outcome: Outcome


def _block(*rows: tuple[str, str]) -> bytes:
    return b"".join(literal(*row) for row in rows)


CALL = ((":method", "POST"), (":scheme", "http"), (":path", LIST), (":authority", "a"))
TYPE = ("content-type", "application/grpc")


def _without(name: str) -> bytes:
    return frame(HEADERS, END, 1, _block(*(row for row in CALL if row[0] != name), TYPE))


def _call(stream: int, *more: tuple[str, str], flags: int = END) -> bytes:
    return frame(HEADERS, flags, stream, _block(*CALL, TYPE, *more))


def _open(*more: tuple[str, str]) -> bytes:
    """A call that stays open: a health check, which needs no credential, without its message."""
    rows = [(name, "/grpc.health.v1.Health/Check" if name == ":path" else value) for name, value in CALL]
    return frame(HEADERS, raw.END_HEADERS, 1, _block(*rows, TYPE, *more))


def _u32(*values: int) -> bytes:
    return struct.pack(f">{len(values)}I", *values)


SERVED, STREAM, CONNECTION = Outcome.SERVED, Outcome.STREAM, Outcome.CONNECTION
CASES = {
    # ---- frames
    "a frame larger than allowed": Case("4.2", frame(DATA, 0, 1, bytes(16_385)), CONNECTION),
    "an unknown kind is ignored": Case("4.1", frame(0xEE, 0xFF, 0, b"?"), SERVED),
    "unknown flags are ignored": Case("4.1", frame(raw.PING, 0xF0, 0, bytes(8)), SERVED),
    "a reserved bit is ignored": Case("4.1", frame(raw.PING, 0, 1 << 31, bytes(8)), SERVED),
    # ---- DATA
    "DATA on stream 0": Case("6.1", frame(DATA, 0, 0, b"x"), CONNECTION),
    "DATA on an idle stream": Case("5.1", frame(DATA, 0, 5, b"x"), CONNECTION),
    "DATA behind the end of the stream": Case("5.1", _call(1) + frame(DATA, 0, 1, b"x"), STREAM),
    "DATA with more padding than content": Case("6.1", _open() + frame(DATA, 8, 1, b"\x05abc"), CONNECTION),
    "DATA beyond the window": Case("6.9.1", _open() + frame(DATA, 0, 1, bytes(16_384)) * 5, STREAM),
    # ---- HEADERS
    "HEADERS on stream 0": Case("6.2", frame(HEADERS, END, 0, _block(*CALL, TYPE)), CONNECTION),
    "HEADERS on an even stream": Case("5.1.1", _call(2), CONNECTION),
    "HEADERS on an older stream": Case("5.1.1", _call(5) + _call(3), CONNECTION),
    "HEADERS that depend on themselves": Case(
        "5.3", frame(HEADERS, END | 0x20, 1, _u32(1) + b"\x10" + _block(*CALL, TYPE)), STREAM
    ),
    "HEADERS with more padding than content": Case(
        "6.2", frame(HEADERS, END | 8, 1, b"\xff" + _block(*CALL)), CONNECTION
    ),
    "HEADERS twice without an end": Case("8.1", _open() + _open(), STREAM),
    "another frame inside a header block": Case(
        "6.10", frame(HEADERS, 1, 1, b"") + frame(raw.PING, 0, 0, bytes(8)), CONNECTION
    ),
    "CONTINUATION of nothing": Case("6.10", frame(raw.CONTINUATION, 4, 1, b""), CONNECTION),
    "CONTINUATION of another stream": Case(
        "6.10", frame(HEADERS, 1, 1, b"") + frame(raw.CONTINUATION, 4, 3, b""), CONNECTION
    ),
    "a header block in pieces": Case(
        "6.10", b"".join([frame(HEADERS, 1, 1, _block(*CALL)), frame(raw.CONTINUATION, 4, 1, _block(TYPE))]), SERVED
    ),
    # ---- header compression (RFC 7541)
    "an index that is not there": Case("7541 2.3.3", frame(HEADERS, END, 1, b"\xff\x80\x01"), CONNECTION),
    "index 0": Case("7541 6.1", frame(HEADERS, END, 1, b"\x80"), CONNECTION),
    "a table larger than allowed": Case(
        "7541 6.3", frame(HEADERS, END, 1, b"\x3f\xe1\xff\x03" + _block(*CALL, TYPE)), CONNECTION
    ),
    "a string that ends too soon": Case("7541 5.2", frame(HEADERS, END, 1, b"\x00\x0aabc"), CONNECTION),
    "an integer without an end": Case("7541 5.1", frame(HEADERS, END, 1, b"\x7f" + b"\xff" * 64), CONNECTION),
    "Huffman padding of more than 7 bits": Case(
        "7541 5.2", frame(HEADERS, END, 1, b"\x00\x85\xff\xff\xff\xff\xff\x01a"), CONNECTION
    ),
    # ---- requests
    "no method": Case("8.3.1", _without(":method"), STREAM),
    "no scheme": Case("8.3.1", _without(":scheme"), STREAM),
    "no path": Case("8.3.1", _without(":path"), STREAM),
    "an empty path": Case(
        "8.3.1", frame(HEADERS, END, 1, _block(CALL[0], CALL[1], (":path", ""), CALL[3], TYPE)), STREAM
    ),
    "a method twice": Case("8.3.1", frame(HEADERS, END, 1, _block(*CALL, CALL[0], TYPE)), STREAM),
    "an unknown pseudo-header": Case("8.3", frame(HEADERS, END, 1, _block(*CALL, (":cat", "x"), TYPE)), STREAM),
    "a response's pseudo-header": Case("8.3", frame(HEADERS, END, 1, _block(*CALL, (":status", "200"), TYPE)), STREAM),
    "a pseudo-header behind a header": Case("8.3", frame(HEADERS, END, 1, _block(TYPE, *CALL)), STREAM),
    "an upper-case name": Case("8.2.1", _call(1, ("X-Cat", "x")), STREAM),
    "an empty name": Case("8.2.1", _call(1, ("", "x")), STREAM),
    "a name with a space": Case("8.2.1", _call(1, ("x y", "x")), STREAM),
    "a value with a line end": Case("8.2.1", _call(1, ("x", "a\r\nb")), STREAM),
    "a value with a NUL": Case("8.2.1", _call(1, ("x", "a\0b")), STREAM),
    "connection": Case("8.2.2", _call(1, ("connection", "close")), STREAM),
    "transfer-encoding": Case("8.2.2", _call(1, ("transfer-encoding", "chunked")), STREAM),
    "te other than trailers": Case("8.2.2", _call(1, ("te", "gzip")), STREAM),
    "a content length that is wrong": Case("8.1.1", _open(("content-length", "7")) + frame(DATA, 1, 1, b"abc"), STREAM),
    "an authority and a host that differ": Case("8.3.1", _call(1, ("host", "other")), STREAM),
    "pseudo-headers in trailers": Case("8.1", _open() + frame(HEADERS, END, 1, _block((":method", "POST"))), STREAM),
    # ---- the other frames
    "PRIORITY of the wrong size": Case("6.3", frame(raw.PRIORITY, 0, 1, b"\0\0\0\0"), STREAM),
    "PRIORITY on stream 0": Case("6.3", frame(raw.PRIORITY, 0, 0, bytes(5)), CONNECTION),
    "RST_STREAM on stream 0": Case("6.4", frame(raw.RST, 0, 0, _u32(8)), CONNECTION),
    "RST_STREAM of the wrong size": Case("6.4", _open() + frame(raw.RST, 0, 1, b"\0"), CONNECTION),
    "SETTINGS on a stream": Case("6.5", frame(raw.SETTINGS, 0, 1), CONNECTION),
    "SETTINGS of the wrong size": Case("6.5", frame(raw.SETTINGS, 0, 0, b"\0" * 5), CONNECTION),
    "SETTINGS acknowledged with content": Case("6.5", frame(raw.SETTINGS, 1, 0, b"\0\4\0\0\0\1"), CONNECTION),
    "a push setting of 2": Case("6.5.2", frame(raw.SETTINGS, 0, 0, b"\0\2\0\0\0\2"), CONNECTION),
    "an initial window of 2^31": Case("6.5.2", frame(raw.SETTINGS, 0, 0, b"\0\4\x80\0\0\0"), CONNECTION),
    "a frame size of 1": Case("6.5.2", frame(raw.SETTINGS, 0, 0, b"\0\5\0\0\0\1"), CONNECTION),
    "an unknown setting": Case("6.5.2", frame(raw.SETTINGS, 0, 0, b"\xff\xff\0\0\0\1"), SERVED),
    "PUSH_PROMISE of a client": Case("8.4", frame(raw.PUSH, 4, 1, _u32(2) + _block(*CALL)), CONNECTION),
    "PING on a stream": Case("6.7", frame(raw.PING, 0, 1, bytes(8)), CONNECTION),
    "PING of the wrong size": Case("6.7", frame(raw.PING, 0, 0, bytes(7)), CONNECTION),
    "a PING answer that nobody asked for": Case("6.7", frame(raw.PING, 1, 0, bytes(8)), SERVED),
    "GOAWAY on a stream": Case("6.8", frame(raw.GOAWAY, 0, 1, _u32(0, 0)), CONNECTION),
    "WINDOW_UPDATE of 0 on the connection": Case("6.9", frame(raw.WINDOW, 0, 0, _u32(0)), CONNECTION),
    "WINDOW_UPDATE of 0 on a stream": Case("6.9", _open() + frame(raw.WINDOW, 0, 1, _u32(0)), STREAM),
    "WINDOW_UPDATE of the wrong size": Case("6.9", frame(raw.WINDOW, 0, 0, b"\0\0\0"), CONNECTION),
    "WINDOW_UPDATE on an idle stream": Case("5.1", frame(raw.WINDOW, 0, 7, _u32(1)), CONNECTION),
    "a window beyond 2^31 - 1": Case("6.9.1", frame(raw.WINDOW, 0, 0, _u32((1 << 31) - 1)) * 2, CONNECTION),
    "a stream's window beyond 2^31 - 1": Case(
        "6.9.1", _open() + frame(raw.WINDOW, 0, 1, _u32((1 << 31) - 1)) * 2, STREAM
    ),
}


@pytest.mark.parametrize("pieces", ["whole", "bytes"])
@pytest.mark.parametrize("name", CASES)
async def test_a_frame_leads_to_what_the_rfc_says(running, name, pieces):
    """One row of the table; a call on another stream shows what is left of the connection."""
    case = CASES[name]
    peer = await Peer.connect(running)
    later = _call(101, *proof_of(running), flags=4) + frame(DATA, 1, 101, bytes(5))
    sent = case.data + later
    for start in range(0, len(sent), len(sent) if pieces == "whole" else 1):
        peer.say(sent[start : start + (len(sent) if pieces == "whole" else 1)])
        if pieces == "bytes" and len(sent) < 4_096:
            await asyncio.sleep(0)
    assert await _outcome(peer) in _allowed(case.outcome), f"RFC 9113, section {case.section}"
    peer.close()


def _allowed(outcome: Outcome) -> tuple[Outcome, ...]:
    return (STREAM, CONNECTION) if outcome is STREAM else (outcome,)


async def _outcome(peer: Peer) -> Outcome:
    """What became of the row's stream and of the call behind it."""
    reset = False
    async with asyncio.timeout(20):
        while (found := await peer.next()) is not None:
            if found.kind == raw.GOAWAY and any(found.payload[4:8]):
                return CONNECTION
            if found.stream not in (0, 101):
                # Refused by gRPC's status (no credential) is an answer too: only a reset says that it was malformed.
                reset = reset or (found.kind == raw.RST and any(found.payload))
            elif found.stream == 101 and found.kind == HEADERS and found.flags & raw.END_STREAM:
                return STREAM if reset else SERVED
    return CONNECTION


def test_the_table_is_large_enough():
    """Sixty rows and more, each kind of outcome among them."""
    assert len(CASES) >= 60
    assert {case.outcome for case in CASES.values()} == set(Outcome)
