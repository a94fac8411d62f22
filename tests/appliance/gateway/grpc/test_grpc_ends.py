"""How a gRPC call ends before its answer does: the client cancels, its deadline passes, or it does not read."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from appliance.gateway.generate_request import Started
from appliance.gateway.grpc.generated.inference_pb2_grpc import InferenceServiceStub
from tests.appliance.gateway.front.support import serving, text_script
from tests.appliance.gateway.grpc.grpc_client import ask, proof_of, refused


@pytest.mark.parametrize("started", [False, True])
async def test_a_cancelled_call_ends_its_session(running, channel, started):
    """Before the first event or after it, the iterator is closed at once."""
    running.service.script = [Started(1, 0), asyncio.Event()] if started else [asyncio.Event()]
    call = InferenceServiceStub(channel).Generate(ask(), metadata=proof_of(running))
    await asyncio.wait_for(running.service.asked.wait(), 20.0)
    if started:
        await call.read()
    assert not running.service.closed.is_set()
    call.cancel()
    await asyncio.wait_for(running.service.closed.wait(), 20.0)


async def test_a_cancel_in_mid_stream_stops_it_soon(running, channel):
    """While tokens flow, the session yields no more than a few of its thousands after the cancel."""
    running.service.script = [Started(1, 0), *[step for _ in range(5_000) for step in (text_script("x")[1], 0.002)]]
    call = InferenceServiceStub(channel).Generate(ask(), metadata=proof_of(running))
    for _ in range(5):
        await call.read()
    call.cancel()
    at_cancel = running.service.yielded
    await asyncio.wait_for(running.service.closed.wait(), 20.0)
    assert running.service.yielded - at_cancel <= 100


async def test_a_deadline_reaches_the_session_and_ends_it(running, channel):
    """The client's deadline is the request's, and when it passes the iterator is closed."""
    running.service.script = [asyncio.Event()]
    caught = await refused(InferenceServiceStub(channel).Generate(ask(), metadata=proof_of(running), timeout=0.2))
    assert caught.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert running.service.requests[0].deadline is not None
    await asyncio.wait_for(running.service.closed.wait(), 20.0)


async def test_a_reader_that_takes_nothing_is_ended():
    """A call whose client never reads ends after the stall time, and its session with it."""
    async with serving(grpc_stall_s=0.3) as running:
        running.service.script = [Started(1, 0), *text_script(*["x" * 65_536] * 2_000)[1:]]
        async with grpc.aio.insecure_channel(running.target) as channel:
            call = InferenceServiceStub(channel).Generate(ask(), metadata=proof_of(running))
            await asyncio.wait_for(running.service.closed.wait(), 10.0)
            assert running.service.yielded < 2_000
            call.cancel()


async def test_a_slow_reader_that_reads_is_served():
    """The positive control: pauses shorter than the stall time cost nothing."""
    async with serving(grpc_stall_s=0.5) as running:
        running.service.script = text_script(*["x" * 65_536] * 20)
        async with grpc.aio.insecure_channel(running.target) as channel:
            call = InferenceServiceStub(channel).Generate(ask(), metadata=proof_of(running))
            events = 0
            async for _ in call:
                events += 1
                await asyncio.sleep(0.02)
            assert events == 22
