"""Start, drain and stop of both front ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
from datetime import UTC, datetime

import grpc
import httpx
import openai
import pytest
import uvloop

from appliance.common.errors import StartError
from appliance.common.keys import KeyRecord, KeyTable, issue
from appliance.gateway import servers
from appliance.gateway.front.auth import Resolver
from appliance.gateway.front.own_listeners import OWN_CONNECTIONS
from appliance.gateway.generate_request import Started
from appliance.gateway.grpc.generated import inference_pb2 as pb
from appliance.gateway.grpc.generated.inference_pb2_grpc import InferenceServiceStub
from appliance.gateway.servers import FrontEndSettings, serve_front_ends
from tests.appliance.gateway.front.support import MODEL, PEPPER, ScriptedService, post, serving, text_script

MESSAGES = [{"role": "user", "content": "hi"}]
BODY = json.dumps({"model": MODEL, "messages": MESSAGES}).encode()


@pytest.mark.parametrize("which", ["http_port", "grpc_port"])
async def test_a_port_in_use_is_a_start_error(which):
    """Neither port is shared with another process, and the other port is free again after the failure."""
    service = ScriptedService()
    resolver = Resolver(service, lambda: KeyTable(PEPPER, {}))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = FrontEndSettings(**{"http_port": 0, "grpc_port": 0, which: port})
        with pytest.raises(StartError):
            async with serve_front_ends(service, resolver, settings):
                pass
    async with serve_front_ends(service, resolver, settings) as front_ends:
        assert getattr(front_ends, which) == port


async def _chat(client: openai.AsyncOpenAI) -> str:
    stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


@pytest.fixture
def patient(monkeypatch):
    """Open connections have longer than a slow machine needs; a drain ends before that once they are gone."""
    monkeypatch.setattr(servers, "LINGER_S", 15.0)


@pytest.mark.usefixtures("patient")
async def test_a_drain_lets_running_answers_finish():
    """Both front ends: what runs ends whole, health says no, no connection is taken, and stop returns early."""
    async with serving() as running:
        gate = asyncio.Event()
        running.service.script = [Started(1, 0), gate, *text_script("done")[1:]]
        async with (
            openai.AsyncOpenAI(base_url=running.base_url + "/v1", api_key=running.key, max_retries=0) as client,
            httpx.AsyncClient(base_url=running.base_url) as other,
            grpc.aio.insecure_channel(running.target) as channel,
        ):
            assert (await other.get("/health/ready")).status_code == 200
            whole = asyncio.ensure_future(_chat(client))
            call = InferenceServiceStub(channel).Generate(
                pb.GenerateRequest(model=MODEL, text="x"), metadata=tuple(running.authorization.items())
            )
            assert (await call.read()).started.input_tokens == 1
            while len(running.service.requests) < 2:
                await asyncio.sleep(0.005)
            stopping = asyncio.ensure_future(running.front_ends.stop(20.0))
            await asyncio.sleep(0.05)
            assert not stopping.done()
            assert (await other.get("/health/ready")).status_code == 503
            with pytest.raises(httpx.TransportError):
                await other.get("/health/ready")
            gate.set()
            assert await whole == "done"
            assert [(await call.read()).WhichOneof("event") for _ in range(2)] == ["delta", "finished"]
            assert await call.read() is grpc.aio.EOF
            await asyncio.wait_for(stopping, 5.0)
            await running.front_ends.stop(1.0)


@contextlib.asynccontextmanager
async def _serving_at(held: socket.socket):
    """Front ends at a listening socket that outlives them."""
    key, digest = issue("acme-1", PEPPER)
    keys = KeyTable(PEPPER, {"acme-1": KeyRecord(digest, datetime(2026, 1, 1, tzinfo=UTC))})
    service = ScriptedService()
    settings = FrontEndSettings(http_port=0, grpc_port=0, listen=lambda *_: held.dup())
    async with serve_front_ends(service, Resolver(service, lambda: keys), settings) as front_ends:
        yield front_ends, post("/v1/chat/completions", BODY, {"authorization": f"Bearer {key}"})


async def _answer(reader: asyncio.StreamReader) -> bytes:
    """Everything until the other side closes."""
    async with asyncio.timeout(20):
        return await reader.read()


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("grace_s", [20.0, 0.0])
def test_a_drain_answers_what_is_on_its_way(grace_s, loop):
    """Connections that were open as the drain began bring their requests: one that was never used, one that is kept
    alive. They are answered and closed; whoever connects later is answered by the next front ends at the same socket,
    once those accept. Control: without a grace the two are closed without an answer."""
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(_walk_through_a_drain(grace_s))


async def _walk_through_a_drain(grace_s: float) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        async with _serving_at(held) as (front_ends, request):
            await front_ends.accept()
            silent, kept = [await asyncio.open_connection(*held.getsockname()) for _ in range(2)]
            kept[1].write(request.replace(b"connection: close\r\n", b""))
            head = await kept[0].readuntil(b"\r\n\r\n")
            assert b"200 OK" in head and b"connection: close" not in head
            await kept[0].readexactly(int(head.partition(b"content-length: ")[2].split()[0]))
            stopping = asyncio.ensure_future(front_ends.stop(grace_s))
            await asyncio.sleep(0.1)
            later = await asyncio.open_connection(*held.getsockname())
            for _, writer in (silent, kept, later):
                writer.write(request.replace(b"connection: close\r\n", b""))
            answers = [await _answer(reader) for reader, _ in (silent, kept)]
            if grace_s:
                assert all(b"200 OK" in answer and b"connection: close" in answer for answer in answers), answers
            else:
                assert not any(answers)
            await asyncio.wait_for(stopping, 5.0)
        async with _serving_at(held) as (front_ends, _):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(later[0].read(1), 0.1)
            await front_ends.accept()
            assert b"401 Unauthorized" in await later[0].readuntil(b"\r\n\r\n"), "another key, so the next one's answer"
            for _, writer in (silent, kept, later):
                writer.close()


async def test_a_notice_ends_connections_and_takes_requests():
    """While a drain is announced, requests are taken at old and new connections, each answer of HTTP ends its
    connection, gRPC's clients are told to open no more calls there (and their next call comes over another
    connection), and what runs goes on. Control: before and after the notice connections are kept."""
    begun = [False]
    async with serving(leaving=lambda: begun[0]) as running:
        request = post("/v1/chat/completions", BODY, running.authorization).replace(b"connection: close\r\n", b"")
        reader, writer = await asyncio.open_connection("127.0.0.1", running.front_ends.http_port)
        channel = grpc.aio.insecure_channel(running.target)
        listed = InferenceServiceStub(channel).ListModels
        proof = tuple(running.authorization.items())
        for announced in (False, True, False):
            begun[0] = announced
            running.front_ends.refresh()
            for _ in range(2):
                if reader.at_eof():
                    writer.close()
                    reader, writer = await asyncio.open_connection("127.0.0.1", running.front_ends.http_port)
                writer.write(request)
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
                assert b"200 OK" in head and (b"connection: close" in head) is announced
                await reader.readexactly(int(head.partition(b"content-length: ")[2].split()[0]))
                if announced:
                    assert await asyncio.wait_for(reader.read(), 10) == b""
                await asyncio.wait_for(listed(pb.ListModelsRequest(), metadata=proof), 10)
        writer.close()
        await channel.close()


async def test_a_drain_ends_what_does_not_finish():
    """After the grace both kinds of clients get a typed, retryable error, and every session is closed."""
    async with serving() as running:
        running.service.script = [Started(1, 0), asyncio.Event()]
        async with (
            openai.AsyncOpenAI(base_url=running.base_url + "/v1", api_key=running.key, max_retries=0) as client,
            grpc.aio.insecure_channel(running.target) as channel,
        ):
            stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
            waiting = asyncio.ensure_future(client.chat.completions.create(model=MODEL, messages=MESSAGES))
            call = InferenceServiceStub(channel).Generate(
                pb.GenerateRequest(model=MODEL, text="x"), metadata=tuple(running.authorization.items())
            )
            await call.read()
            while len(running.service.requests) < 3:
                await asyncio.sleep(0.005)
            await asyncio.wait_for(running.front_ends.stop(0.1), 5.0)
            with pytest.raises(openai.APIError) as streamed:
                async for _ in stream:
                    pass
            assert streamed.value.code == "server_is_overloaded"
            with pytest.raises(openai.InternalServerError) as collected:
                await waiting
            assert collected.value.status_code == 503
            assert collected.value.response.headers["x-should-retry"] == "true"
            assert await call.code() is grpc.StatusCode.UNAVAILABLE
            assert "shutting down" in await call.details()


async def test_leaving_the_block_stops_everything():
    """No port answers afterwards."""
    async with serving() as running:
        port = running.front_ends.http_port
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


def test_connections_leave_descriptors_for_the_rest(monkeypatch):
    """Where few open files are allowed, both ports together leave the reserve free, and listeners of single tenants
    share with them; where many are, nothing changes."""
    for soft, expected in ((1_024, 384), (65_536, 1_024), (resource.RLIM_INFINITY, 1_024), (64, 8)):
        monkeypatch.setattr(resource, "getrlimit", lambda _kind, soft=soft: (soft, soft))
        assert servers._affordable(1_024, 0) == (expected, OWN_CONNECTIONS)
    for soft, own, expected in ((1_024, 2, (192, 192)), (65_536, 64, (1_024, 256)), (64, 64, (8, 8))):
        monkeypatch.setattr(resource, "getrlimit", lambda _kind, soft=soft: (soft, soft))
        assert servers._affordable(1_024, own) == expected
    assert servers._affordable(4, 0) == (4, OWN_CONNECTIONS)
