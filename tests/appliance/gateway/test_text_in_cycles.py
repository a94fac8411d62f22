"""Whatever becomes of a request, nothing of its text waits for the garbage collector when it is over.

What is in a cycle of objects stays until the collector looks at objects of its age, which may be long after the
deletion of a file or the end of a request. HTTP, gRPC, runner, socket and store are real.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from appliance.gateway.front.stored_builder import Pieces
from appliance.gateway.grpc.generated import batch_pb2, inference_pb2
from appliance.gateway.grpc.generated.batch_pb2_grpc import BatchServiceStub
from appliance.gateway.grpc.generated.inference_pb2_grpc import InferenceServiceStub
from appliance.selftest.raw_http import request_bytes
from appliance.selftest.stored_gateway import BOUNDARY, FORM, StoredGateway, stored_gateway, upload_form

CANARY = "zqxjkvbwzqxjwwwwwwww"
LINES = 8_000
"""Lines of a file: more than a piece of those that the store takes."""

MANY = 9_000
"""Canaries of a prompt whose body is parsed beside the event loop."""

WITHIN_S = 20.0
"""Seconds for what a request began to be over; a bound for a machine that is busy."""


def held() -> list[str]:
    """Collect the garbage; returns what of it had the canary, by type or by place."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
    finally:
        gc.set_debug(0)
    found = [_name(one) for one in gc.garbage for part in gc.get_referents(one) if _has(part)]
    gc.garbage.clear()
    gc.collect()
    return found


def _has(part: object) -> bool:
    return (isinstance(part, bytes | bytearray) and CANARY.encode() in part) or (
        isinstance(part, str) and CANARY in part
    )


def _name(one: object) -> str:
    code = getattr(one, "f_code", None)
    return type(one).__name__ if code is None else f"frame of {code.co_qualname}"


async def until(true: Callable[[], bool]) -> None:
    """Wait for a state."""
    async with asyncio.timeout(WITHIN_S):
        while not true():
            await asyncio.sleep(0.02)


def uploading() -> bool:
    """Return whether an upload runs of which a part has come."""
    return any(isinstance(one, Pieces) and one._piece for one in gc.get_objects())


def _waits(task: asyncio.Task[Any]) -> bool:
    return getattr(task.get_coro(), "__qualname__", "") == "Queue.get"


class Client:
    """Requests of one tenant, whole and broken off."""

    def __init__(self, stored: StoredGateway) -> None:
        self.api, self.ports, self.files = stored.api, stored.gateway.ends, stored.store._files
        self.tenant = next(iter(self.api.keys))
        self._key = f"Bearer {self.api.keys[self.tenant]}"
        self._before = asyncio.all_tasks()

    async def over(self) -> None:
        """Wait until everything is over that a request began: of new tasks only those are left that wait for the next
        entry of a queue."""
        await until(lambda: all(_waits(one) for one in asyncio.all_tasks() - self._before - {asyncio.current_task()}))

    async def ask(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> int:
        """Return the status of a request's answer."""
        return (await self.api.ask(self.tenant, method, path, body, kind))[0]

    async def upload(self) -> str:
        """Keep a file."""
        return await self.api.upload(self.tenant, CANARY, LINES)

    def form(self) -> bytes:
        """Return the body of an upload."""
        return upload_form(self.api.model, CANARY, LINES)

    async def leave(self, method: str, path: str, body: bytes, kind: str, *, half: bool, abort: bool) -> None:
        """Leave in the middle of a request, or of its answer; ``abort``: with a reset."""
        request = request_bytes(method, path, body, ("authorization", self._key), ("content-type", kind))
        reader, writer = await asyncio.open_connection("127.0.0.1", self.api.port)
        writer.write(request[: len(request) // 2] if half else request)
        if half:
            await until(uploading)
        else:
            await reader.readexactly(20)
        writer.transport.abort() if abort else writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def upload_by_grpc(self, *, leave: bool) -> None:
        """Upload a file in parts; ``leave``: no further than to its middle."""

        async def parts() -> AsyncIterator[batch_pb2.UploadFileRequest]:
            yield batch_pb2.UploadFileRequest(head=batch_pb2.FileHead(name=CANARY))
            for _ in range(3):
                yield batch_pb2.UploadFileRequest(data=CANARY.encode() * 10_000)
            if leave:
                await asyncio.sleep(WITHIN_S)

        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.ports.grpc_port}") as channel:
            call = BatchServiceStub(channel).UploadFile(parts(), metadata=(("authorization", self._key),))
            if leave:
                await until(uploading)
                call.cancel()
            else:
                await call

    async def generate_by_grpc(self, model: str, *, leave: bool) -> None:
        """Ask for an answer; ``leave``: after its first message."""
        asked = inference_pb2.GenerateRequest(model=model, text=CANARY)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.ports.grpc_port}") as channel:
            call = InferenceServiceStub(channel).Generate(asked, metadata=(("authorization", self._key),))
            with contextlib.suppress(grpc.aio.AioRpcError):
                async for _ in call:
                    if leave:
                        call.cancel()
                        break


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[Client]:
    """A client of a gateway with a store; nothing is collected meanwhile but by ``held``."""
    async with stored_gateway(tmp_path) as stored:
        one = Client(stored)
        with _uncollected():
            yield one


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()


def test_the_search_finds_text_in_a_cycle() -> None:
    """Positive control: text in an object that holds itself is found, and is gone after that."""
    with _uncollected():
        knot: list[Any] = [CANARY]
        knot.append(knot)
        assert held() == []
        del knot
        assert held() == ["list"]
        assert held() == []


async def test_files_leave_no_text_in_cycles(client: Client) -> None:
    """Uploads by both APIs (whole, left in the middle and reset, refused at their end), downloads (whole, left, reset),
    and a deletion."""
    form = client.form()
    file = await client.upload()
    content = f"/v1/files/{file}/content"
    assert await client.ask("GET", content) == 200
    await client.over()
    assert held() == []
    for abort in (False, True):
        await client.leave("POST", "/v1/files", form, FORM, half=True, abort=abort)
        await client.over()
        assert held() == [], f"an upload that was left, reset: {abort}"
        await client.leave("GET", content, b"", FORM, half=False, abort=abort)
        await client.over()
        assert held() == [], f"a download that was left, reset: {abort}"
    for wrong in (form.replace(b'"purpose"', b'"purpsoe"'), form.replace(b"--selftest--", b"--selftesx--")):
        assert await client.ask("POST", "/v1/files", wrong, FORM) == 400
        await client.over()
        assert held() == [], "an upload that was refused at its end"
    for leave in (False, True):
        await client.upload_by_grpc(leave=leave)
        await client.over()
        assert held() == [], f"an upload by gRPC, left: {leave}"
    assert await client.ask("DELETE", f"/v1/files/{file}") == 200
    await client.over()
    assert held() == []


async def test_an_upload_that_is_refused_in_its_middle_leaves_no_text_in_cycles(client: Client) -> None:
    """Uploads that the gateway refuses, since a second file follows, and that the store refuses, since it is full."""
    second = f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="file"; filename="b"\r\n\r\nx\r\n--{BOUNDARY}--\r\n'
    two = client.form().removesuffix(f"--{BOUNDARY}--\r\n".encode()) + second.encode()
    assert await client.ask("POST", "/v1/files", two, FORM) == 400
    await client.over()
    assert held() == []
    client.files._most = 0
    assert await client.ask("POST", "/v1/files", client.form(), FORM) not in (200, 400)
    await client.over()
    assert held() == []


async def test_a_batch_and_kept_responses_leave_no_text_in_cycles(client: Client) -> None:
    """A file's batch with its results, a stored response and one in the background, read and deleted."""
    kept = await client.api.keep(client.tenant, CANARY)
    await client.over()
    assert held() == []
    paths = [f"/v1/files/{kept.output}", f"/v1/files/{kept.file}"]
    for path in (*paths, f"/v1/responses/{kept.response}", f"/v1/responses/{kept.stream}"):
        assert await client.ask("GET", path + ("/content" if path in paths else "")) == 200
        assert await client.ask("DELETE", path) == 200
        assert await client.ask("GET", path) == 404
    await client.over()
    assert held() == []


async def test_lines_that_fail_leave_no_text_in_cycles(client: Client) -> None:
    """A batch whose lines are refused: one by the policy, one of several prompts by the model's context."""
    texts = [
        {"model": "none", "prompt": CANARY},
        {"model": "athanor-mini", "prompt": [CANARY, CANARY], "max_tokens": 40_000},
    ]
    lines = [
        {"custom_id": f"{number}", "method": "POST", "url": "/v1/completions", "body": text}
        for number, text in enumerate(texts)
    ]
    name = b'content-disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
    form = client.form().partition(b'content-disposition: form-data; name="file"')[0] + name
    form += "\n".join(map(json.dumps, lines)).encode() + b"\r\n--selftest--\r\n"
    file = json.loads(await client.api.made(client.tenant, "POST", "/v1/files", form, FORM))["id"]
    asked = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = json.loads(await client.api.made(client.tenant, "POST", "/v1/batches", asked))["id"]
    found: dict[str, Any] = {}
    while found.get("status") not in ("completed", "failed"):
        found = json.loads(await client.api.made(client.tenant, "GET", f"/v1/batches/{batch}", None))
        await asyncio.sleep(0.02)
    assert found["request_counts"] == {"total": 2, "completed": 0, "failed": 2}
    await client.over()
    assert held() == []


MODEL: dict[str, Any] = {"model": "athanor-mini", "max_tokens": 4}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": CANARY}]}
LARGE: dict[str, Any] = {"messages": [{"role": "user", "content": CANARY * MANY}]}


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("completions", {**MODEL, "prompt": CANARY}, 200),
        ("completions", {**MODEL, "prompt": CANARY, "stream": True}, 200),
        ("completions", {**MODEL, "prompt": [CANARY + "a", CANARY + "b"]}, 200),
        ("completions", {**MODEL, "prompt": [CANARY + "a", CANARY + "b"], "max_tokens": 40_000}, 400),
        ("completions", {**MODEL, "prompt": CANARY * MANY}, 200),
        ("chat/completions", {**MODEL, **CHAT}, 200),
        ("chat/completions", {**MODEL, **CHAT, "stream": True}, 200),
        ("chat/completions", {**MODEL, **CHAT, "logit_bias": 7}, 400),
        ("chat/completions", {**CHAT, "model": "none"}, 404),
        ("chat/completions", {**LARGE, "model": "none"}, 404),
        ("messages", {**MODEL, **CHAT}, 200),
        ("messages", {**MODEL, **CHAT, "stream": True}, 200),
        ("responses", {"model": "athanor-mini", "input": CANARY, "stream": True, "background": True}, 200),
        ("responses", {"model": "none", "input": CANARY, "stream": True, "background": True}, 404),
        ("embeddings", {"model": "athanor-mini", "input": CANARY}, 400),
    ],
)
async def test_a_request_leaves_no_text_in_cycles(client: Client, path: str, body: dict[str, Any], status: int) -> None:
    """Requests that are served, refused by their form, by the policy and by the model's context; and the same when the
    client leaves as soon as the answer has begun."""
    assert await client.ask("POST", f"/v1/{path}", body) == status
    await client.over()
    assert held() == []
    data = json.dumps(body).encode()
    for abort in (False, True):
        await client.leave("POST", f"/v1/{path}", data, "application/json", half=False, abort=abort)
        await client.over()
        assert held() == [], f"left, reset: {abort}"


@pytest.mark.parametrize("model", ["athanor-mini", "none"])
async def test_an_answer_by_grpc_leaves_no_text_in_cycles(client: Client, model: str) -> None:
    """Answers by gRPC, to their end and left at their beginning, and a refusal."""
    for leave in (False, True):
        await client.generate_by_grpc(model, leave=leave)
        await client.over()
        assert held() == [], f"left: {leave}"
