"""The same front ends on both event loops that a deployment may use."""

from __future__ import annotations

import asyncio

import grpc
import httpx
import pytest
import uvloop

from appliance.gateway.generate_request import Started
from appliance.gateway.grpc.generated import inference_pb2 as pb
from appliance.gateway.grpc.generated.inference_pb2_grpc import InferenceServiceStub
from tests.appliance.gateway.front.support import MODEL, serving

BODY = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": True}


async def _walk() -> tuple[int, list[str], bool]:
    """A streamed answer over each front end, then a disconnect."""
    async with serving() as running, grpc.aio.insecure_channel(running.target) as channel:
        async with httpx.AsyncClient(base_url=running.base_url, headers=running.authorization) as client:
            answer = await client.post("/v1/chat/completions", json=BODY)
            call = InferenceServiceStub(channel).Generate(
                pb.GenerateRequest(model=MODEL, text="x"), metadata=tuple(running.authorization.items())
            )
            kinds = [event.WhichOneof("event") async for event in call]
            running.service.closed.clear()
            running.service.script = [Started(1, 0), asyncio.Event()]
            async with client.stream("POST", "/v1/chat/completions", json=BODY) as stream:
                await anext(stream.aiter_raw())
            await asyncio.wait_for(running.service.closed.wait(), 20.0)
        return answer.status_code, kinds, answer.content.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_both_loops_serve_and_cancel(loop):
    """Streams, gRPC and the watch for disconnects work on the stock loop and on uvloop."""
    with asyncio.Runner(loop_factory=loop) as runner:
        assert runner.run(_walk()) == (200, ["started", "delta", "delta", "finished"], True)
