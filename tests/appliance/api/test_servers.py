"""Start, drain and stop of both front ends."""

from __future__ import annotations

import asyncio
import socket

import grpc
import httpx
import openai
import pytest

from appliance.api.auth import Resolver
from appliance.api.generated import inference_pb2 as pb
from appliance.api.generated.inference_pb2_grpc import InferenceServiceStub
from appliance.api.keys import KeyTable
from appliance.api.servers import FrontEndSettings, serve_front_ends
from appliance.errors import StartError
from appliance.request import Started
from tests.appliance.api.support import MODEL, PEPPER, ScriptedService, serving, text_script

MESSAGES = [{"role": "user", "content": "hi"}]


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


async def test_a_drain_lets_running_answers_finish():
    """Both front ends: what runs ends whole, health says no, new work is turned away, and stop returns early."""
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
            with pytest.raises(httpx.TransportError):
                await other.get("/health/ready")
            gate.set()
            assert await whole == "done"
            assert [(await call.read()).WhichOneof("event") for _ in range(2)] == ["delta", "finished"]
            assert await call.read() is grpc.aio.EOF
            await asyncio.wait_for(stopping, 5.0)
            await running.front_ends.stop(1.0)


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
