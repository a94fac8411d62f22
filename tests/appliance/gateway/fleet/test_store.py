"""The store of a fleet: a real one, and one that lies; and two hosts that lend by it."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from appliance.common.audit.entry import from_wire
from appliance.common.control import Audited
from appliance.common.errors import ApplianceError, RateLimitedError, UnavailableError
from appliance.common.fleet_config import FleetConfig
from appliance.gateway.fleet import sharing
from appliance.gateway.fleet import store as module
from appliance.gateway.fleet.lending import SPEND, Lender, LimitAmount, LoanQuestion, Message
from appliance.gateway.fleet.message import MAX_BYTES
from appliance.gateway.fleet.own_parts import OwnParts
from appliance.gateway.fleet.sharing import Sharing
from appliance.gateway.fleet.store import FleetStoreError, Store
from appliance.gateway.request.audit_feed import AuditFeed
from appliance.gateway.request.ledger import Ledger
from appliance.gateway.request.spend import Spends
from policy.host_part import host_part
from policy.loader import Source, load_policy
from tests.stores import RunningStore, store

POLICY = """
version: 1
prices: {currency: EUR, rules: [{models: ["*"], input: 1000, output: 1000}]}
tenants:
  acme:
    credentials: ["key:a"]
    models: ["m"]
    limits: {requests_per_minute: 120, tokens_per_minute: 60000, concurrency: 400, max_context_tokens: 100,
             max_output_tokens: 50, spend_per_day: 16}
"""


@pytest.fixture(scope="module")
def running() -> Iterator[RunningStore]:
    """A real store, with a password."""
    with tempfile.TemporaryDirectory(prefix="st-", dir="/tmp") as folder:
        (Path(folder) / "password").write_text("of the store\n")
        with store(Path(folder), "--requirepass", "of the store") as found:
            print(found.version)
            yield found


def config(address: str, host: str = "a", **more: object) -> FleetConfig:
    """A fleet of two."""
    return FleetConfig.model_validate({"host": host, "hosts": ("a", "b"), "store": address, **more})


def with_password(running: RunningStore, host: str = "a") -> FleetConfig:
    """A fleet of two that knows the password."""
    return config(running.address, host, store_password=Path(running.address[5:]).parent / "password")


async def test_values_are_kept_for_all_hosts(running: RunningStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each host gets what the others have written, whatever bytes it is, until its time is over; a wrong password and
    none are told in the store's words."""
    monkeypatch.setattr(module, "KEPT_MS", 100)
    one, other = Store(with_password(running)), Store(with_password(running, "b"))
    value = bytes(range(256)) * (MAX_BYTES // 256)
    assert await one.exchange(b"a", value, [b"b", b"none"]) == [None, None]
    assert await other.exchange(b"b", b"", [b"a", b"b"]) == [value, b""]
    await asyncio.sleep(0.15)
    assert await other.exchange(b"b", b"x", [b"a"]) == [None]
    with pytest.raises(FleetStoreError, match="NOAUTH"):
        await Store(config(running.address)).exchange(b"a", b"", [b"b"])
    await one.close()
    await other.close()


LIES = {
    "endless line": b"+" * 4_000,
    "no reply": b"\r\n" * 3,
    "huge value": b"+OK\r\n*1\r\n$99999999999\r\n",
    "negative value": b"+OK\r\n*1\r\n$-7\r\n",
    "another number of values": b"+OK\r\n*2\r\n$1\r\nx\r\n$1\r\ny\r\n",
    "a value without an end": b"+OK\r\n*1\r\n$1\r\nxxxxxxx",
    "a number where a value belongs": b"+OK\r\n*1\r\n:1\r\n",
    "an error": b"-READONLY no\r\n",
    "half a reply": b"+OK\r\n*1\r\n$5\r\nab",
    "silence": b"",
}


@pytest.mark.parametrize("lie", LIES)
async def test_what_is_no_reply_ends_the_connection(lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is refused within a second and the next call connects anew. Control: an honest reply is taken."""
    monkeypatch.setattr(module, "TIMEOUT_S", 0.2)
    replies = [LIES[lie], b"+OK\r\n*1\r\n$1\r\nx\r\n"]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(replies.pop(0))
        while await reader.read(1_024):
            pass
        writer.close()

    with tempfile.TemporaryDirectory(prefix="st-", dir="/tmp") as folder:
        server = await asyncio.start_unix_server(serve, path=f"{folder}/s")
        asked = Store(config(f"unix:{folder}/s"))
        began = time.monotonic()
        with pytest.raises(FleetStoreError):
            await asked.exchange(b"a", b"v", [b"b"])
        assert time.monotonic() - began < 1.0
        assert await asked.exchange(b"a", b"v", [b"b"]) == [b"x"]
        await asked.close()
        await asyncio.sleep(0.05)  # The server's ends close.
        server.close()


class Host:
    """One host's ledger and what lends for it."""

    def __init__(self, fleet: FleetConfig, record: Callable[[str, int], bool]) -> None:
        policy = host_part(load_policy([Source("p.yaml", POLICY)]), 2)
        spends = Spends()
        self.told: list[str] = []
        self.ledger = Ledger(policy, {"acme": b"k" * 32}, spends=spends)
        parts = OwnParts(self.ledger, spends)
        self.ledger.on_used = parts.note
        self.feed = AuditFeed(self._send)

        async def recorded(_lease: str, tenant: str, cost: int) -> None:
            record(tenant, cost)

        self.sharing = Sharing(fleet, b"f" * 32, parts, self.feed, recorded)
        self.counts: list[str] = []

    def _send(self, message: Audited) -> bool:
        self.told += message.entries
        return True

    def _count(self, name: str, _amount: int = 1, **_labels: str) -> None:
        self.counts.append(name)

    def run(self) -> asyncio.Task[None]:
        """Lend and borrow."""
        return asyncio.create_task(self.sharing.run(self._count))

    def ask(self) -> bool:
        """Have one request served."""
        try:
            held = self.ledger.admit("acme", "m", 40)
        except RateLimitedError:
            return False
        held.settle(0, 0)
        return True

    def spend(self, most: int) -> int:
        """Spend as much as may be spent, in requests of 40 tokens; returns the amount."""
        spent = 0
        for _ in range(most):
            try:
                held = self.ledger.admit("acme", "m", 40)
            except ApplianceError:
                break
            try:
                held.reserve(1, 39, 100)
            except ApplianceError:
                held.settle(0, 0)
                break
            held.settle(1, 39)
            spent += 40_000_000
        return spent


async def test_hosts_lend_by_a_real_store(running: RunningStore) -> None:
    """A host whose part of a rate is used up gets some of an idle one's within a second, and a part of a budget, which
    is recorded and told; together they have what the policy says. A store that is gone is a problem that is told."""
    recorded: list[tuple[str, int]] = []
    first, second = (
        Host(with_password(running, name), lambda *what: bool(recorded.append(what)) or True) for name in ("a", "b")
    )
    tasks = [first.run(), second.run()]
    count = 0
    async with asyncio.timeout(10):
        while count < 85:
            count += first.ask()
            await asyncio.sleep(0)
    while second.ask():
        count += 1
    assert count <= 120 + 30
    assert (first.sharing.problem, second.sharing.problem) == ("", "")
    for host in (first, second):
        host.ledger.replace(load_policy([Source("p.yaml", POLICY.replace("120", "6000"))]), {"acme": b"k" * 32})
        host.ledger.replace(
            host_part(load_policy([Source("p.yaml", POLICY.replace("120", "60000"))]), 2), {"acme": b"k" * 32}
        )
    await asyncio.sleep(3)  # for the rates that have just risen
    spent = 0
    async with asyncio.timeout(20):
        while spent < 10_000_000_000:
            spent += first.spend(20)
            await asyncio.sleep(0.02)
    assert recorded and spent <= 16_000_000_000
    first.feed.flush()
    second.feed.flush()
    lent, borrowed = ([from_wire(one).fields for one in host.told] for host in (second, first))
    assert sum(int(one["cost"]) for one in lent) == sum(cost for _, cost in recorded)
    assert {one["what"] for one in lent} == {"lent"} and {one["what"] for one in borrowed} == {"borrowed"}
    assert spent + second.spend(1_000) <= 16_000_000_000
    running.process.kill()
    async with asyncio.timeout(10):
        while not first.sharing.problem:
            await asyncio.sleep(0.05)
    for task in tasks:
        task.cancel()


@pytest.mark.parametrize("how", ["refused", "silent", "no entry"])
async def test_a_budget_that_is_not_recorded_stays_the_lenders(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the account takes nothing, a host that asks again and again gets nothing, and the lender loses nothing of
    its budget. One that is recorded (control) is lent and counts as spent."""
    monkeypatch.setattr(sharing, "RECORD_S", 0.01)
    host = Host(config("unix:/nowhere"), lambda *_what: True)
    recorded, parts = host.sharing.record_spend, host.sharing.parts
    lender = Lender("a", ("b",), "life-a", parts)

    async def fails(_lease: str, _tenant: str, _cost: int) -> None:
        if how == "refused":
            raise UnavailableError("the book takes nothing")
        if how == "silent":
            await asyncio.Event().wait()

    monkeypatch.setattr(host.sharing.audit, "_send", lambda _message: how != "no entry")
    host.sharing.audit.add("gap", where="gateway", dropped=1)

    async def ask(count: int) -> list[tuple[str, LimitAmount]]:
        question = LoanQuestion("life-b", count, (LimitAmount("acme", SPEND, 1 << 40),))
        lent = lender.read([Message("b", question, {})], 0.0)
        for peer, loan in lent:
            await host.sharing._lent(lender, peer, loan)
        return lent

    host.sharing.record_spend = fails
    for count in range(1, 21):
        assert await ask(count), "it would lend"
        assert lender.write(0.0).answers["b"].amounts == ()
        assert parts.spends.of("acme").day == 0
    host.sharing.record_spend = recorded
    monkeypatch.setattr(host.sharing.audit, "_send", lambda _message: True)
    ((_, loan),) = await ask(21)
    assert lender.write(0.0).answers["b"].amounts == (loan,)
    assert parts.spends.of("acme").day == loan.amount > 0
