"""What a gRPC client of the tests does again and again: proof, a request, an answer or its refusal."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from grpc_status import rpc_status

from appliance.gateway.grpc.generated import inference_pb2 as pb
from tests.appliance.gateway.front.support import MODEL, Running


def proof_of(running: Running) -> tuple[tuple[str, str], ...]:
    """The tenant's key as metadata."""
    return tuple(running.authorization.items())


def ask(**fields: Any) -> pb.GenerateRequest:
    """A request for the test model; of the text "hi" when it has no input of its own."""
    if not fields.keys() & {"conversation", "text", "token_ids"}:
        fields["text"] = "hi"
    return pb.GenerateRequest(**{"model": MODEL, **fields})


def detail_of(error: grpc.aio.AioRpcError, kind: type[Message]) -> Any:
    """The rich error's detail of one kind, or None."""
    status = rpc_status.from_call(error)
    for box in status.details:
        if box.Is(kind.DESCRIPTOR):
            found = kind()
            box.Unpack(found)
            return found
    return None


async def refused(call: Any) -> grpc.aio.AioRpcError:
    """The error that a call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await drained(call)
    return caught.value


async def drained(call: Any) -> list[Any]:
    """All that a call gives, streamed or not."""
    if hasattr(call, "__aiter__"):
        return [event async for event in call]
    return [await call]
