"""How many steps of an engine pass between the end of a caller and that of its blocks, over every API that generates.

Front ends, session, link and ring are real, and so is the engine's core around a backend that computes nothing; the
test makes its steps one by one, so that they are counted and not timed.
"""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import pytest

from appliance.gateway.generate_request import (
    CallContext,
    Event,
    GenerateRequest,
    Operation,
    Principal,
    Sink,
    TokenPrompt,
)
from appliance.gateway.grpc.generated.inference_pb2_grpc import InferenceServiceStub
from appliance.gateway.request.session import Session
from engine.core.engine import Engine
from isolation.ipc.engine import Abort, StepOutput, Submit
from isolation.ipc.messages import FailureCode
from tests.appliance.gateway.front.support import MODEL, Running, post
from tests.appliance.gateway.grpc.grpc_client import ask, proof_of
from tests.appliance.gateway.pairs import ENGINE_READY, Pair
from tests.appliance.gateway.request.test_session import Stage, stage
from tests.engine.backends.test_null import null_engine

__all__ = ["stage"]

DEADLINE_S = 1.0
"""Time of a request that is not answered in it; its first steps are made within a part of that."""

LONG = 200
"""Tokens of an answer that no test waits for."""

TALK = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TALK, "max_tokens": LONG},
    "/v1/completions": {"prompt": "hi", "max_tokens": LONG},
    "/v1/responses": {"input": "hi", "max_output_tokens": LONG},
    "/v1/messages": {"messages": TALK, "max_tokens": LONG},
}


@dataclass
class Guest:
    """The engine at the other end of the ring, which makes a step when the test says so."""

    pair: Pair
    engine: Engine = field(
        default_factory=lambda: null_engine(
            num_blocks=ENGINE_READY.num_blocks,
            block_size=ENGINE_READY.block_size,
            vocab_size=ENGINE_READY.vocab_size,
            max_context=ENGINE_READY.max_context,
        )
    )

    async def told(self, kind: type[Submit] | type[Abort]) -> None:
        """Take what the gateway sends until a message of this kind, without a step."""
        async with asyncio.timeout(20):
            while True:
                for message in self.pair.guest.receive(1):
                    if isinstance(message, Submit):
                        self.engine.add(message)
                    elif isinstance(message, Abort):
                        self.engine.abort(message.request)
                    if isinstance(message, kind):
                        return
                await asyncio.sleep(0.002)

    def step(self) -> StepOutput:
        """Make a step, and send what came of it."""
        output = self.engine.step()
        assert output is not None
        self.pair.guest.send(output)
        return output


@pytest.fixture
async def guest(stage: Stage, running: Running) -> Guest:
    """An engine whose requests are those of the front ends, each with a prompt of ids."""

    async def generate(
        _: Principal, request: GenerateRequest, __: CallContext, sink: Sink | None = None
    ) -> AsyncGenerator[Event]:
        prompt = TokenPrompt(array("I", range(1, 40)))
        given = replace(request, model="m", prompt=prompt, operation=Operation.TEXT_COMPLETION)
        with stage.life(given) as life:
            async for event in Session(life, given).run(sink):
                yield event

    running.service.generate = generate  # type: ignore[method-assign]
    return Guest(stage.boot())


async def check_freed(guest: Guest, leave: Callable[[], None]) -> None:
    """The request computes; once its caller is gone its blocks are free behind the step that runs by then and the next
    one, and the abort has waited for neither. Control: that first step still holds them."""
    await guest.told(Submit)
    for _ in range(3):
        assert 0 < guest.step().free_blocks < ENGINE_READY.num_blocks
        await asyncio.sleep(0)
    leave()
    first = guest.step()
    assert (first.running, first.free_blocks < ENGINE_READY.num_blocks) == (1, True)
    await guest.told(Abort)
    second = guest.step()
    assert [one.code for one in second.failures] == [FailureCode.ABORTED]
    assert (second.running, second.free_blocks) == (0, ENGINE_READY.num_blocks)
    assert not guest.engine.has_work


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", BODIES)
async def test_a_client_that_leaves_frees_its_blocks(running: Running, guest: Guest, path: str, stream: bool) -> None:
    """The connection is closed, by each route, streamed or not."""
    body = json.dumps({"model": MODEL, "stream": stream, **BODIES[path]}).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", running.front_ends.http_port)
    writer.write(post(path, body, running.authorization))
    await check_freed(guest, writer.close)


@pytest.mark.parametrize("path", BODIES)
async def test_a_deadline_frees_its_blocks(running: Running, guest: Guest, path: str) -> None:
    """The request's time passes while its client waits, by each route."""
    body = json.dumps({"model": MODEL, "stream": True, **BODIES[path]}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", running.front_ends.http_port)
    writer.write(post(path, body, running.authorization, f"x-request-timeout-ms: {DEADLINE_S * 1e3:.0f}"))
    await check_freed(guest, lambda: None)
    assert b"deadline" in await asyncio.wait_for(reader.read(), 20)
    writer.close()


@pytest.mark.parametrize("way", ["cancel", "deadline"])
async def test_a_grpc_call_frees_its_blocks(
    running: Running, channel: grpc.aio.Channel, guest: Guest, way: str
) -> None:
    """The call is cancelled, or its deadline passes."""
    timeout = DEADLINE_S if way == "deadline" else None
    request = ask(max_output_tokens=LONG)
    call = InferenceServiceStub(channel).Generate(request, metadata=proof_of(running), timeout=timeout)
    drained = asyncio.ensure_future(call.code())
    await check_freed(guest, call.cancel if way == "cancel" else lambda: None)
    expected = grpc.StatusCode.CANCELLED if way == "cancel" else grpc.StatusCode.DEADLINE_EXCEEDED
    assert await asyncio.wait_for(drained, 20) is expected
