"""gRPC's heads, messages and trailers, without a socket."""

from __future__ import annotations

import pytest

from appliance.common.errors import InvalidRequestError, PayloadTooLargeError
from appliance.gateway.front.allowance import MOST_ADDRESSES, Allowance, Rate, StrangersAllowances
from appliance.gateway.grpc.wire import CallHeadError, MessageReader, Status, framed, head_of, trailers_of

CALL = [(b":method", b"POST"), (b":path", b"/a.B/C"), (b"content-type", b"application/grpc")]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [(b"1H", 3_600.0), (b"2M", 120.0), (b"3S", 3.0), (b"4m", 0.004), (b"5u", 5e-6), (b"6n", 6e-9), (b"0S", 0.0)],
)
def test_timeouts(text, seconds):
    """Each unit of the specification."""
    assert head_of([*CALL, (b"grpc-timeout", text)]).timeout_s == pytest.approx(seconds)
    assert head_of(CALL).timeout_s is None


@pytest.mark.parametrize("text", [b"", b"5", b"S", b"123456789S", b"-1S", b"1s", b"1.5S", b"1S ", "²S".encode()])
def test_other_timeouts_are_refused(text):
    """What is no timeout is the caller's INVALID_ARGUMENT."""
    with pytest.raises(CallHeadError) as caught:
        head_of([*CALL, (b"grpc-timeout", text)])
    assert dict(caught.value.rows)["grpc-status"] == "3"


def test_metadata_is_text_in_its_order():
    """Pseudo-headers and binary metadata are left out; a name may come twice."""
    rows = [*CALL, (b"a", b"1"), (b"x-bin", b"AAAA"), (b"a", b"2")]
    assert head_of(rows).metadata == (("content-type", "application/grpc"), ("a", "1"), ("a", "2"))


@pytest.mark.parametrize("media", [b"application/grpc+json", b"application/grpcx", b"text/plain", b""])
def test_other_contents_are_refused(media):
    """Only protobuf is spoken here."""
    with pytest.raises(CallHeadError) as caught:
        head_of([*CALL[:2], (b"content-type", media)])
    assert dict(caught.value.rows)[":status"] == "415"


def test_messages_come_in_any_pieces():
    """Two messages, byte by byte: each is given once and whole, and nothing is left."""
    reader, got = MessageReader("identity", 100), []
    for byte in framed(b"first") + framed(b""):
        reader.feed(bytes([byte]))
        while (message := reader.next()) is not None:
            got.append(message)
    assert got == [b"first", b""] and reader.buffered == 0


def test_a_message_too_large_is_told_by_its_length():
    """Five bytes suffice; the limit itself is allowed."""
    reader = MessageReader("identity", 10)
    reader.feed(framed(b"x" * 10))
    assert reader.next() == b"x" * 10
    reader.feed(framed(b"x" * 11)[:5])
    with pytest.raises(PayloadTooLargeError):
        reader.next()


def test_an_unannounced_compression_is_refused():
    """The flag without an encoding."""
    reader = MessageReader("identity", 10)
    reader.feed(b"\1\0\0\0\0")
    with pytest.raises(InvalidRequestError):
        reader.next()


def test_trailers_hold_any_text():
    """Percent-encoding as gRPC has it, binary rows without padding; no line end survives."""
    rows = dict(trailers_of(Status(3, "50 % of \u00fc\r\n", b"\0\1", (("a-bin", b"\0"), ("b", "c")))))
    assert rows["grpc-message"] == "50 %25 of %C3%BC%0D%0A"
    assert rows["grpc-status-details-bin"] == "AAE" and rows["a-bin"] == "AA" and rows["b"] == "c"
    assert trailers_of(Status(0)) == [("grpc-status", "0")]


def test_allowances_come_back_with_time_and_service():
    """Spent units return by the second and by what is served, up to the burst; a failed spending spends nothing."""
    allowance = Allowance(Rate(burst=2, per_s=1), 0.0)
    assert allowance.spend(2, 0.0) and not allowance.spend(1, 0.5)
    assert allowance.spend(1, 1.0) and not allowance.spend(1, 1.0)
    allowance.earn(100)
    assert allowance.spend(2, 1.0) and not allowance.spend(1, 1.0)


def test_strangers_are_remembered_by_address_and_bounded():
    """One allowance a network; the least recent of too many is forgotten."""
    known = StrangersAllowances(Rate(1, 0), lambda: 0.0)
    first = known.of("first")
    assert known.of("first") is first and known.of("second") is not first
    for number in range(MOST_ADDRESSES - 1):
        known.of(str(number))
    assert known.of("first") is not first
