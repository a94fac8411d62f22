"""Uploads whose callers leave while the store begins them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from appliance.common.batches import messages
from appliance.common.errors import RateLimitedError
from appliance.gateway.batches.kept_work import UPLOADS_EACH, KeptWork
from appliance.gateway.generate_request import Principal
from policy.loader import Source, load_policy
from tests.appliance.gateway.batches.stack import POLICY


class SlowStore:
    """Carries out each call when it comes, as the supervisor does, and answers those that begin files later."""

    def __init__(self) -> None:
        self.open: set[str] = set()
        self.answers = asyncio.Event()
        self._count = 0

    async def fetch(self, call: Any, _kind: type, _payload: bytes = b"") -> tuple[Any, bytes]:
        """Answer a call."""
        if isinstance(call, messages.BeginUpload):
            self._count += 1
            file = f"file-{self._count}"
            self.open.add(file)
            await self.answers.wait()
            return messages.UploadBegun(file), b""
        assert isinstance(call, messages.DropUpload)
        self.open.discard(call.file)
        return messages.Accepted(), b""


async def test_an_upload_left_while_it_begins_is_dropped() -> None:
    """The store has it, so it is dropped once its id is known; until then it has its place of the tenant, and a tenant
    that leaves again and again takes no more of the store's places than it may. One that stays (control) is open."""
    store, policy, caller = SlowStore(), load_policy([Source("p.yaml", POLICY)]), Principal("acme", "key:acme-1")
    kept = KeptWork(store, lambda: policy, lambda _batch: None)  # type: ignore[arg-type]  # what is asked of it
    for _ in range(UPLOADS_EACH):
        upload = asyncio.create_task(kept.upload(caller, "a"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        upload.cancel()
        with pytest.raises(asyncio.CancelledError):
            await upload
    assert len(store.open) == UPLOADS_EACH
    with pytest.raises(RateLimitedError):
        await kept.upload(caller, "b")
    store.answers.set()
    async with asyncio.timeout(10):
        while store.open:
            await asyncio.sleep(0.001)
    uploads = [await kept.upload(caller, "c") for _ in range(UPLOADS_EACH)]
    assert len(store.open) == UPLOADS_EACH
    for one in uploads:
        await one.drop()
    assert store.open == set()
