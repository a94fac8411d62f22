"""Files and batches for the front end (``StoredWork``): the policy asked first, then the supervisor's store."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping

from appliance.common.batches import messages
from appliance.common.batches.messages import StoreCall
from appliance.common.batches.values import PURPOSE, StoredBatch, StoredFile
from appliance.common.errors import ApplianceError, FeatureNotAllowedError, RateLimitedError
from appliance.gateway.batches.kept_responses import Counted, KeptResponses
from appliance.gateway.batches.refusals import refusal
from appliance.gateway.generate_request import Principal
from appliance.gateway.sandboxes.store_link import Answer, StoreDeniedError, StoreLink
from appliance.gateway.stored_work import BatchPage, FilePage, Page, Upload
from policy.kept import keeps_files
from policy.model import PolicySet, Tenant

UPLOADS_EACH = 4
"""Uploads of one tenant at a time; each holds two pieces in memory."""

UPLOADS_IN_ALL = 32
"""Uploads of all tenants at a time."""

UPLOAD_RETRY_S = 5.0
"""Seconds after which another upload may begin: a small one takes less."""


class KeptWork:
    """Files and batches of tenants, kept by the supervisor."""

    def __init__(
        self,
        store: StoreLink,
        policy: Callable[[], PolicySet],
        changed: Callable[[StoredBatch], None],
        count: Counted = lambda *_args, **_labels: None,
        epoch: Callable[[str], bytes] = lambda _tenant: b"",
    ) -> None:
        """``policy`` gives the one in force; ``changed`` is called with each batch that is made or cancelled; ``count``
        adds to a counter of ``names``; ``epoch`` gives a tenant's namespace key."""
        self.responses = KeptResponses(store, policy, count, epoch)
        self._store = store
        self._policy = policy
        self._changed = changed
        self._uploads: Counter[str] = Counter()
        self._dropping: set[asyncio.Task[None]] = set()
        """Uploads that were left while they were begun."""

    def check(self, principal: Principal) -> None:
        """Return where the tenant may have files; see ``appliance.gateway.stored_work.StoredWork``."""
        self._allowed(principal)

    async def upload(self, principal: Principal, name: str, *, lines: bool = True) -> Upload:
        """Begin a file; see ``appliance.gateway.stored_work.StoredWork``."""
        tenant = self._allowed(principal)
        if self._uploads[tenant.id] >= UPLOADS_EACH or self._uploads.total() >= UPLOADS_IN_ALL:
            raise RateLimitedError("too many uploads at once; send fewer in parallel", retry_after_s=UPLOAD_RETRY_S)
        self._uploads[tenant.id] += 1
        call = messages.BeginUpload(tenant.id, principal.credential, name, tenant.limits.max_stored_bytes, int(lines))
        beginning = asyncio.create_task(self._begin_upload(call), name="beginning of an upload")
        try:
            return await asyncio.shield(beginning)
        except asyncio.CancelledError:
            beginning.add_done_callback(self._drop_begun)
            raise

    async def _begin_upload(self, call: messages.BeginUpload) -> _Upload:
        """Begin a file of which a place was taken; gives the place back where the store does not."""
        try:
            begun = await self._ask(call, messages.UploadBegun, "file")
        except BaseException:
            self._free(call.tenant)
            raise
        return _Upload(self, call.tenant, begun.file)

    def _drop_begun(self, beginning: asyncio.Task[_Upload]) -> None:
        """Forget a file whose caller left while it was begun: the store has few places for all tenants."""
        if not beginning.cancelled() and beginning.exception() is None:
            dropping = asyncio.create_task(beginning.result().drop(), name="end of an upload that was left")
            self._dropping.add(dropping)
            dropping.add_done_callback(self._dropping.discard)

    async def file(self, principal: Principal, file: str) -> StoredFile:
        """Return a file's facts; see ``appliance.gateway.stored_work.StoredWork``."""
        tenant = self._allowed(principal)
        return (await self._ask(messages.FileQuery(tenant.id, file), messages.FileFound, "file")).file

    async def files(self, principal: Principal, page: Page) -> FilePage:
        """Return the tenant's files; see ``appliance.gateway.stored_work.StoredWork``."""
        tenant = self._allowed(principal)
        call = messages.FileList(tenant.id, page.purpose, page.after, page.limit, int(page.ascending))
        found = await self._ask(call, messages.FilesFound, "file")
        return FilePage(tuple(found.files), bool(found.more))

    async def content(self, principal: Principal, file: str) -> AsyncIterator[bytes]:
        """Yield a file's bytes; see ``appliance.gateway.stored_work.StoredWork``."""
        tenant, after = self._allowed(principal), 0
        while True:
            answer, data = await self._fetch(messages.FileRead(tenant.id, file, after), messages.FileBytes, "file")
            yield data
            if answer.last:
                return
            after = answer.after

    async def delete(self, principal: Principal, file: str) -> None:
        """Delete a file; see ``appliance.gateway.stored_work.StoredWork``."""
        tenant = self._allowed(principal)
        await self._ask(messages.FileDelete(tenant.id, file, principal.credential), messages.Accepted, "file")

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
        """Make a batch; see ``appliance.gateway.stored_work.StoredWork``."""
        tenant = self._allowed(principal)
        who, told = principal.credential, dict(metadata)
        call = messages.BeginBatch(tenant.id, who, file, endpoint, window_s, told, key, output_keep_s)
        found = await self._ask(call, messages.BatchFound, "file", "input_file_id")
        self._changed(found.batch)
        return found.batch

    async def batch(self, principal: Principal, batch: str) -> StoredBatch:
        """Return a batch; see ``appliance.gateway.stored_work.StoredWork``."""
        tenant = self._allowed(principal)
        return (await self._ask(messages.BatchQuery(tenant.id, batch), messages.BatchFound, "batch")).batch

    async def batches(self, principal: Principal, page: Page) -> BatchPage:
        """Return the tenant's batches; see ``appliance.gateway.stored_work.StoredWork``."""
        tenant = self._allowed(principal)
        found = await self._ask(messages.BatchList(tenant.id, page.after, page.limit), messages.BatchesFound, "batch")
        return BatchPage(tuple(found.batches), bool(found.more))

    async def cancel(self, principal: Principal, batch: str) -> StoredBatch:
        """Cancel a batch; see ``appliance.gateway.stored_work.StoredWork``."""
        tenant = self._allowed(principal)
        call = messages.BatchCancel(tenant.id, batch, principal.credential)
        found = await self._ask(call, messages.BatchFound, "batch")
        self._changed(found.batch)
        return found.batch

    def _allowed(self, principal: Principal) -> Tenant:
        """Return the caller's tenant.

        Raises:
            FeatureNotAllowedError: it may not have files and batches.
        """
        policy = self._policy()
        tenant = policy.tenants.get(principal.tenant)
        if tenant is None or not tenant.features.batches:
            error = FeatureNotAllowedError("this tenant may not use files and batches")
            raise error.by_rule(f"tenants.{principal.tenant}.features.batches", policy.digest)
        if not keeps_files(tenant):
            error = FeatureNotAllowedError("nothing of this tenant is kept, and so no files and batches")
            raise error.by_rule(f"tenants.{principal.tenant}.retention", policy.digest)
        return tenant

    def _free(self, tenant: str) -> None:
        self._uploads[tenant] -= 1
        if not self._uploads[tenant]:
            del self._uploads[tenant]

    async def _ask(
        self, call: StoreCall, kind: type[Answer], what: str, param: str = "id", payload: bytes | bytearray = b""
    ) -> Answer:
        return (await self._fetch(call, kind, what, param, payload))[0]

    async def _fetch(
        self, call: StoreCall, kind: type[Answer], what: str, param: str = "id", payload: bytes | bytearray = b""
    ) -> tuple[Answer, bytes]:
        try:
            return await self._store.fetch(call, kind, payload)
        except StoreDeniedError as error:
            raise refusal(error, what, param) from None


class _Upload:
    """A file of which more comes."""

    def __init__(self, kept: KeptWork, tenant: str, file: str) -> None:
        self._kept, self._tenant, self._file = kept, tenant, file
        self._over = False

    async def write(self, data: bytes | bytearray) -> None:
        """Take the next bytes."""
        await self._kept._ask(messages.UploadPiece(self._file), messages.Accepted, "file", "file", data)

    async def end(self, keep_s: int, purpose: str = PURPOSE) -> StoredFile:
        """Keep the file."""
        call = messages.EndUpload(self._file, keep_s, purpose)
        found = await self._kept._ask(call, messages.FileFound, "file", "file")
        self._finish()
        return found.file

    async def drop(self) -> None:
        """Forget the file; after ``end`` nothing."""
        if self._over:
            return
        self._finish()
        try:
            await self._kept._ask(messages.DropUpload(self._file), messages.Accepted, "file")
        except ApplianceError:
            return  # What nobody goes on with is forgotten when this gateway leaves.

    def _finish(self) -> None:
        if not self._over:
            self._over = True
            self._kept._free(self._tenant)
