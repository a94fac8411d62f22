"""Peers of the gRPC port that break the rules or keep them only by the letter: bounded, told, and nobody's harm."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import gzip
import struct
import zlib

import grpc
import h2.config
import h2.connection
import h2.events
import hpack
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from appliance.gateway.front.request_builder import MAX_BODY_BYTES
from appliance.gateway.grpc import connection, servicer
from appliance.gateway.grpc.call import GrpcCall
from appliance.gateway.grpc.generated import inference_pb2 as pb
from appliance.gateway.grpc.generated.inference_pb2_grpc import InferenceServiceStub
from appliance.gateway.grpc.servicer import SERVICE
from tests.appliance.gateway.front.support import text_script
from tests.appliance.gateway.grpc import raw_grpc as raw
from tests.appliance.gateway.grpc.grpc_client import ask, drained, proof_of
from tests.appliance.gateway.grpc.raw_grpc import Peer, frame

LIST = f"/{SERVICE}/ListModels"
MANY = 20_000
"""Frames of a flood, far over every allowance."""


def _call(stream: int, *more: tuple[str, str]) -> bytes:
    return frame(raw.HEADERS, raw.END_HEADERS, stream, raw.head(LIST, *more))


def _check(stream: int, data: bytes, flags: int = 0) -> bytes:
    head = frame(raw.HEADERS, raw.END_HEADERS, stream, raw.head("/grpc.health.v1.Health/Check"))
    return head + frame(raw.DATA, flags, stream, data)


def _resets() -> bytes:
    taken_back = struct.pack(">I", 8)
    return b"".join(_call(stream) + frame(raw.RST, 0, stream, taken_back) for stream in range(1, 2_001, 2))


FLOODS = {
    "ping": frame(raw.PING, 0, 0, b"x" * 8) * MANY,
    "settings": frame(raw.SETTINGS, 0, 0, b"\0\4\0\1\0\0") * MANY,
    "priority": frame(raw.PRIORITY, 0, 1, b"\0\0\0\0\1") * MANY,
    "window": frame(raw.WINDOW, 0, 0, b"\0\0\0\1") * MANY,
    "unknown": frame(0x77, 0, 0, b"?") * MANY,
    "empty data": _call(1) + frame(raw.DATA, 0, 1) * MANY,
    "small data": _check(1, b"\0" + struct.pack(">I", 60_000)) + frame(raw.DATA, 0, 1, b"x") * MANY,
    "health checks": b"".join(_check(stream, bytes(5), raw.END_STREAM) for stream in range(1, 401, 2)),
    "resets": _resets(),
    "hpack references": frame(
        raw.HEADERS, raw.END_HEADERS, 1, raw.head(LIST) + raw.literal("a", "v" * 3_900, indexed=True)
    )
    + frame(raw.HEADERS, raw.END_HEADERS, 3, raw.head(LIST) + b"\xbe" * 3_000),
    "empty continuation": frame(raw.HEADERS, 0, 1, raw.head(LIST)) + frame(raw.CONTINUATION, 0, 1) * MANY,
    "full continuation": frame(raw.HEADERS, 0, 1, raw.head(LIST))
    + frame(raw.CONTINUATION, 0, 1, raw.literal("b", "v" * 1_000) * 16) * 1_000,
    "wrong keys": b"".join(_call(stream, ("authorization", "Bearer no")) for stream in range(1, 401, 2)),
}


@pytest.mark.parametrize("name", FLOODS)
async def test_a_flood_ends_its_connection(running, channel, name):
    """Whoever makes work without asking anything is cut off, whichever frame it abuses; a tenant at the same address is
    served before, meanwhile and after."""
    stub = InferenceServiceStub(channel)
    assert await drained(stub.Generate(ask(), metadata=proof_of(running)))
    peer = await Peer.connect(running)
    peer.say(FLOODS[name])
    ended = asyncio.ensure_future(peer.farewell())
    assert await drained(stub.Generate(ask(), metadata=proof_of(running)))
    code = await ended
    # None: the flood was larger than what is read behind the farewell, so that the kernel's reset overtook it.
    assert code in (raw.ENHANCE_YOUR_CALM, None) or "continuation" in name
    assert await drained(stub.Generate(ask(), metadata=proof_of(running)))
    peer.close()


async def test_reconnecting_gains_nothing(running):
    """The allowance is the address's: after one flood the next connection has what every client's start needs, no more,
    and another address all of its own."""
    pings = frame(raw.PING, 0, 0, b"x" * 8) * (connection.FREE_FRAMES + 40)
    peers = [await Peer.connect(running) for _ in range(8)]
    for peer in peers:
        peer.say(pings)
    codes = [await asyncio.wait_for(_ended_or_none(peer), 20) for peer in peers]
    assert raw.ENHANCE_YOUR_CALM in codes
    other = await Peer.connect(running, address="127.0.0.9")
    other.say(pings)
    for _ in range(connection.FREE_FRAMES + 40):
        assert (await other.until(raw.PING)).flags == raw.ACK
    for peer in [*peers, other]:
        peer.close()


async def _ended_or_none(peer: Peer) -> int | None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1.0):
            return await peer.farewell()
    return None


async def test_a_tenant_has_an_allowance_of_its_own(running):
    """Behind a credential a connection may ping as busy clients do, also where its address has spent everything."""
    stranger = await Peer.connect(running)
    stranger.say(FLOODS["ping"])
    assert await stranger.farewell() in (raw.ENHANCE_YOUR_CALM, None)
    peer = await Peer.connect(running)
    peer.say(_call(1, *proof_of(running)) + frame(raw.DATA, raw.END_STREAM, 1, bytes(5)))
    assert await peer.until(raw.HEADERS)
    for _ in range(10):
        peer.say(frame(raw.PING, 0, 0, b"12345678") * 100)
        for _ in range(100):
            assert (await peer.until(raw.PING)).payload == b"12345678"
    peer.close()


async def test_silence_ends(running, monkeypatch):
    """A connection that never asks anything is closed in time, with or without a preface; one that asks stays."""
    monkeypatch.setattr(connection, "FIRST_S", 0.5)
    silent, greeted, asking = [await Peer.connect(running, preface=preface) for preface in (False, True, True)]
    asking.say(_call(1, *proof_of(running)) + frame(raw.DATA, raw.END_STREAM, 1, bytes(5)))
    assert await asking.until(raw.HEADERS)
    assert await silent.farewell() == 0 and await greeted.farewell() == 0
    asking.say(_call(3, *proof_of(running)) + frame(raw.DATA, raw.END_STREAM, 3, bytes(5)))
    while (await asking.until(raw.HEADERS)).stream != 3:
        pass
    asking.close()


async def test_a_dead_peer_with_a_running_call_is_noticed(running, monkeypatch):
    """A peer that is silent while its call runs is asked by a ping; one that does not answer has gone."""
    monkeypatch.setattr(connection, "PING_S", 0.3)
    monkeypatch.setattr(connection, "PONG_S", 0.3)
    running.service.script = [asyncio.Event()]
    peer = await Peer.connect(running)
    message = ask().SerializeToString()
    peer.say(frame(raw.HEADERS, raw.END_HEADERS, 1, raw.head(f"/{SERVICE}/Generate", *proof_of(running))))
    peer.say(frame(raw.DATA, raw.END_STREAM, 1, b"\0" + struct.pack(">I", len(message)) + message))
    while (asked := await peer.until(raw.PING)).flags:
        pass
    assert asked.payload == connection.ALIVE
    async with asyncio.timeout(20):
        await running.service.closed.wait()
    peer.close()


async def test_http_1_is_told_where_it_is(running):
    """A client of the other API reads in plain words which port this is."""
    peer = await Peer.connect(running, preface=False)
    peer.say(b"GET /v1/models HTTP/1.1\r\nhost: a\r\n\r\n")
    async with asyncio.timeout(20):
        said = await peer.reader.read()
    assert said.startswith(b"HTTP/1.1 400") or b"HTTP/1.1 400" in said
    assert b"gRPC" in said
    peer.close()


@pytest.mark.parametrize(
    ("method", "media", "status"),
    [("GET", "application/grpc", "405"), ("POST", "application/json", "415"), ("POST", "application/grpc", "200")],
)
async def test_what_is_no_call_is_answered_in_http(running, method, media, status):
    """Another method or content type gets HTTP's status, as gRPC's document says; the last row is a call."""
    client, seen = _client(), []
    peer = await Peer.connect(running, preface=False)
    rows = [(":method", method), (":scheme", "http"), (":path", LIST), (":authority", "a"), ("content-type", media)]
    client.send_headers(1, rows, end_stream=True)
    peer.say(client.data_to_send())
    async with asyncio.timeout(20):
        while not seen:
            events = client.receive_data(await peer.reader.read(65_536))
            seen = [event for event in events if isinstance(event, h2.events.ResponseReceived)]
    assert dict(seen[0].headers)[b":status"] == status.encode()
    peer.close()


def _client() -> h2.connection.H2Connection:
    client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding=None))
    client.initiate_connection()
    return client


async def test_segments_do_not_matter(running):
    """A call that comes byte by byte is answered as one that comes whole."""
    message = pb.ListModelsRequest().SerializeToString()
    data = b"\0" + struct.pack(">I", len(message)) + message
    whole = (
        raw.PREFACE
        + frame(raw.SETTINGS, 0, 0)
        + _call(1, *proof_of(running))
        + frame(raw.DATA, raw.END_STREAM, 1, data)
    )
    answers = []
    for size in (len(whole), 1):
        peer = await Peer.connect(running, preface=False)
        for start in range(0, len(whole), size):
            peer.say(whole[start : start + size])
            if size == 1:
                await peer.writer.drain()
                await asyncio.sleep(0)
        answers.append((await peer.until(raw.DATA)).payload)
        peer.close()
    assert answers[0] == answers[1] != b""


async def test_small_windows_give_whole_answers(running):
    """A client that opens its window byte by byte reads all of the answer; other streams of it are not held up."""
    running.service.script = text_script("x" * 3_000)
    client, got, ended = _client(), b"", False
    client.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 7})
    peer = await Peer.connect(running, preface=False)
    message = ask().SerializeToString()
    rows = [(":method", "POST"), (":scheme", "http"), (":path", f"/{SERVICE}/Generate"), (":authority", "a")]
    client.send_headers(1, [*rows, ("content-type", "application/grpc"), *proof_of(running)])
    client.send_data(1, b"\0" + struct.pack(">I", len(message)) + message, end_stream=True)
    peer.say(client.data_to_send())
    async with asyncio.timeout(20):
        while not ended:
            for event in client.receive_data(await peer.reader.read(65_536)):
                if isinstance(event, h2.events.DataReceived):
                    got += event.data
                    client.increment_flow_control_window(max(1, len(event.data)) * 2, stream_id=1)
                ended = ended or isinstance(event, h2.events.StreamEnded)
            peer.say(client.data_to_send())
    assert got.count(b"x") >= 3_000
    peer.close()


@pytest.mark.parametrize("kind", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_compressed_messages_are_read(running, kind):
    """A client that compresses is understood."""
    async with grpc.aio.insecure_channel(running.target, compression=kind) as channel:
        assert await drained(InferenceServiceStub(channel).Generate(ask(text="y" * 5_000), metadata=proof_of(running)))
    assert len(running.service.requests) == 1


COMPRESSED = {
    "a bomb": ("gzip", 1, gzip.compress(bytes(MAX_BODY_BYTES * 2)), b"8"),
    "no gzip": ("gzip", 1, b"no gzip", b"3"),
    "cut off": ("gzip", 1, gzip.compress(b"")[:-4], b"3"),
    "more behind it": ("deflate", 1, zlib.compress(b"") + b"tail", b"3"),
    "not announced": ("identity", 1, b"", b"3"),
    "no such flag": ("gzip", 2, b"", b"3"),
    "no such encoding": ("br", 1, b"", b"12"),
    "sound": ("gzip", 1, gzip.compress(b""), b"0"),
    "announced, not used": ("gzip", 0, b"", b"0"),
}
"""Encoding, flag and content of a message, and the status that it gets."""


@pytest.mark.parametrize("name", COMPRESSED)
async def test_compression_is_bounded_and_checked(running, name):
    """A bomb, a broken or unannounced compression and an unknown one each end the call with their status."""
    encoding, flag, body, code = COMPRESSED[name]
    client, trailers = _client(), {}
    peer = await Peer.connect(running, preface=False)
    rows = [(":method", "POST"), (":scheme", "http"), (":path", LIST), (":authority", "a")]
    rows += [("content-type", "application/grpc"), ("grpc-encoding", encoding), *proof_of(running)]
    client.send_headers(1, rows)
    client.send_data(1, bytes([flag]) + struct.pack(">I", len(body)) + body, end_stream=True)
    peer.say(client.data_to_send())
    async with asyncio.timeout(20):
        while b"grpc-status" not in trailers:
            for event in client.receive_data(await peer.reader.read(65_536)):
                if isinstance(event, (h2.events.ResponseReceived, h2.events.TrailersReceived)):
                    trailers.update(dict(event.headers))
    assert trailers[b"grpc-status"] == code
    peer.close()


@pytest.mark.parametrize("end", ["goaway", "reset"])
async def test_a_call_that_ends_before_it_begins_leaves_nothing(running, end):
    """Calls whose deadline is thousands of years away, taken back in the same segment, are freed with their headers."""
    gc.collect()
    before = _left(GrpcCall)
    peer = await Peer.connect(running)
    block = raw.head("/grpc.health.v1.Health/Check", ("grpc-timeout", "99999999H"))
    calls = [frame(raw.HEADERS, raw.END_HEADERS, stream, block) for stream in range(1, 9, 2)]
    if end == "reset":
        peer.say(b"".join(calls[n] + frame(raw.RST, 0, 2 * n + 1, struct.pack(">I", 8)) for n in range(len(calls))))
        peer.say(frame(raw.PING, 0, 0, b"12345678"))
        assert await peer.until(raw.PING)
    else:
        peer.say(b"".join(calls) + frame(raw.GOAWAY, 0, 0, bytes(8)))
        await peer.farewell()
    peer.close()
    async with asyncio.timeout(5):
        while _left(GrpcCall) > before:
            await asyncio.sleep(0.05)
            gc.collect()


def _left(kind: type) -> int:
    return sum(isinstance(one, kind) for one in gc.get_objects())


@pytest.mark.parametrize("size", [0, 100, 4_096, 2**32 - 1])
async def test_a_peer_cannot_make_the_table_of_answers_large(running, size):
    """However much a peer allows the table of header compression, it holds what it does by default at most, and answers
    are read right by a peer that allows so much."""
    peer = await Peer.connect(running, preface=False)
    peer.say(raw.PREFACE + frame(raw.SETTINGS, 0, 0, struct.pack(">HI", 1, size)))
    decoder = hpack.Decoder()
    decoder.max_allowed_table_size = size
    (open_one,) = running.front_ends._opened["grpc", ""].connections
    for stream in range(1, 200, 2):
        call = raw.head("/no/such", ("authorization", f"Bearer {running.key}"))
        peer.say(frame(raw.HEADERS, raw.END_HEADERS | raw.END_STREAM, stream, call))
        got = await peer.until(raw.HEADERS)
        assert (b"grpc-status", b"12") in decoder.decode(got.payload, raw=True)
    assert open_one._outlet.h2.encoder.header_table._current_size <= min(size, 4_096)
    peer.close()


async def test_a_watcher_that_reads_nothing_delays_nobody(running, channel, monkeypatch):
    """While a tenant's watch of health waits for its caller's window, another tenant's watch is answered and told of
    the change, silent connections are ended in time, and the drain begins at once."""
    monkeypatch.setattr(connection, "FIRST_S", 0.5)
    peer = await Peer.connect(running, preface=False)
    peer.say(raw.PREFACE + frame(raw.SETTINGS, 0, 0, struct.pack(">HI", 4, 0)))
    call = raw.head("/grpc.health.v1.Health/Watch", ("authorization", f"Bearer {running.other_key}"))
    peer.say(frame(raw.HEADERS, raw.END_HEADERS, 1, call) + frame(raw.DATA, raw.END_STREAM, 1, bytes(5)))
    assert await peer.until(raw.HEADERS)
    async with asyncio.timeout(10):
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(), metadata=proof_of(running))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        running.ready[0] = False
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        silent = await Peer.connect(running)
        assert await silent.farewell() == 0
        await running.front_ends.stop(0.0)
    peer.close()


async def test_calls_are_not_free_on_a_new_connection(running):
    """Calls with a wrong key cost their address as much on many connections as on one: none of them is among the frames
    with which every connection may begin."""
    wrong = b"".join(_call(stream, ("authorization", "Bearer no")) for stream in range(1, 17, 2))
    peers = [await Peer.connect(running) for _ in range(48)]
    for peer in peers:
        peer.say(wrong)
    assert raw.ENHANCE_YOUR_CALM in await asyncio.gather(*map(_ended_or_none, peers))
    for peer in peers:
        peer.close()


async def test_frames_of_ended_calls_are_charged(running):
    """Whoever goes on with a call that was refused and reset is cut off, also where a frame with a meaning now and then
    shows that the connection is no silent one."""
    peer = await Peer.connect(running)
    peer.say(_call(1))
    assert await peer.until(raw.RST)
    peer.say((frame(raw.DATA, 0, 1) * 1_000 + frame(raw.PING, 0, 0, b"x" * 8)) * 20)
    async with asyncio.timeout(10):
        assert await peer.farewell() in (raw.ENHANCE_YOUR_CALM, None)
    peer.close()


async def test_silent_health_checks_take_nobodys_place(running, channel, monkeypatch):
    """Behind as many silent health checks of strangers as there are calls and readers, another address's health check
    is answered at once and a tenant is served; a check that announces more than a service's name is refused."""
    monkeypatch.setattr("appliance.gateway.grpc.servicer.TENANT_READERS", 4)
    running.front_ends._grpc._max_calls = 8
    peers = [await Peer.connect(running, address=f"127.0.0.{number}") for number in (2, 3)]
    for peer in peers:
        peer.say(b"".join(_check(stream, b"") for stream in range(1, 17, 2)) + frame(raw.PING, 0, 0, b"12345678"))
        assert await peer.until(raw.PING)
    async with asyncio.timeout(3):
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert await drained(InferenceServiceStub(channel).Generate(ask(), metadata=proof_of(running)))
        long = await Peer.connect(running, address="127.0.0.4")
        long.say(_check(1, b"\0" + struct.pack(">I", servicer.STRANGER_MESSAGE_BYTES + 1)))
        assert (b"grpc-status", b"8") in hpack.Decoder().decode((await long.until(raw.HEADERS)).payload, raw=True)
    for peer in [*peers, long]:
        peer.close()
