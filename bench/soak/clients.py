"""Clients as tenants have them: HTTP by hand, so that they can leave, dawdle and err at will, and gRPC by a library."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from appliance.gateway.grpc.generated import inference_pb2 as pb
from appliance.gateway.grpc.servicer import SERVICE
from appliance.selftest.raw_http import request_bytes
from bench.soak.answers import BY_GRPC, CUT, LEFT, RIGHT, UNTYPED, Answer, of_document, of_error, of_stream

TIMEOUT_S = 120.0
"""Of one request, above everything that the appliance itself lets pass."""

READ_BYTES = 4_096


@dataclass(frozen=True, slots=True)
class Manner:
    """How a client takes its answer."""

    leave_after: int | None = None
    """Bytes of the answer after which it goes away; None: it stays."""
    pause_s: float = 0.0
    """Between two reads."""


PLAIN = Manner()


async def post(port: int, path: str, body: bytes, key: str, manner: Manner = PLAIN) -> Answer:
    """One POST over a connection of its own."""
    headers = ("authorization", f"Bearer {key}"), ("content-type", "application/json")
    request = request_bytes("POST", path, body, *headers)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(request)
                answer = await _read(reader, manner)
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
    except TimeoutError:
        return Answer(UNTYPED, f"no end of an answer within {TIMEOUT_S:g} s")
    except OSError:
        return Answer(CUT)
    return answer


async def _read(reader: asyncio.StreamReader, manner: Manner) -> Answer:
    got = bytearray()
    try:
        while chunk := await reader.read(READ_BYTES):
            got += chunk
            if manner.leave_after is not None and len(got) >= manner.leave_after:
                return Answer(LEFT)
            if manner.pause_s:
                await asyncio.sleep(manner.pause_s)
    except OSError:
        pass
    return judge(bytes(got))


def judge(raw: bytes) -> Answer:
    """The answer in all the bytes that came. Pure."""
    head, found, body = raw.partition(b"\r\n\r\n")
    if not found:
        return Answer(CUT)
    lines = head.lower().split(b"\r\n")
    status = int(lines[0][9:12])
    headers = dict(line.split(b": ", 1) for line in lines[1:] if b": " in line)
    if headers.get(b"transfer-encoding") == b"chunked":
        body, whole = dechunk(body)
    else:
        whole = len(body) >= int(headers.get(b"content-length", b"0"))
    if status != 200:
        return of_error(status, body) if whole else Answer(CUT)
    if headers.get(b"content-type", b"").startswith(b"text/event-stream"):
        return of_stream(body)
    return of_document(body) if whole else Answer(CUT)


def dechunk(body: bytes) -> tuple[bytes, bool]:
    """The content of a chunked body, and whether its end was there (RFC 9112, section 7.1). Pure."""
    content, at = bytearray(), 0
    while True:
        end = body.find(b"\r\n", at)
        if end < 0:
            return bytes(content), False
        size = int(body[at:end] or b"0", 16)
        if size == 0:
            return bytes(content), True
        content += body[end + 2 : end + 2 + size]
        at = end + 2 + size + 2


class Grpc:
    """A channel of one tenant."""

    def __init__(self, target: str, keys: Mapping[str, str], tenant: str) -> None:
        """``keys``: tenant to key, read anew for each request, since keys change while clients ask."""
        self._channel = grpc.aio.insecure_channel(target, options=[("grpc.enable_retries", 0)])
        self._call = self._channel.unary_stream(
            f"/{SERVICE}/Generate",
            request_serializer=pb.GenerateRequest.SerializeToString,
            response_deserializer=pb.GenerateResponse.FromString,
        )
        self._keys, self._tenant = keys, tenant

    async def generate(self, request: pb.GenerateRequest, manner: Manner = PLAIN) -> Answer:
        """One generation."""
        text = ""
        proof = (("authorization", f"Bearer {self._keys[self._tenant]}"),)
        call = self._call(request, metadata=proof, timeout=TIMEOUT_S)
        try:
            async for event in call:
                text += event.delta.text
                if event.HasField("finished"):
                    text += "|" + pb.FinishReason.Name(event.finished.reason)
                if manner.leave_after is not None and len(text) >= manner.leave_after:
                    call.cancel()
                    return Answer(LEFT)
                if manner.pause_s:
                    await asyncio.sleep(manner.pause_s)
        except grpc.aio.AioRpcError as error:
            return of_rpc_error(error, text)
        return Answer(RIGHT, text)

    async def close(self) -> None:
        """Close it."""
        await self._channel.close()


def of_rpc_error(error: grpc.aio.AioRpcError, text: str) -> Answer:
    """The answer that a status makes."""
    try:
        status = rpc_status.from_call(error)
    except ValueError as problem:
        return Answer(UNTYPED, f"status that contradicts itself: {problem}")
    for detail in status.details if status is not None else ():
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info):
            reason = BY_GRPC.get((error.code().name, info.reason))
            if reason is None or reason == "internal":
                return Answer(UNTYPED, f"{error.code().name} {info.reason}: {error.details()}")
            return Answer(reason, str(error.details()))
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        # The library's own: nobody listened, or the connection broke.
        return Answer(CUT, text)
    return Answer(UNTYPED, f"{error.code().name} without details: {error.details()}")
