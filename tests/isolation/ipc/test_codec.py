"""The codec: round trips, bounds on both sides, and hostile bytes."""

from __future__ import annotations

import random
import struct
import tracemalloc
from array import array
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isolation.ipc import codec
from isolation.ipc import messages as m
from isolation.ipc import public as pu
from isolation.ipc import text as t
from isolation.ipc.codec import GuestMessage, HostMessage, decode, encode
from isolation.ipc.engine import RequestFailure, Started, StepOutput, Submit
from isolation.ipc.errors import LocalProtocolError, RemoteProtocolError
from isolation.ipc.frame import HEADER, HEADER_BYTES, Kind
from isolation.ipc.logprob import TokenLogprobs
from isolation.ipc.text import Decoded, Encode, Encoded, ReadVocabulary, Vocabulary
from tests.isolation.ipc.fuzz import fuzz_decode
from tests.isolation.ipc.strategies import BY_TYPE, SAMPLES, submit

PROPERTY = settings(max_examples=200, deadline=None, derandomize=True)

SUBMIT = next(sample for sample in SAMPLES if isinstance(sample, Submit))
STEP = next(sample for sample in SAMPLES if isinstance(sample, StepOutput))
INF, NAN = float("inf"), float("nan")


PROMPT = struct.Struct("<QIIB")
"""Head of one prompt's log-probabilities."""


def frame(kind: int, payload: bytes, *, request: int = 0, version: int = m.PROTOCOL_VERSION):
    """A frame built by hand, as a peer without our codec could."""
    return HEADER.pack(HEADER_BYTES + len(payload), kind, version, request) + payload


def sampled(**fields: float) -> Submit:
    """A request that differs from the sample in its sampling numbers."""
    return replace(SUBMIT, sampling=replace(SUBMIT.sampling, **fields))


def test_every_message_has_a_strategy_and_a_sample():
    """No message is left out of the properties below."""
    every = {*HostMessage.__args__, *GuestMessage.__args__}
    assert every == BY_TYPE.keys() == {type(sample) for sample in SAMPLES}
    assert len(Kind) == len(every)


@pytest.mark.parametrize("examples", [60, pytest.param(200, marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", BY_TYPE, ids=lambda kind: kind.__name__)
def test_round_trip(kind, examples):
    """Each message survives encode and decode, and its frame begins with its own length."""

    @given(BY_TYPE[kind])
    @settings(PROPERTY, max_examples=examples)
    def holds(message):
        data = encode(message)
        assert decode(data) == message
        assert int.from_bytes(data[:4], "little") == len(data)
        fuzz_decode(data)

    holds()


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: type(sample).__name__)
def test_every_truncation_is_refused_or_canonical(sample):
    """A frame cut anywhere is refused as it is; with its length mended it decodes canonically or
    is refused."""
    data = encode(sample)
    for end in range(len(data)):
        with pytest.raises(RemoteProtocolError):
            decode(data[:end])
        fuzz_decode(struct.pack("<I", end) + data[4:end])


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: type(sample).__name__)
def test_trailing_bytes_are_refused(sample):
    """A byte behind the frame is refused, as is one inside it unless a text or a list grew."""
    data = encode(sample)
    with pytest.raises(RemoteProtocolError):
        decode(data + b"\0")
    fuzz_decode(struct.pack("<I", len(data) + 1) + data[4:] + b"\0")


def test_bit_flips_give_a_message_or_a_remote_error():
    """Every single bit flip and 10,000 random multi-byte changes of valid frames stay within the
    protocol."""
    rng = random.Random(1)
    frames = [encode(sample) for sample in SAMPLES]
    cases = 0
    for data in frames:
        for bit in range(8 * len(data)):
            changed = bytearray(data)
            changed[bit // 8] ^= 1 << bit % 8
            fuzz_decode(bytes(changed))
            cases += 1
    for _ in range(10_000):
        changed = bytearray(rng.choice(frames))
        for _ in range(rng.randint(1, 6)):
            changed[rng.randrange(4, len(changed))] = rng.randrange(256)
        fuzz_decode(bytes(changed))
    assert cases > 2_000


@given(st.binary(max_size=200), st.sampled_from(Kind), st.integers(0, 2))
@settings(max_examples=2_000, deadline=None, derandomize=True)
def test_random_payloads_give_a_message_or_a_remote_error(payload, kind, request):
    """Any payload under a valid header of any kind stays within the protocol, and so do raw
    bytes."""
    fuzz_decode(frame(kind, payload, request=request))
    fuzz_decode(payload)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (frame(99, b""), "unknown kind"),
        (frame(Kind.DRAIN, b"", version=1), "speaks protocol version 1"),
        (frame(Kind.DRAIN, b"", request=1), "names a request"),
        (HEADER.pack(17, Kind.DRAIN, m.PROTOCOL_VERSION, 0), "claims a length"),
        (b"", "outside the protocol"),
        (frame(Kind.HELLO, struct.pack("<HB", 1, 9)), "9 is not a valid Role"),
        (frame(Kind.ENCODE, struct.pack("<BI", 4, 1)), "not a valid SourceKind"),
        (frame(Kind.ENCODE, struct.pack("<BI", 1, 1) + b"\xff"), "not UTF-8"),
        (frame(Kind.ENCODE, struct.pack("<BI", 1, (1 << 20) + 1)), "max_tokens"),
        (frame(Kind.DECODED, b"\xc3"), "not UTF-8"),
        (frame(Kind.KEEP, bytes(36) + b"\x10" + bytes(16)), "no content"),
        (frame(Kind.KEEP, bytes(36) + b"\x00" + bytes(16)), "name is 0"),
        (frame(Kind.KEEP, bytes(36) + b"\x21" + bytes(64)), "name is 33"),
        (frame(Kind.KEEP, bytes(32) + b"\x01\x00\x10\x00\x01" + bytes(2)), "left out is 1048577"),
        (frame(Kind.WITHDRAW, bytes(32)), "no name"),
        (frame(Kind.WITHDRAW, bytes(32 + 33)), "name is 33"),
        (frame(Kind.FETCH, bytes(36) + b"\x10\x00" + bytes(17)), "no whole names"),
        (frame(Kind.FETCH, bytes(36) + b"\x00\x00"), "no whole names"),
        (frame(Kind.FETCH, bytes(36) + b"\x10\x00"), "blocks is 0"),
        (frame(Kind.FETCH, bytes(36) + b"\x10\x04" + bytes(16)), "flag that there is not"),
        (frame(Kind.FETCH, bytes(36) + b"\x01\x00" + bytes(8193)), "blocks is 8193"),
        (frame(Kind.FORGET, bytes(31)), "another length"),
        (frame(Kind.CONFIGURE, b"\xff"), "not UTF-8"),
        (frame(Kind.CONFIGURE, bytes(m.MAX_CONFIG_BYTES + 1)), "above the limit"),
        (frame(Kind.ENCODED, b"\x00123"), "cut off"),
        (frame(Kind.ENCODED, b"\x03"), "not a valid Thinking"),
        (frame(Kind.ENCODED, bytes(1 + 4 * m.MAX_TOKENS_PER_REQUEST + 4)), "above the limit"),
        (frame(Kind.READ_OUTPUT, struct.pack("<IBBBI", 0, 0, 0, 0, 2) + bytes(7)), "within the token ids"),
        (frame(Kind.READ_OUTPUT, struct.pack("<IBBBI", 2, 0, 0, 0, 1) + bytes(4)), "shown is 2"),
        (frame(Kind.READ_OUTPUT, struct.pack("<IBBBI", 0, 0, 0, 0, 0) + b"\xff"), "not UTF-8"),
        (frame(Kind.READ_OUTPUT, struct.pack("<IBBBI", 0, 0, 0, 2, 0)), "neither 0 nor 1"),
        (frame(Kind.READ_OUTPUT, struct.pack("<IBBBI", 0, 0, 9, 0, 0)), "not a valid Finish"),
        (frame(Kind.OUTPUT_READ, struct.pack("<BII", 0, 0, 1)), "within the parts"),
        (frame(Kind.OUTPUT_READ, struct.pack("<BIIBII", 0, 0, 1, 1, 0, 2) + b"x"), "within the texts"),
        (frame(Kind.OUTPUT_READ, struct.pack("<BIIBII", 0, 0, 1, 1, 0, 1) + b"xx"), "frame's length"),
        (frame(Kind.OUTPUT_READ, struct.pack("<BIIBII", 0, 0, 1, 7, 0, 0)), "not a valid PartKind"),
        (frame(Kind.OUTPUT_READ, struct.pack("<BIIBII", 0, 0, 1, 1, 0, 1) + b"\xff"), "not UTF-8"),
        (frame(Kind.OUTPUT_READ, struct.pack("<BII", 0, 1 << 21, 0)), "reasoning_tokens"),
        (frame(Kind.FAILED, b""), "missing"),
        (frame(Kind.FAILED, b"\xc8"), "not a valid FailureCode"),
        (frame(Kind.FAILED, b"\x01\xff"), "not UTF-8"),
        (frame(Kind.FAILED, b"\x01" + bytes(m.MAX_REASON_BYTES + 1)), "above the limit"),
        (frame(Kind.TEXT_READY, struct.pack("<IBBBBBII", 1, 2, 0, 0, 0, 0, 0, 0)), "neither 0 nor 1"),
        (frame(Kind.TEXT_READY, struct.pack("<IBBBBBII", 0, 1, 0, 0, 0, 0, 0, 0)), "vocab_size"),
        (frame(Kind.TEXT_READY, struct.pack("<IBBBBBII", 9, 1, 0, 0, 0, 0, 9, 0)), "think_begins is 9"),
        (frame(Kind.TEXT_READY, struct.pack("<IBBBBBII", 9, 1, 0, 0, 0, 0, 0, 9)), "think_ends is 9"),
        (frame(Kind.TEXT_READY, struct.pack("<IBBBBBII", 9, 1, 0, 0, 0, 0, 1, m.NO_TOKEN)), "is missing"),
        (frame(Kind.ENGINE_READY, struct.pack("<4IBBBIB", 1, 1, 0, 1, 0, 0, 0, 0, 0)), "block_size"),
        (frame(Kind.PUBLIC_PREFIXES, struct.pack("<I", 65)), "above the limit"),
        (frame(Kind.PUBLIC_PREFIXES, struct.pack("<I", 2)), "does not fit"),
        (frame(Kind.PUBLIC_PREFIXES, struct.pack("<I32sI", 1, bytes(32), 1 << 31)), "frame's length"),
        (frame(Kind.PUBLIC_USAGE, bytes(44)), "no whole uses"),
        (frame(Kind.PUBLIC_USAGE, struct.pack("<32sBIQ", bytes(32), 9, 0, 0)), "PublicState"),
        (frame(Kind.ENGINE_READY, struct.pack("<4IBBBIB", 1, 1, 1, 1, 2, 0, 0, 0, 0)), "flag"),
        (frame(Kind.VOCABULARY, struct.pack("<II", 0, 1)), "within the lengths"),
        (frame(Kind.VOCABULARY, struct.pack("<IIH", 0, 1, 2) + b"x"), "do not give"),
        (frame(Kind.VOCABULARY, struct.pack("<IIH", 0, 1, 1025) + bytes(1025)), "longest entry"),
        (frame(Kind.VOCABULARY, struct.pack("<IIH", 0xFFFF_FFFF, 2, 0) + bytes(2)), "start"),
        (frame(Kind.VOCABULARY, struct.pack("<II", 0, 8193) + bytes(2 * 8193)), "entries"),
        (frame(Kind.STEP_OUTPUT, bytes(31)), "malformed StepOutput"),
        (frame(Kind.STEP_OUTPUT, struct.pack("<12I", 1, *[0] * 11) + bytes(12) + b"\3"), "Finish"),
        (frame(Kind.STEP_OUTPUT, struct.pack("<12I", 0, 0, 0, 0, 1, *[0] * 7) + bytes(12)), "sum"),
        (frame(Kind.STEP_OUTPUT, struct.pack("<12I", 0, 0, 1, *[0] * 9) + bytes(9)), "Code"),
        (frame(Kind.STEP_OUTPUT, struct.pack("<12I", *[0] * 9, 1, 0, 0) + PROMPT.pack(7, 1, 0, 0)), "positions"),
        (frame(Kind.STEP_OUTPUT, struct.pack("<12I", *[0] * 9, 1, 1, 0) + PROMPT.pack(7, 0, 1, 0) + bytes(8)), "start"),
        (frame(Kind.STEP_OUTPUT, struct.pack("<12I", *[0] * 9, 1, 1, 0) + PROMPT.pack(7, 1, 2, 0) + bytes(8)), "sum"),
        (
            frame(Kind.STEP_OUTPUT, struct.pack("<12I", *[0] * 9, 1, 1, 1) + PROMPT.pack(7, 1, 1, 0) + bytes(20)),
            "alternatives of prompts",
        ),
        (
            frame(Kind.STEP_OUTPUT, struct.pack("<12I", *[0] * 9, 1, 1, 21) + PROMPT.pack(7, 1, 1, 21) + bytes(260)),
            "same number",
        ),
        (
            frame(Kind.STEP_OUTPUT, struct.pack("<12I", *[0] * 9, 1, 1, 0) + PROMPT.pack(7, 1, 1, 0) + b"\xff" * 8),
            "not finite",
        ),
        (frame(Kind.STEP_OUTPUT, struct.pack("<12I", 65_537, *[0] * 11) + bytes(13 * 65_537)), "above the limit"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_frames_outside_the_protocol_are_the_peers_fault(data, says):
    """Each forged frame is refused with a text that names what is wrong."""
    with pytest.raises(RemoteProtocolError, match=says):
        decode(data)


BREACHES = [
    *(sampled(temperature=value) for value in (-0.1, INF, NAN)),
    *(sampled(top_p=value) for value in (0.0, 1.01, -1.0, NAN, INF)),
    *(sampled(min_p=value) for value in (-0.1, 1.1, NAN)),
    *(sampled(typical_p=value) for value in (0.0, 1.01, -1.0, NAN)),
    *(sampled(repetition_penalty=value) for value in (0.0, -1.0, INF, NAN)),
    *(sampled(presence_penalty=value) for value in (-2.1, 2.1, NAN)),
    *(sampled(frequency_penalty=value) for value in (-2.1, 2.1, -INF)),
    replace(SUBMIT, token_ids=array("I")),
    replace(SUBMIT, max_tokens=0),
    replace(SUBMIT, max_tokens=m.MAX_TOKENS_PER_REQUEST + 1),
    replace(SUBMIT, stop_ids=(1,) * (m.MAX_STOP_IDS + 1)),
    replace(SUBMIT, logprobs=m.MAX_TOP_LOGPROBS + 1),
    replace(SUBMIT, logprobs=-2),
    replace(SUBMIT, weight=0),
    replace(SUBMIT, weight=1001),
    replace(SUBMIT, priority=3),
    replace(SUBMIT, deadline_us=m.MAX_DEADLINE_US + 1),
    replace(STEP, finishes=b"\0\0"),
    replace(STEP, finishes=b"\0\0\3"),
    replace(STEP, logprobs=(TokenLogprobs(3, 0.0, (), ()),)),
    replace(STEP, logprobs=(TokenLogprobs(1, 0.0, (), ()), TokenLogprobs(1, 0.0, (), ()))),
    replace(STEP, logprobs=(TokenLogprobs(0, NAN, (), ()),)),
    replace(STEP, logprobs=(TokenLogprobs(0, 0.0, (1,), (-INF,)),)),
    replace(STEP, logprobs=(TokenLogprobs(0, 0.0, (1,) * 21, (0.0,) * 21),)),
    m.EngineReady(0, 1, 1, 1),
    m.EngineReady(1, 1, 1, 1, weights=max(m.WeightForm) + 1),
    pu.PublicPrefixes((pu.PublicPrefix(bytes(32), array("I")),)),
    pu.PublicPrefixes((pu.PublicPrefix(bytes(32), array("I", [1])),) * 2),
    pu.PublicPrefixes((pu.PublicPrefix(bytes(32), array("I", [1]) * (pu.MAX_PUBLIC_TOKENS + 1)),)),
    Encode(1, t.SourceKind.TEXT, b"\xff", 1),
    m.Failed(1, m.FailureCode.INVALID, "x" * (m.MAX_REASON_BYTES + 1)),
]


@pytest.mark.parametrize("message", BREACHES, ids=repr)
def test_a_bound_holds_on_both_sides(message, monkeypatch):
    """What ``encode`` refuses as our fault, ``decode`` refuses as the peer's, from a peer whose
    codec checks nothing."""
    with pytest.raises(LocalProtocolError):
        encode(message)
    data = unchecked(message, monkeypatch)
    with pytest.raises(RemoteProtocolError):
        decode(data)


def unchecked(message, monkeypatch) -> bytes:
    """The frame of a peer that checks nothing."""
    arm = codec._BY_MESSAGE[type(message)]
    with monkeypatch.context() as patch:
        patch.setitem(codec._BY_MESSAGE, type(message), replace(arm, check=lambda _: None))
        return encode(message)


@pytest.mark.parametrize(
    "message",
    [
        replace(SUBMIT, namespace=b"short"),
        replace(SUBMIT, token_ids=[1, 2]),
        replace(SUBMIT, token_ids=array("Q", [1])),
        replace(SUBMIT, stop_ids=(-1,)),
        replace(SUBMIT, request=-1),
        replace(SUBMIT, request=1 << 64),
        replace(SUBMIT, max_tokens=1.5),
        sampled(temperature="hot"),
        sampled(temperature=10**400),
        replace(STEP, requests=array("I", [1, 2, 3])),
        replace(STEP, requests=array("Q", [1])),
        replace(STEP, running=-1),
        replace(STEP, logprobs=(TokenLogprobs(0, 0.0, (1,), ()),)),
        replace(STEP, failures=(RequestFailure(1, 77),)),
        replace(STEP, starts=(Started(1, 1 << 32, 0),)),
        m.Hello(1, 5),
        Encode(1, t.SourceKind.TEXT, bytes(m.MAX_SOURCE_BYTES + 1), 1),
        Decoded(1, bytes(m.MAX_FRAME_BYTES)),
        m.Failed(1, m.FailureCode.INVALID, "\ud800"),
        Vocabulary(1, 0, (b"",) * (m.MAX_VOCABULARY_ENTRIES + 1)),
        Vocabulary(1, 0, (bytes(m.MAX_ENTRY_BYTES + 1),)),
        ReadVocabulary(1, -1),
        "no message",
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_cannot_be_sent_is_our_fault(message):
    """Wrong types, widths and sizes raise LocalProtocolError before anything is sent."""
    with pytest.raises(LocalProtocolError):
        encode(message)


def test_the_largest_messages_fit():
    """The longest prompt, source, list of ids and step fit into one frame."""
    ids = array("I", bytes(4 * m.MAX_TOKENS_PER_REQUEST))
    tokens = m.MAX_TOKENS_PER_FRAME
    for message in (
        replace(SUBMIT, token_ids=ids, stop_ids=(1,) * m.MAX_STOP_IDS),
        Encoded(1, ids),
        Encode(1, t.SourceKind.TEXT, b"x" * m.MAX_SOURCE_BYTES, 1),
        StepOutput(
            requests=array("Q", bytes(8 * tokens)), token_ids=array("I", bytes(4 * tokens)), finishes=bytes(tokens)
        ),
    ):
        assert decode(encode(message)) == message


@pytest.mark.parametrize("kind", [Kind.STEP_OUTPUT, Kind.SUBMIT, Kind.VOCABULARY])
def test_forged_counts_allocate_nothing(kind):
    """Counts of four thousand million in a small frame are refused without memory for them."""
    data = frame(kind, b"\xff" * 200)
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError):
            decode(data)
        assert tracemalloc.get_traced_memory()[1] < 64 << 10
    finally:
        tracemalloc.stop()


@given(submit)
@PROPERTY
def test_a_decoded_message_shares_no_memory_with_the_frame(message):
    """Arrays are copies: changing the bytes afterwards changes no message."""
    data = bytearray(encode(message))
    decoded = decode(bytes(data))
    data[:] = bytes(len(data))
    assert decoded == message
