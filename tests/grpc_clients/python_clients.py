"""The official Python client, with blocking calls and with coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

import grpc
from google.rpc import error_details_pb2 as details
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from appliance.gateway.grpc.generated import inference_pb2 as pb
from appliance.gateway.grpc.generated import inference_pb2_grpc
from tests.grpc_clients.call import CHECK, GENERATE, MODELS, REFLECT, WATCH, Answer, Call

OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
"""The client itself bounds no message."""


def call_blocking(call: Call) -> Answer:
    """Make the call with ``grpc``."""
    secure = credentials(call)
    opened = (
        grpc.insecure_channel(call.address, OPTIONS)
        if secure is None
        else grpc.secure_channel(call.address, secure, OPTIONS)
    )
    seen: dict[str, Any] = {}
    with opened as channel:
        try:
            _blocking(channel, call, seen)
        except grpc.RpcError as error:
            seen |= of_error(error)
    return Answer.read(seen)


def call_with_coroutines(call: Call) -> Answer:
    """Make the call with ``grpc.aio``, in a loop of its own."""
    return asyncio.run(_call(call))


def credentials(call: Call) -> grpc.ChannelCredentials | None:
    """The call's TLS files; None for plain text."""
    if call.ca is None:
        return None
    key = None if call.private_key is None else call.private_key.read_bytes()
    chain = None if call.certificate is None else call.certificate.read_bytes()
    return grpc.ssl_channel_credentials(call.ca.read_bytes(), key, chain)


def metadata(call: Call) -> tuple[tuple[str, str], ...]:
    """The key, where there is one."""
    return () if call.key is None else (("authorization", f"Bearer {call.key}"),)


def request_of(call: Call) -> pb.GenerateRequest:
    """The message of a generation."""
    return pb.GenerateRequest(
        model=call.model,
        text="x" * call.text_bytes or call.text,
        max_output_tokens=call.max_output_tokens,
        ignore_eos=call.ignore_eos,
        sampling=pb.Sampling(temperature=call.temperature),
    )


def of_error(error: Any) -> dict[str, Any]:
    """A failed call's status with its details."""
    found: dict[str, Any] = {"code": error.code().name, "message": error.details() or ""}
    status = rpc_status.from_call(error)
    for box in () if status is None else status.details:
        for kind in (details.ErrorInfo, details.RequestInfo, details.BadRequest, details.ResourceInfo):
            if box.Is(kind.DESCRIPTOR):
                found |= _detail(_unpacked(box, kind()))
        if box.Is(details.QuotaFailure.DESCRIPTOR):
            found["quota"] = [one.description for one in _unpacked(box, details.QuotaFailure()).violations]
    return found


def _unpacked(box: Any, message: Any) -> Any:
    box.Unpack(message)
    return message


def _detail(message: Any) -> dict[str, Any]:
    if isinstance(message, details.ErrorInfo):
        return {"reason": message.reason, "domain": message.domain}
    if isinstance(message, details.RequestInfo):
        return {"error_request_id": message.request_id}
    if isinstance(message, details.ResourceInfo):
        return {"resource": message.resource_name}
    return {"violations": [one.field for one in message.field_violations]}


def add_event(seen: dict[str, Any], event: pb.GenerateResponse) -> bool:
    """Add an event of a generation to what was seen; whether it is a delta."""
    kind = event.WhichOneof("event")
    kinds = seen.setdefault("events", [])
    if not kinds or kinds[-1] != kind:
        kinds.append(kind)
    if kind == "finished":
        seen["output_tokens"] = event.finished.usage.output_tokens
    seen["text"] = seen.get("text", "") + event.delta.text
    seen["deltas"] = seen.get("deltas", 0) + (kind == "delta")
    return bool(kind == "delta")


def _listing() -> reflection_pb2.ServerReflectionRequest:
    return reflection_pb2.ServerReflectionRequest(list_services="")


async def _listings() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
    yield _listing()


def _names(answer: reflection_pb2.ServerReflectionResponse) -> list[str]:
    return sorted(one.name for one in answer.list_services_response.service)


def _state(answer: health_pb2.HealthCheckResponse) -> str:
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def _names_of_models(answer: pb.ListModelsResponse) -> list[str]:
    return [model.name for model in answer.models]


def _blocking(channel: grpc.Channel, call: Call, seen: dict[str, Any]) -> None:
    options: dict[str, Any] = {"metadata": metadata(call), "timeout": call.timeout_s}
    service = inference_pb2_grpc.InferenceServiceStub(channel)
    health = health_pb2_grpc.HealthStub(channel)
    asked = health_pb2.HealthCheckRequest(service=call.service)
    if call.do == MODELS:
        seen["models"] = _names_of_models(service.ListModels(pb.ListModelsRequest(), **options))
    elif call.do == CHECK:
        seen["status"] = _state(health.Check(asked, **options))
    elif call.do == WATCH:
        watch = health.Watch(asked, **options)
        seen["status"] = _state(next(watch))
        watch.cancel()
    elif call.do == REFLECT:
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        (answer,) = reflection.ServerReflectionInfo(iter([_listing()]), **options)
        seen["services"] = _names(answer)
    elif call.do == GENERATE:
        stream = service.Generate(request_of(call), **options)
        _read(stream, call, seen)
        seen["request_id"] = dict(stream.initial_metadata())["x-request-id"]


def _read(stream: Iterable[pb.GenerateResponse] | Any, call: Call, seen: dict[str, Any]) -> None:
    events: Iterator[pb.GenerateResponse] = iter(stream)
    for event in events:
        if add_event(seen, event) and seen["deltas"] == call.cancel_after:
            stream.cancel()


async def _call(call: Call) -> Answer:
    secure = credentials(call)
    opened = (
        grpc.aio.insecure_channel(call.address, OPTIONS)
        if secure is None
        else grpc.aio.secure_channel(call.address, secure, OPTIONS)
    )
    seen: dict[str, Any] = {}
    async with opened as channel:
        try:
            await _with_coroutines(channel, call, seen)
        except grpc.aio.AioRpcError as error:
            seen |= of_error(error)
        except asyncio.CancelledError:
            seen["code"] = "CANCELLED"  # grpc.aio raises this for a call that its own client has cancelled
    return Answer.read(seen)


async def _with_coroutines(channel: grpc.aio.Channel, call: Call, seen: dict[str, Any]) -> None:
    options: dict[str, Any] = {"metadata": metadata(call), "timeout": call.timeout_s}
    service = inference_pb2_grpc.InferenceServiceStub(channel)
    health = health_pb2_grpc.HealthStub(channel)
    asked = health_pb2.HealthCheckRequest(service=call.service)
    if call.do == MODELS:
        seen["models"] = _names_of_models(await service.ListModels(pb.ListModelsRequest(), **options))
    elif call.do == CHECK:
        seen["status"] = _state(await health.Check(asked, **options))
    elif call.do == WATCH:
        watch = health.Watch(asked, **options)
        async for answer in watch:
            seen["status"] = _state(answer)
            break
        watch.cancel()
    elif call.do == REFLECT:
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        async for answer in reflection.ServerReflectionInfo(_listings(), **options):
            seen["services"] = _names(answer)
    elif call.do == GENERATE:
        stream = service.Generate(request_of(call), **options)
        async for event in stream:
            if add_event(seen, event) and seen["deltas"] == call.cancel_after:
                stream.cancel()
        seen["request_id"] = dict(await stream.initial_metadata())["x-request-id"]
