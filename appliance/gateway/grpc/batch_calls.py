"""The methods of ``athanor.batch.v1``: files and batches over ``StoredWork``, as ``/v1/files`` and ``/v1/batches``.

A file is read and given piece by piece, so no more of it than two pieces is in this process; whether the policy lets
the tenant have files is known before any message is read.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from appliance.common.batches.values import PIECE_BYTES
from appliance.common.errors import FeatureNotAllowedError, InvalidRequestError, RateLimitedError
from appliance.gateway.front.padding import Padding
from appliance.gateway.front.stored_builder import IDLE_S, UPLOAD_S, Pieces, key_of, known_id, upload_stopped
from appliance.gateway.generate_request import Principal
from appliance.gateway.grpc import batch_mapping as mapping
from appliance.gateway.grpc.call import Behaviours, C, GrpcCall, TenantCall, principal_of
from appliance.gateway.grpc.generated import batch_pb2 as pb
from appliance.gateway.grpc.usage_mapping import Padded, fill
from appliance.gateway.service import Service
from appliance.gateway.stored_work import StoredWork

BATCH_SERVICE = "athanor.batch.v1.BatchService"

MAX_MESSAGE_BYTES = 64 << 10
"""Bytes of a message that has no content: 16 texts of metadata, four bytes a character."""

MAX_PART_BYTES = PIECE_BYTES + 64
"""Bytes of a message with a piece of a file, with its frame."""

DOWNLOADS_EACH = 32
"""Downloads of one tenant at a time, 128 MiB: while a client reads nothing, a piece is in memory four times, as the
store's bytes, in the message, and on its way."""

DOWNLOADS_IN_ALL = 128
"""Downloads of all tenants at a time."""

DOWNLOAD_RETRY_S = 5.0
"""Seconds after which another download may begin."""

RECHECK_S = 1.0
"""Seconds after which a caller whose file is on its way is looked at again: a revoked key, or a policy that takes files
away, ends the call."""

M = TypeVar("M", bound=Padded)

Authenticate = Callable[[], Principal]
"""Gives whose call it is, by the credentials in force now; raises where none holds."""

Answer = Callable[[Principal, Any], Awaitable[Message]]


class BatchCalls:
    """Answers about files and batches. ``padding`` is for tenants of padded classes."""

    def __init__(self, service: Service, padding: Padding, stored: StoredWork | None) -> None:
        """``stored``: None where the appliance keeps no files."""
        self._service = service
        self._padding = padding
        self._stored = stored
        self._downloads: Counter[str] = Counter()
        self._asked: Mapping[str, tuple[type[Message], Answer]] = {
            "GetFile": (pb.GetFileRequest, self._get_file),
            "ListFiles": (pb.ListFilesRequest, self._list_files),
            "DeleteFile": (pb.DeleteFileRequest, self._delete_file),
            "CreateBatch": (pb.CreateBatchRequest, self._create_batch),
            "GetBatch": (pb.GetBatchRequest, self._get_batch),
            "ListBatches": (pb.ListBatchesRequest, self._list_batches),
            "CancelBatch": (pb.CancelBatchRequest, self._cancel_batch),
        }
        """Methods of one message and one answer, by name."""

    def methods(
        self, read: Callable[[type[Any], C], Awaitable[Any]], authenticate: Callable[[C], Principal]
    ) -> Behaviours[C]:
        """Return the service's methods by name. ``read`` reads the one message of a call, ``authenticate`` gives whose
        call it is, by the credentials in force now, and raises where none holds."""

        async def upload(call: C) -> Message:
            return await self.upload(principal_of(call), call.wire, lambda: authenticate(call))

        async def download(call: C) -> None:
            principal = self._begin(call)
            asked = await read(pb.DownloadFileRequest, call)
            await self.download(principal, asked, call.wire, lambda: authenticate(call))

        def asking(kind: type[Message], answer: Answer) -> Callable[[C], Awaitable[Message | None]]:
            async def ask(call: C) -> Message:
                return await answer(self._begin(call), await read(kind, call))

            return ask

        others = {name: asking(kind, answer) for name, (kind, answer) in self._asked.items()}
        return {"UploadFile": upload, "DownloadFile": download, **others}

    def _begin(self, call: TenantCall) -> Principal:
        """Return whose call it is, once that may have files, and let its message be a short one.

        Raises:
            FeatureNotAllowedError: as ``check``.
        """
        principal = principal_of(call)
        self.check(principal)
        call.wire.bound(MAX_MESSAGE_BYTES)
        return principal

    def check(self, principal: Principal) -> StoredWork:
        """Return what keeps the caller's files.

        Raises:
            FeatureNotAllowedError: the appliance keeps none, or the policy does not let the tenant have any.
        """
        if self._stored is None:
            raise FeatureNotAllowedError("this appliance keeps no files and batches")
        self._stored.check(principal)
        return self._stored

    async def upload(self, principal: Principal, wire: GrpcCall, authenticate: Authenticate) -> Message:
        """Keep the file that the call's messages bring.

        Raises:
            ApplianceError: typed, from the closed list; nothing is kept.
        """
        stored = self.check(principal)
        wire.bound(MAX_MESSAGE_BYTES)
        pieces: Pieces | None = None
        look = self._looks(authenticate)
        try:
            async with asyncio.timeout(UPLOAD_S):
                first = await _next(wire)
                if first is None:
                    raise InvalidRequestError("the call ended without a file: its first message is head", param="head")
                name, keep_s = mapping.to_head(first)
                pieces = Pieces(await stored.upload(principal, name))
                wire.bound(MAX_PART_BYTES)
                while (part := await _next(wire)) is not None:
                    look()
                    await pieces.add(mapping.to_data(part))
                one = await pieces.end(keep_s)
        except TimeoutError:
            raise upload_stopped() from None
        finally:
            if pieces is not None:
                await pieces.upload.drop()
        return self._padded(principal, pb.UploadFileResponse(file=mapping.to_file(one)))

    async def download(
        self, principal: Principal, asked: pb.DownloadFileRequest, wire: GrpcCall, authenticate: Authenticate
    ) -> None:
        """Write a file's content.

        Raises:
            ApplianceError: typed, from the closed list.
        """
        look, pieces = self._looks(authenticate), self.check(principal).content(principal, known_id(asked.file_id))
        with self._downloading(principal.tenant):
            async for data in pieces:
                for at in range(0, len(data), PIECE_BYTES):
                    look()
                    await wire.write(pb.DownloadFileResponse(data=data[at : at + PIECE_BYTES]))

    @contextmanager
    def _downloading(self, tenant: str) -> Iterator[None]:
        """Count one more download of a tenant.

        Raises:
            RateLimitedError: it has as many as it may, or all together have.
        """
        if self._downloads[tenant] >= DOWNLOADS_EACH or self._downloads.total() >= DOWNLOADS_IN_ALL:
            raise RateLimitedError("too many downloads at once; end some of them first", retry_after_s=DOWNLOAD_RETRY_S)
        self._downloads[tenant] += 1
        try:
            yield
        finally:
            self._downloads[tenant] -= 1
            if not self._downloads[tenant]:
                del self._downloads[tenant]

    def _looks(self, authenticate: Authenticate) -> Callable[[], None]:
        """Return what looks at the caller again, once it is due."""
        due = time.monotonic() + RECHECK_S

        def look() -> None:
            nonlocal due
            if time.monotonic() >= due:
                self.check(authenticate())
                due = time.monotonic() + RECHECK_S

        return look

    def _padded(self, principal: Principal, message: M) -> M:
        return fill(message, self._padding) if self._service.pads(principal) else message

    async def _get_file(self, principal: Principal, asked: pb.GetFileRequest) -> Message:
        one = await self.check(principal).file(principal, known_id(asked.file_id))
        return self._padded(principal, pb.GetFileResponse(file=mapping.to_file(one)))

    async def _list_files(self, principal: Principal, asked: pb.ListFilesRequest) -> Message:
        found = await self.check(principal).files(principal, mapping.to_files_page(asked))
        answer = pb.ListFilesResponse(files=map(mapping.to_file, found.files), has_more=found.more)
        return self._padded(principal, answer)

    async def _delete_file(self, principal: Principal, asked: pb.DeleteFileRequest) -> Message:
        await self.check(principal).delete(principal, known_id(asked.file_id))
        return self._padded(principal, pb.DeleteFileResponse())

    async def _create_batch(self, principal: Principal, asked: pb.CreateBatchRequest) -> Message:
        key = key_of(asked.idempotency_key)
        one = await self.check(principal).begin(principal, *mapping.to_new_batch(asked), key)
        return self._padded(principal, pb.CreateBatchResponse(batch=mapping.to_batch(one)))

    async def _get_batch(self, principal: Principal, asked: pb.GetBatchRequest) -> Message:
        one = await self.check(principal).batch(principal, known_id(asked.batch_id))
        return self._padded(principal, pb.GetBatchResponse(batch=mapping.to_batch(one)))

    async def _list_batches(self, principal: Principal, asked: pb.ListBatchesRequest) -> Message:
        found = await self.check(principal).batches(principal, mapping.to_batches_page(asked))
        answer = pb.ListBatchesResponse(batches=map(mapping.to_batch, found.batches), has_more=found.more)
        return self._padded(principal, answer)

    async def _cancel_batch(self, principal: Principal, asked: pb.CancelBatchRequest) -> Message:
        one = await self.check(principal).cancel(principal, known_id(asked.batch_id))
        return self._padded(principal, pb.CancelBatchResponse(batch=mapping.to_batch(one)))


async def _next(wire: GrpcCall) -> pb.UploadFileRequest | None:
    """Return the next message of an upload; None behind the last.

    Raises:
        InvalidRequestError: it is malformed.
        TimeoutError: nothing more comes.
    """
    async with asyncio.timeout(IDLE_S):
        data = await wire.receive()
    if data is None:
        return None
    try:
        return pb.UploadFileRequest.FromString(data)
    except DecodeError:
        raise InvalidRequestError("the message is not valid protobuf of this method's type") from None
