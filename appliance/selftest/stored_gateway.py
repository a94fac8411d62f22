"""The scripted gateway with files, batches and stored responses: HTTP, runner, socket and sealed store, all real."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from appliance.common.audit.log import open_log
from appliance.common.control import CONTROL_VERSION, Control, StoreUp, Welcome
from appliance.common.keys import KeyTable
from appliance.gateway.batches.kept_work import KeptWork
from appliance.gateway.batches.wiring import Batches
from appliance.gateway.request.service import GatewayService
from appliance.selftest.raw_http import body_of, request_bytes, status_of, talk
from appliance.selftest.scripted_gateway import MODEL, ScriptedGateway, scripted_gateway
from appliance.supervisor.audit import Recorder
from appliance.supervisor.batches.outbox import Outbox
from appliance.supervisor.batches.port import StorePort
from appliance.supervisor.batches.store import BatchStore, open_store
from isolation.keys.keyring import Keyring

FEATURES = "batches: true, stored_responses: true"
MOST_BYTES = 1 << 30
"""Bytes that all tenants together may keep."""

UP_S, BATCH_S = 10.0, 30.0
"""Seconds for the store to be there, and for a batch of one line to end."""

BOUNDARY = "selftest"
FORM = f"multipart/form-data; boundary={BOUNDARY}"
"""Content type of an upload."""
_DIGITS = re.compile(r"[0-9a-f]{8,}$")


@dataclass(frozen=True, slots=True)
class KeptThings:
    """What one tenant has kept, by ids."""

    file: str
    batch: str
    output: str
    """The file of the batch's results."""
    response: str
    stream: str
    """A response in the background, whose events can be read again."""


def upload_form(model: str, canary: str, lines: int) -> bytes:
    """Return the body of an upload of so many lines, with a canary in each and in the file's name."""
    body = {"model": model, "prompt": canary, "max_tokens": 1}
    line = {"method": "POST", "url": "/v1/completions", "body": body}
    text = "".join(json.dumps({"custom_id": f"{canary}-{number}", **line}) + "\n" for number in range(lines))
    form = f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--{BOUNDARY}\r\n'
    form += f'content-disposition: form-data; name="file"; filename="{canary}.jsonl"\r\n\r\n{text}'
    return f"{form}\r\n--{BOUNDARY}--\r\n".encode()


@dataclass(frozen=True, slots=True)
class StoredApi:
    """The HTTP API of an appliance that keeps files and responses, for its tenants."""

    port: int
    keys: Mapping[str, str]
    """API key of each tenant."""
    model: str = MODEL
    more: Mapping[str, Any] = field(default_factory=dict)
    """Fields that requests for responses have besides."""

    async def ask(
        self, tenant: str, method: str, path: str, body: Any = None, kind: str = "application/json"
    ) -> tuple[int, bytes]:
        """Status and body of one request; ``body`` is bytes, or what JSON has."""
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        proof = ("authorization", f"Bearer {self.keys[tenant]}")
        request = request_bytes(method, path, data, proof, ("content-type", kind))
        answer = await talk(self.port, request)
        return status_of(answer), body_of(answer) or b""

    async def made(self, tenant: str, method: str, path: str, body: Any, kind: str = "application/json") -> bytes:
        """What a request gave that has to be served.

        Raises:
            RuntimeError: it was not.
        """
        status, found = await self.ask(tenant, method, path, body, kind)
        if status != 200:
            raise RuntimeError(f"{method} {path} was answered {status}: {found[:200]!r}")
        return found

    async def keep(self, tenant: str, canary: str) -> KeptThings:
        """Keep one of everything, with a canary wherever a tenant's text is taken."""
        file = await self.upload(tenant, canary, 1)
        asked: dict[str, Any] = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        asked["metadata"] = {"note": canary}
        batch = json.loads(await self.made(tenant, "POST", "/v1/batches", asked))["id"]
        output = await self._ended(tenant, batch)
        said: dict[str, Any] = {"model": self.model, "input": canary, "instructions": canary, **self.more}
        said["metadata"] = {"note": canary}
        response = json.loads(await self.made(tenant, "POST", "/v1/responses", said))["id"]
        events = await self.made(tenant, "POST", "/v1/responses", {**said, "stream": True, "background": True})
        found = re.search(rb'"id":"(resp_[0-9a-f]+)"', events)
        if found is None or canary.encode() not in events:
            raise RuntimeError("a response in the background has no id, or not what was said")
        return KeptThings(file, batch, output, response, found[1].decode())

    async def upload(self, tenant: str, canary: str, lines: int) -> str:
        """Keep a file of so many lines, with the canary in each and in its name; returns its id."""
        body = upload_form(self.model, canary, lines)
        return str(json.loads(await self.made(tenant, "POST", "/v1/files", body, FORM))["id"])

    async def _ended(self, tenant: str, batch: str) -> str:
        """The file of a batch's results, once it is over."""
        async with asyncio.timeout(BATCH_S):
            while True:
                found = json.loads(await self.made(tenant, "GET", f"/v1/batches/{batch}", None))
                if found["status"] not in ("validating", "in_progress", "finalizing"):
                    break
                await asyncio.sleep(0.02)
        if found["status"] != "completed" or not found["output_file_id"]:
            raise RuntimeError(f"the batch ended as {found['status']}: {found['errors']}")
        return str(found["output_file_id"])


@dataclass(frozen=True, slots=True)
class StoredGateway:
    """A serving gateway with its store."""

    gateway: ScriptedGateway
    api: StoredApi
    store: BatchStore
    keyring: Keyring
    folder: Path
    """Folder of keyring (``keys``), store (``kept``) and audit log (``audit``)."""


def unknown(one: str) -> str:
    """An id of the same form that nothing has."""
    return _DIGITS.sub(lambda found: os.urandom(32).hex()[: len(found[0])], one)


@contextlib.asynccontextmanager
async def stored_gateway(folder: Path) -> AsyncIterator[StoredGateway]:
    """Serve for the duration of the block, with keys and store below ``folder``."""
    keyring = Keyring(folder / "keys", os.urandom(32))
    store = open_store(folder / "kept", keyring, MOST_BYTES)
    log = open_log(folder / "audit")
    recorder = Recorder(log, lambda _state: None)
    made: list[Batches] = []

    def publish(message: Control, fds: tuple[int, ...]) -> bool:
        if isinstance(message, StoreUp):
            made[0].link.take(tuple(map(os.dup, fds)))
        return True

    port = StorePort(store, Outbox(store.book, log.name, recorder.append), publish)

    def attach(service: GatewayService, keys: Callable[[], KeyTable]) -> KeptWork | None:
        made.append(Batches(service, lambda message: port.open(message), keys, wanted=True))  # type: ignore[arg-type]
        return made[0].work

    try:
        async with scripted_gateway(attach, FEATURES) as gateway:
            tasks = [asyncio.create_task(one) for one in (port.run(), made[0].run())]
            made[0].link.attached(Welcome(CONTROL_VERSION, "none", "none", []))
            try:
                async with asyncio.timeout(UP_S):
                    while not made[0].link.up:  # noqa: ASYNC110 - the link tells nobody
                        await asyncio.sleep(0.01)
                api = StoredApi(gateway.ends.http_port, gateway.keys)
                yield StoredGateway(gateway, api, store, keyring, folder)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await port.close()
                await recorder.close()
    finally:
        keyring.close()
