"""Padded answers over gRPC: messages of one size, one a tick, of a number that is one of few."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import grpc
import pytest

from appliance.common.errors import InvalidRequestError, UnavailableError
from appliance.gateway.front.padding import Padding
from appliance.gateway.generate_request import Delta, Finished, FinishReason, Started
from appliance.gateway.grpc.generated import inference_pb2 as pb
from appliance.gateway.grpc.generated.inference_pb2_grpc import InferenceServiceStub
from appliance.gateway.grpc.paced_grpc import OVERHEAD_BYTES, fill_message
from appliance.gateway.grpc.servicer import SERVICE
from tests.appliance.gateway.front.support import Running, Step, logprob_script, serving, text_script
from tests.appliance.gateway.grpc.grpc_client import ask, drained, proof_of, refused

QUICK = Padding(tick_s=0.08, record_bytes=256, first_records=4, growth=4)
"""Four ticks are longer than a busy machine holds an answer back."""
SHORT = text_script("yes")
LONG = [Started(700, 320), *(Delta(f"word{n} ", (n,)) for n in range(20)), Finished(FinishReason.LENGTH, 700, 320, 20)]


@pytest.fixture
async def padded() -> AsyncIterator[Running]:
    """Front ends whose tenant acme has padded answers, with short ticks."""
    async with serving(padding=QUICK) as running:
        running.service.padded = {"acme"}
        yield running


@pytest.fixture
async def channel(padded: Running) -> AsyncIterator[grpc.aio.Channel]:
    """A client's connection to them."""
    async with grpc.aio.insecure_channel(padded.target) as opened:
        yield opened


async def raw(running: Running, channel: grpc.aio.Channel, script: list[Step], **fields: object) -> list[bytes]:
    """The bytes of each message of one answer."""
    running.service.script = script
    call = channel.unary_stream(f"/{SERVICE}/Generate", pb.GenerateRequest.SerializeToString)
    return await drained(call(ask(**fields), metadata=proof_of(running)))


def said(messages: list[bytes]) -> list[pb.GenerateResponse]:
    """Those with an event."""
    parsed = [pb.GenerateResponse.FromString(message) for message in messages]
    return [message for message in parsed if message.WhichOneof("event") is not None]


async def test_streams_of_any_content_look_alike(padded: Running, channel: grpc.aio.Channel) -> None:
    """One word, many words, and a pause: the same number of messages of the same size, and the text is whole."""
    slow: list[Step] = [Started(7, 3), Delta("a", (1,)), 0.05, Delta("b", (2,)), Finished(FinishReason.STOP, 7, 3, 2)]
    for script, text in ((SHORT, "yes"), (LONG, "".join(f"word{n} " for n in range(20))), (slow, "ab")):
        messages = await raw(padded, channel, script)
        assert [len(message) for message in messages] == [256] * 4
        events = said(messages)
        assert events[0].HasField("started")
        assert "".join(event.delta.text for event in events) == text
        assert messages[-1] and said(messages[-1:])[0].HasField("finished")


async def test_without_the_class_they_do_not(padded: Running, channel: grpc.aio.Channel) -> None:
    """Control: the other tenant's messages are as many and as long as what they say."""
    padded.service.padded = {"globex"}
    sizes = [[len(one) for one in await raw(padded, channel, script)] for script in (SHORT, LONG)]
    assert len(sizes[0]) != len(sizes[1])
    assert len(set(sizes[1])) > 1


async def test_what_does_not_fit_is_cut(padded: Running, channel: grpc.aio.Channel) -> None:
    """Text longer than a message comes in several; log-probabilities make messages larger, all of them alike."""
    long = [Started(7, 3), Delta("x" * 1_000, (1,)), Finished(FinishReason.STOP, 7, 3, 1)]
    messages = await raw(padded, channel, long)
    assert [len(message) for message in messages] == [256] * 16
    assert "".join(event.delta.text for event in said(messages)) == "x" * 1_000
    scored = await raw(padded, channel, logprob_script(), logprobs=2)
    assert {len(message) for message in scored} == {256 * 16}
    assert [entry.text for event in said(scored) for entry in event.delta.logprobs] == [b"a", b"\xc3", b"\xa9"]


async def test_an_error_in_the_middle_waits_like_an_end(padded: Running, channel: grpc.aio.Channel) -> None:
    """A session that fails while it streams ends with its status after as many messages as one that does not."""
    padded.service.script = [Started(7, 3), Delta("part", (1,)), UnavailableError("gone", retry_after_s=1.0)]
    call = channel.unary_stream(f"/{SERVICE}/Generate", pb.GenerateRequest.SerializeToString)
    running, sizes = call(ask(), metadata=proof_of(padded)), []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for message in running:
            sizes.append(len(message))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert sizes == [256] * 4


async def test_refusals_have_trailers_of_one_length(padded: Running, channel: grpc.aio.Channel) -> None:
    """Before an engine has the request: no message, and two errors of different lengths fill their trailers alike."""
    lengths = []
    for message in ("no", "no, and for this reason: " + "x" * 60):
        padded.service.script = [InvalidRequestError(message, param="model")]
        failed = await refused(InferenceServiceStub(channel).Generate(ask(), metadata=proof_of(padded)))
        assert failed.code() is grpc.StatusCode.INVALID_ARGUMENT
        rows = dict(failed.trailing_metadata())
        lengths.append(len(failed.details()) + sum(len(value) for value in rows.values()))
    assert lengths == [512, 512]


async def test_a_drain_keeps_nobody_waiting_for_padding() -> None:
    """An appliance that stops ends padded calls as soon as their answers are complete."""
    slow = Padding(tick_s=0.02, record_bytes=256, first_records=4_000)
    async with serving(padding=slow) as running, grpc.aio.insecure_channel(running.target) as opened:
        running.service.padded = {"acme"}
        asked = asyncio.ensure_future(raw(running, opened, SHORT))
        await running.service.closed.wait()
        began = time.monotonic()
        await running.front_ends.stop(10.0)
        assert said(await asked)[-1].HasField("finished")
        assert time.monotonic() - began < 5


async def test_who_cancels_ends_the_session(padded: Running, channel: grpc.aio.Channel) -> None:
    """A padded call that is cancelled in the middle stops its session at once."""
    padded.service.script = [Started(7, 3), Delta("a", (1,)), asyncio.Event()]
    call = InferenceServiceStub(channel).Generate(ask(), metadata=proof_of(padded))
    await call.read()
    call.cancel()
    async with asyncio.timeout(20):
        await padded.service.closed.wait()


@pytest.mark.parametrize("length", [0, 1, 100, 119, 120, 121, 122, 123, 124, 125, 126, 127, 128, 249])
def test_a_message_is_filled_to_the_byte(length: int) -> None:
    """Whatever the message's own size, it is read back as it was; one that is too long takes a multiple."""
    message = pb.GenerateResponse(delta=pb.Delta(text="x" * length))
    filled = fill_message(message, 256)
    assert len(filled) == (256 if message.ByteSize() + OVERHEAD_BYTES <= 256 else 512)
    assert pb.GenerateResponse.FromString(filled).delta == message.delta
