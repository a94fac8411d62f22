"""Reading event streams: what counts as a token's arrival, and what is no stream at all."""

from __future__ import annotations

import json
from array import array

import pytest

from appliance.operator.bench.events import EventReader, MalformedStreamError


def event(text: str | None = None, **fields: object) -> bytes:
    """One event of a completion stream; without text it has no choices."""
    choices = [] if text is None else [{"index": 0, "text": text, "finish_reason": fields.pop("finish", None)}]
    return b"data: " + json.dumps({"choices": choices, **fields}).encode() + b"\n\n"


def read(*pieces: bytes) -> EventReader:
    """Feed piece after piece, one second apart, and finish."""
    reader = EventReader(array("d"))
    for second, piece in enumerate(pieces):
        reader.feed(piece, float(second))
    reader.finish()
    return reader


STREAM = (
    event("a"),
    event("b"),
    event("c"),
    event("", finish="length"),
    event(None, usage={"completion_tokens": 3}),
    b"data: [DONE]\n\n",
)


def test_events_with_text_are_timed() -> None:
    """Three of five events carry text; reason, counts and end mark are found."""
    reader = read(*STREAM)
    assert list(reader.arrivals) == [0.0, 1.0, 2.0]
    assert (reader.finish_reason, reader.usage, reader.done) == ("length", {"completion_tokens": 3}, True)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 10_000])
def test_any_cut_of_the_bytes_reads_the_same(size: int) -> None:
    """Chunks of the transport are not events: halves of both line ends and of words are put together."""
    for whole in (b"".join(STREAM), b"".join(STREAM).replace(b"\n", b"\r\n")):
        reader = read(*(whole[start : start + size] for start in range(0, len(whole), size)))
        assert len(reader.arrivals) == 3
        assert (reader.finish_reason, reader.done) == ("length", True)
        assert list(reader.arrivals) == sorted(reader.arrivals)


def test_a_role_before_the_text_is_not_the_first_token() -> None:
    """Chat streams begin with an empty delta; a comment and an event's name are nothing."""
    role = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
    said = b'event: message\ndata: {"choices":[{"delta":{"content":"x"},"finish_reason":null}]}\n\n'
    reader = read(role, b": keepalive\n\n", said, b"data: [DONE]\n\n")
    assert list(reader.arrivals) == [2.0]


def test_counts_that_come_with_every_event() -> None:
    """The last ones hold."""
    assert read(*(event("x", usage={"completion_tokens": n}) for n in range(1, 9))).usage == {"completion_tokens": 8}


def test_an_error_in_the_stream_is_found() -> None:
    """It is the last event, without choices."""
    reader = read(event("a"), b'data: {"error":{"code":"engine_lost","message":"m"}}\n\n')
    assert reader.error == {"code": "engine_lost", "message": "m"} and not reader.done


@pytest.mark.parametrize(
    "garbage",
    [
        b"<html>\n\n",
        b"data: hello\n\n",
        b"data: [1]\n\n",
        b"data: {\n\n",
        b"data: {broken}\n\n",
        b"data: {",
        b"\x00\xff\n\n",
        b"x" * (1 << 21),
    ],
)
def test_what_is_no_stream(garbage: bytes) -> None:
    """First or after a token: it is refused, never counted."""
    for before in ((), (event("a"),)):
        with pytest.raises(MalformedStreamError):
            read(*before, garbage)
