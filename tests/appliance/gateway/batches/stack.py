"""HTTP front end, runner, socket and sealed store in one process, before a scripted service."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import openai

from appliance.common.audit.log import open_log
from appliance.common.control import CONTROL_VERSION, Control, StoreUp, Welcome
from appliance.common.errors import ApplianceError
from appliance.common.keys import KeyRecord, KeyTable, issue
from appliance.common.scopes import Scope
from appliance.gateway.batches.kept_work import KeptWork
from appliance.gateway.batches.line_calls import LineCalls
from appliance.gateway.batches.room import Room
from appliance.gateway.batches.runner import BatchRunner
from appliance.gateway.batches.wiring import epoch_of
from appliance.gateway.front.auth import Resolver
from appliance.gateway.generate_request import Principal
from appliance.gateway.request.ledger import Ledger
from appliance.gateway.sandboxes.store_link import StoreLink
from appliance.gateway.sandboxes.tenant_sandboxes import TenantSandboxes
from appliance.gateway.servers import FrontEnds, FrontEndSettings, serve_front_ends
from appliance.supervisor.audit import Recorder
from appliance.supervisor.batches.outbox import Outbox
from appliance.supervisor.batches.port import StorePort
from appliance.supervisor.batches.store import BatchStore, open_store
from isolation.keys.keyring import Keyring
from policy.loader import Source, load_policy
from tests.appliance.gateway.front.support import PEPPER, ScriptedService
from tests.system.conftest import PlainAsyncClient

POLICY = """
version: 1
tenants:
  acme:
    credentials: ["key:acme-1"]
    models: ["*"]
    features: {batches: true, stored_responses: true}
    limits: {requests_per_minute: 100000}
  globex: {credentials: ["key:globex-1"], models: ["*"], features: {batches: true, stored_responses: true}}
  without: {credentials: ["key:without-1"], models: ["*"]}
  forgets:
    credentials: ["key:forgets-1"]
    models: ["*"]
    features: {batches: true, stored_responses: true}
    retention: none
"""
LIMITED = "acme-limited"
"""A key of acme with the scope `generate` alone."""
TENANTS = ("acme", "globex", "without", "forgets")
MOST = 1 << 30


@dataclass
class Stack:
    """What a test reaches."""

    service: ScriptedService
    ledger: Ledger
    store: BatchStore
    port: StorePort
    link: StoreLink
    runner: BatchRunner
    url: str
    keys: dict[str, str]
    clock: list[float]
    """Seconds by which the store's clock differs from the machine's."""
    withdrawn: dict[str, ApplianceError]
    """Error of a tenant whose credential is gone."""
    folder: Path
    ends: FrontEnds
    tables: list[KeyTable]
    """The keys in force."""

    def openai(self, tenant: str = "acme", **options: Any) -> openai.AsyncOpenAI:
        """The official client."""
        settings = {"max_retries": 0, "timeout": 20.0, "http_client": PlainAsyncClient(), **options}
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self.keys[tenant], **settings)

    def revoke_all(self) -> None:
        """Have no key be in force."""
        self.tables[0] = KeyTable(PEPPER, {})

    def use(self, text: str) -> None:
        """Put another policy in force."""
        policy = load_policy([Source("p.yaml", text)])
        self.ledger.replace(policy, {name: bytes(32) for name in policy.tenants})

    async def ended(self, client: openai.AsyncOpenAI, batch: str, *states: str) -> Any:
        """A batch once it is in one of these states."""

        async def look() -> Any:
            one = await client.batches.retrieve(batch)
            return one if one.status in states else None

        return await until(look)


async def until(look: Callable[[], Any], most_s: float = 20.0) -> Any:
    """What ``look`` gives once it gives something."""
    deadline = time.monotonic() + most_s
    while True:
        found = look()
        if asyncio.iscoroutine(found):
            found = await found
        if found:
            return found
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def stacked(folder: Path, shift_s: float = 0.0, most: int = MOST) -> AsyncIterator[Stack]:
    """Serve; the store's clock is ``shift_s`` ahead of the machine's."""
    keyring, clock = Keyring(folder / "keys", bytes(32)), [shift_s]
    store = open_store(folder / "kept", keyring, most, lambda: time.time() + clock[0])
    audit = open_log(folder / "audit")
    recorder = Recorder(audit, lambda _state: None)
    policy = load_policy([Source("p.yaml", POLICY)])
    ledger = Ledger(policy, {name: bytes(32) for name in policy.tenants})
    service, withdrawn = ScriptedService(), dict[str, ApplianceError]()
    service.tenants = {f"key:{name}-1": name for name in TENANTS}
    issued = {name: issue(f"{name}-1", PEPPER) for name in TENANTS}
    created = datetime(2026, 1, 1, tzinfo=UTC)
    records = {f"{name}-1": KeyRecord(digest, created) for name, (_, digest) in issued.items()}
    issued[LIMITED] = issue(LIMITED, PEPPER)
    records[LIMITED] = KeyRecord(issued[LIMITED][1], created, scopes=frozenset({Scope.GENERATE}))
    service.tenants[f"key:{LIMITED}"] = "acme"
    tables = [KeyTable(PEPPER, records)]

    def publish(message: Control, fds: tuple[int, ...]) -> bool:
        if isinstance(message, StoreUp):
            link.take(tuple(map(os.dup, fds)))
        return True

    port = StorePort(store, Outbox(store.book, audit.name, recorder.append), publish)
    link = StoreLink(lambda message: port.open(message), wanted=True)  # type: ignore[arg-type]

    def holds(principal: Principal) -> ApplianceError | None:
        return withdrawn.get(principal.tenant)

    runner = BatchRunner(link, LineCalls(service, holds), Room(ledger, {}, TenantSandboxes()))
    work = KeptWork(link, lambda: ledger.policy, runner.changed, epoch=partial(epoch_of, ledger))
    settings = FrontEndSettings(http_port=0, grpc_port=0)
    tasks = [asyncio.create_task(one) for one in (port.run(), runner.run())]
    link.attached(Welcome(CONTROL_VERSION, "none", "none", []))
    try:
        async with serve_front_ends(
            service, Resolver(service, lambda: tables[0]), settings, lambda: True, work
        ) as ends:
            await until(lambda: link.up)
            url = f"http://127.0.0.1:{ends.http_port}"
            keys = {name: plain for name, (plain, _) in issued.items()}
            yield Stack(service, ledger, store, port, link, runner, url, keys, clock, withdrawn, folder, ends, tables)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        link.close()
        await port.close()
        await recorder.close()
        keyring.close()
