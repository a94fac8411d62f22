"""G2, of what is kept: files, batches and responses are asked for under the tenant that the credential proves.

Every route and method about them is called with every header, query, field and metadata key that could name a tenant.
A store that notes who asks stands in the supervisor's place. Not covered: what the store does for a tenant, which
tests of ``appliance.supervisor.batches`` show.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor

from appliance.common.batches.values import ENDPOINTS, StoredBatch, StoredFile
from appliance.common.errors import ApplianceError, StoredNotFoundError
from appliance.common.figures import counted
from appliance.common.scopes import Scope
from appliance.gateway.generate_request import Principal
from appliance.gateway.grpc.batch_calls import BATCH_SERVICE
from appliance.gateway.grpc.generated import batch_pb2 as pb
from appliance.gateway.http.app import ROUTES
from appliance.gateway.stored_work import BatchPage, FilePage, Page, Upload
from appliance.selftest.fuzzed_batches import BATCH_METHODS
from appliance.selftest.raw_http import request_bytes, talk
from appliance.selftest.result import Result, judged
from appliance.selftest.scripted_gateway import NAMESPACES, TENANTS, ScriptedGateway, scripted_gateway
from appliance.selftest.words import FIELDS, HEADERS, QUERIES, values_for

COMMAND = "athanor selftest --only G2"

FILE, BATCH, RESPONSE = f"file-{'0' * 32}", f"batch_{'0' * 32}", f"resp_{'0' * 32}"

MESSAGES: Mapping[str, Any] = {
    "UploadFile": pb.UploadFileRequest(head=pb.FileHead(name="f")),
    "GetFile": pb.GetFileRequest(file_id=FILE),
    "ListFiles": pb.ListFilesRequest(),
    "DownloadFile": pb.DownloadFileRequest(file_id=FILE),
    "DeleteFile": pb.DeleteFileRequest(file_id=FILE),
    "CreateBatch": pb.CreateBatchRequest(input_file_id=FILE, endpoint=ENDPOINTS[0]),
    "GetBatch": pb.GetBatchRequest(batch_id=BATCH),
    "ListBatches": pb.ListBatchesRequest(),
    "CancelBatch": pb.CancelBatchRequest(batch_id=BATCH),
}
"""A message with which each method asks the store."""


@dataclass(slots=True)
class NotingStore:
    """Store that has nothing, and notes for whom it is asked."""

    asked: list[str] = field(default_factory=list)
    """Tenants, one for each question."""

    @property
    def responses(self) -> NotingStore:
        """What keeps responses."""
        return self

    def check(self, principal: Principal) -> None:
        """Return: every tenant may have files."""
        self.asked.append(principal.tenant)

    async def upload(self, principal: Principal, name: str, *, lines: bool = True) -> Upload:
        """Note the question."""
        raise self._none(principal)

    async def file(self, principal: Principal, file: str) -> StoredFile:
        """Note the question."""
        raise self._none(principal)

    async def files(self, principal: Principal, page: Page) -> FilePage:
        """Note the question."""
        self.asked.append(principal.tenant)
        return FilePage((), False)

    async def content(self, principal: Principal, file: str) -> AsyncIterator[bytes]:
        """Note the question."""
        raise self._none(principal)
        yield b""

    async def delete(self, principal: Principal, file: str) -> None:
        """Note the question."""
        raise self._none(principal)

    async def begin(
        self,
        principal: Principal,
        file: str,
        endpoint: str,
        window_s: int,
        metadata: Mapping[str, str],
        key: str = "",
        *,
        output_keep_s: int = 0,
    ) -> StoredBatch:
        """Note the question."""
        raise self._none(principal)

    async def batch(self, principal: Principal, batch: str) -> StoredBatch:
        """Note the question."""
        raise self._none(principal)

    async def batches(self, principal: Principal, page: Page) -> BatchPage:
        """Note the question."""
        self.asked.append(principal.tenant)
        return BatchPage((), False)

    async def cancel(self, principal: Principal, batch: str) -> StoredBatch:
        """Note the question."""
        raise self._none(principal)

    def withheld(self, principal: Principal, param: str) -> ApplianceError | None:
        """Return that responses are kept."""
        return None

    def epoch(self, tenant: str) -> bytes:
        """Return a value that never changes."""
        return b""

    async def keep(self, principal: Principal, response: str, document: bytes) -> bool:
        """Note the question."""
        self.asked.append(principal.tenant)
        return False

    async def read(self, principal: Principal, response: str, param: str = "id") -> bytes:
        """Note the question."""
        raise self._none(principal)

    def _none(self, principal: Principal) -> ApplianceError:
        self.asked.append(principal.tenant)
        return StoredNotFoundError("there is nothing of this id, or nothing that is yours", param="id")


@dataclass(slots=True)
class StoredCount:
    """Counts over the calls."""

    sent: int = 0
    asked: int = 0
    """Questions that reached the store."""
    foreign: int = 0
    """Those of them for another tenant than the caller's."""
    example: str = ""
    reached: Counter[str] = field(default_factory=Counter)
    """Questions by route and method."""

    def look(self, store: NotingStore, tenant: str, route: str, what: str) -> None:
        """Judge the questions since the last call."""
        self.sent += 1
        self.asked += len(store.asked)
        self.reached[route] += len(store.asked)
        wrong = sum(one != tenant for one in store.asked)
        self.foreign += wrong
        self.example = self.example or (what if wrong else "")
        store.asked.clear()


def run(full: bool) -> list[Result]:
    """Run every row; long and short forms are the same."""
    del full
    return asyncio.run(_rows())


async def _rows() -> list[Result]:
    store = NotingStore()
    async with scripted_gateway(lambda _service, _keys: store) as gateway:
        found, control = StoredCount(), StoredCount()
        await _walk(gateway, store, found)
        # The control: plain calls of the second tenant, judged as if the first one had sent them.
        await _walk(gateway, store, control, judge=TENANTS[0])
    missed = sorted(route for route, count in found.reached.items() if not count)
    figure = f"{counted(found.foreign, 'question')} for another tenant, {found.asked} in {counted(found.sent, 'call')}"
    figure += f" by {counted(len(found.reached), 'route')} and methods"
    figure += f"; first: {found.example}" if found.example else ""
    figure += f"; none by {', '.join(missed)}" if missed else ""
    return [
        judged("G2.stored", not found.foreign and not missed, figure=figure, bar="0; some by each", command=COMMAND),
        judged(
            "G2.stored.control",
            control.foreign == control.asked > 0,
            figure=f"{control.foreign} of {counted(control.asked, 'question')} with another key: for that one's tenant",
            bar="all",
            command=COMMAND,
        ),
    ]


async def _walk(gateway: ScriptedGateway, store: NotingStore, found: StoredCount, judge: str = "") -> None:
    """Send every call, as both tenants in turn; with ``judge`` as the second, only the first one by each route and
    method, and judged as if that tenant had sent them."""
    for number, (route, request) in enumerate(_http_cases(gateway)):
        tenant = TENANTS[1] if judge else TENANTS[number % 2]
        if judge and route in found.reached:
            continue
        proof = ("authorization", f"Bearer {gateway.keys[tenant]}")
        method, target, body, headers = request
        await talk(gateway.ends.http_port, request_bytes(method, target, body, proof, *headers))
        found.look(store, judge or tenant, route, f"{method} {target} {headers}")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.ends.grpc_port}") as channel:
        for number, (method, message, metadata) in enumerate(_grpc_cases(gateway)):
            tenant = TENANTS[1] if judge else TENANTS[number % 2]
            if judge and method in found.reached:
                continue
            proof = ("authorization", f"Bearer {gateway.keys[tenant]}")
            call = channel.unary_stream(f"/{BATCH_SERVICE}/{method}")
            try:
                async for _ in call(message, metadata=(proof, *metadata), timeout=10):
                    pass
            except grpc.aio.AioRpcError:
                pass  # refused: only questions to the store count
            found.look(store, judge or tenant, method, f"{method} {message[:80]!r} {metadata}")


Request = tuple[str, str, bytes, tuple[tuple[str, str], ...]]
"""Method, target, body and headers."""


def _http_cases(gateway: ScriptedGateway) -> Iterator[tuple[str, Request]]:
    other = TENANTS[1]
    word = str(values_for(other, gateway.keys[other], NAMESPACES[other])[0])
    for route in ROUTES:
        if route.scope not in (Scope.BATCHES, Scope.RESPONSES):
            continue
        path = route.path.format(file_id=FILE, batch_id=BATCH, response_id=RESPONSE)
        name = f"{route.method} {route.path}"
        body, kind = _body_of(path if route.method == "POST" else "", {})
        yield name, (route.method, path, body, kind)
        for header in HEADERS:
            if header != "host":
                yield name, (route.method, path, body, (*kind, (header, word)))
        for query in QUERIES:
            yield name, (route.method, f"{path}?{query}={word}", body, kind)
        for field_name in FIELDS if body else ():
            more, kind = _body_of(path, {field_name: word})
            yield name, (route.method, path, more, kind)


def _body_of(path: str, fields: Mapping[str, str]) -> tuple[bytes, tuple[tuple[str, str], ...]]:
    """Return the body of a call with these fields besides, and its headers."""
    if path == "/v1/batches":
        document = {"input_file_id": FILE, "endpoint": ENDPOINTS[0], "completion_window": "24h", **fields}
        return json.dumps(document).encode(), (("content-type", "application/json"),)
    if path == "/v1/files":
        parts = [("purpose", "", "batch"), *((name, "", value) for name, value in fields.items())]
        parts.append(("file", '; filename="f"', "x"))
        text = "".join(
            f'--b\r\ncontent-disposition: form-data; name="{name}"{more}\r\n\r\n{value}\r\n'
            for name, more, value in parts
        )
        return f"{text}--b--\r\n".encode(), (("content-type", "multipart/form-data; boundary=b"),)
    return b"", ()


def _grpc_cases(gateway: ScriptedGateway) -> Iterator[tuple[str, bytes, list[tuple[str, str]]]]:
    other = TENANTS[1]
    word = str(values_for(other, gateway.keys[other], NAMESPACES[other])[0])
    assert MESSAGES.keys() == set(BATCH_METHODS), "a method of the service has no message here"
    for method, base in MESSAGES.items():
        plain = base.SerializeToString()
        yield method, plain, []
        for name in HEADERS:
            if name != "host":
                yield method, plain, [(name, word)]
        for at in base.DESCRIPTOR.fields:
            if at.type == FieldDescriptor.TYPE_STRING:
                message = type(base)()
                message.CopyFrom(base)
                setattr(message, at.name, word)
                yield method, message.SerializeToString(), []
        # Fields that no version of the service has: numbers 100 to 139, as texts (wire type 2).
        for number in range(100, 140):
            tag = number << 3 | 2
            unknown = bytes([tag & 0x7F | 0x80, tag >> 7, len(word)]) + word.encode()
            yield method, plain + unknown, []
