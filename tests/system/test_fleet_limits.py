"""Two appliances and a real store: limits of rate and spend are of both, whatever becomes of store and hosts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from appliance.common.fleet_config import FleetConfig
from appliance.gateway.fleet.message import Sealer
from appliance.gateway.fleet.store import Store
from appliance.operator.demo import TENANTS
from appliance.selftest.processes import rooms
from bench.host import Served, null_appliance
from tests.stores import RunningStore, server, store
from tests.system.audit_files import written

pytestmark = [pytest.mark.runsc, pytest.mark.full, pytest.mark.clock, pytest.mark.timeout(400)]

STEP_US = 1_000
RPM = 240
LEASE = RPM // 2 // 2
BUDGET = 1_000_000_000
"""Billionths that each tenant may spend in a day."""

ROOT = Path(__file__).resolve().parents[2]

FLEET_KEY = "0123456789abcdef" * 4

ROUNDING = 2
"""Requests: each host's bucket is rounded once."""

POLICY = "version: 1\nprices: {currency: EUR, rules: [{models: ['*'], input: 500, output: 500}]}\ntenants:\n" + "".join(
    f"  {name}:\n    credentials: ['key:{name}-1']\n    models: ['*']\n    limits: {{requests_per_minute: {rpm}, "
    f"tokens_per_minute: 1000000000, concurrency: 512, max_context_tokens: 4096, max_output_tokens: 4000{more}}}\n"
    for name, rpm, more in zip(TENANTS, (RPM, 1_000_000), ("", ", spend_per_day: 1"), strict=True)
)


@dataclass
class Fleet:
    """Two hosts and their store."""

    hosts: tuple[Served, Served]
    store: RunningStore

    def key(self, tenant: int) -> str:
        """API key of a tenant by its number."""
        return self.hosts[0].keys[tenant]

    def metric(self, number: int, name: str) -> float:
        """A metric of one host, summed over its labels."""
        text = httpx.get(self.hosts[number].ready["admin"] + "/metrics", timeout=10).text
        return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))

    def kill_gateway(self, number: int) -> None:
        """kill -9, and wait until another serves."""
        one = self.hosts[number]
        (pid,) = (pid for pid, room in rooms(one.process.pid, one.sandboxes()).items() if room == "gateway")
        os.kill(pid, signal.SIGKILL)
        until = time.monotonic() + 60
        while time.monotonic() < until:
            time.sleep(0.1)
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(one.ready["admin"] + "/health/ready", timeout=5).status_code == 200:
                    return
        raise AssertionError("the host did not come back")


@pytest.fixture(scope="module")
def fleet(runsc_path: Path) -> Iterator[Fleet]:
    """Two hosts with one key, and a real store."""
    server()
    with tempfile.TemporaryDirectory(prefix="fl-", dir="/tmp") as folder:
        key = Path(folder) / "fleet.key"
        key.write_text(FLEET_KEY)
        with store(Path(folder)) as running:
            print(f"store: {running.version}")
            listen = {"fleet_key": str(key)}
            sections = [{"host": name, "hosts": ["a", "b"], "store": running.address} for name in ("a", "b")]
            with (
                null_appliance(STEP_US, policy=POLICY, audit=True, listen=listen, fleet=sections[0]) as one,
                null_appliance(STEP_US, policy=POLICY, audit=True, listen=listen, fleet=sections[1], like=one) as other,
            ):
                yield Fleet((one, other), running)


@dataclass
class Answers:
    """What two threads for each host got in a while."""

    statuses: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Numbers of answers by host and status."""
    cost: int = 0
    """Billionths of all whole answers, by their own usage."""

    def served(self, *hosts: int) -> int:
        """Answers that were served."""
        return sum(self.statuses[number, 200] for number in hosts)


def ask(fleet: Fleet, tenant: int, hosts: tuple[int, ...], seconds: float, tokens: int = 1) -> Answers:
    """Ask these hosts as fast as they answer, or refuse."""
    found, until, lock = Answers(), time.monotonic() + seconds, threading.Lock()

    def work(number: int) -> None:
        body = {"model": "athanor-mini", "prompt": "Say", "max_tokens": tokens, "ignore_eos": True}
        headers = {"authorization": f"Bearer {fleet.key(tenant)}"}
        with httpx.Client(base_url=fleet.hosts[number].ready["http"], headers=headers, timeout=20) as client:
            while time.monotonic() < until:
                try:
                    answer = client.post("/v1/completions", json=body)
                except httpx.HTTPError:
                    time.sleep(0.1)
                    continue
                with lock:
                    found.statuses[number, answer.status_code] += 1
                    if answer.status_code == 200:
                        found.cost += 500_000 * answer.json()["usage"]["total_tokens"]
                if answer.status_code != 200:
                    time.sleep(0.02)

    threads = [threading.Thread(target=work, args=(number,)) for number in hosts for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_a_rate_is_of_both_hosts(fleet: Fleet) -> None:
    """A tenant that asks one host alone gets more than that host's part, and one that then asks both at once gets, over
    the whole time, what the policy's rate and burst give, and one lease at most. Control: without the parts each host
    would have given as much."""
    began = time.monotonic()
    alone = ask(fleet, 0, (0,), 14)
    part = RPM // 2 + 14 * RPM / 60 / 2
    both = ask(fleet, 0, (0, 1), 10)
    seconds = time.monotonic() - began
    whole = alone.served(0) + both.served(0, 1)
    most = RPM + seconds * RPM / 60
    print(
        f"rate {RPM} a minute: {alone.served(0)} on one host in 14 s, its part is {part:.0f}; {whole} on both "
        f"in {seconds:.1f} s, the policy gives {most:.0f}, and one lease is {LEASE}"
    )
    assert alone.served(0) > 1.2 * part
    assert whole <= most + LEASE + ROUNDING
    assert fleet.metric(0, "athanor_fleet_borrowed_total") > 0
    assert fleet.metric(1, "athanor_fleet_lent_total") > 0


def booked(served: Served) -> tuple[int, int, int]:
    """Requests, output tokens and cost of one host's usage book."""
    path = served.state / "audit" / "usage" / "usage.db"
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as book:
        query = "SELECT COALESCE(SUM(requests), 0), COALESCE(SUM(output), 0), COALESCE(SUM(cost), 0) FROM used"
        requests, output, cost = book.execute(query).fetchone()
        return int(requests), int(output), int(cost)


def logged(served: Served) -> tuple[int, int, int]:
    """The same of its audit log."""
    entries = [one for one in written(served.state / "audit") if one["kind"] == "request"]
    return len(entries), *(sum(one[name] for one in entries) for name in ("output_tokens", "cost"))  # type: ignore[return-value]


def exported(served: Served) -> dict[tuple[str, int], dict[str, Any]]:
    """Requests of a host as a collector keeps them: each line by its log and number."""
    line = [sys.executable, "-m", "appliance.operator.cli", "audit", "export", "--form", "entries", "--kind", "request"]
    told = subprocess.run(
        [*line, "--from", str(served.state / "audit")], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert told.returncode == 0, told.stderr
    return {(one["log"], one["n"]): one for one in map(json.loads, told.stdout.splitlines())}


def settle(check: Callable[[], bool], what: Callable[[], Any]) -> None:
    """Wait until something holds."""
    until = time.monotonic() + 30
    while not check():
        assert time.monotonic() < until, what()
        time.sleep(0.2)


def test_a_budget_is_of_both_hosts_over_kills(fleet: Fleet) -> None:
    """A tenant spends at one host until that is refused, over a kill -9 of each gateway, and then at the other: both
    give no more than its budget, to the billionth, by the answers and by both books, and most of it at the first. Usage
    equals the audit log on both hosts, and no request is in both."""
    spent = ask(fleet, 1, (0,), 6, tokens=30).cost
    fleet.kill_gateway(0)
    spent += ask(fleet, 1, (0,), 4, tokens=30).cost
    fleet.kill_gateway(1)
    last = ask(fleet, 1, (0,), 8, tokens=30)
    spent += last.cost
    assert last.statuses[0, 429], "the budget is not used up"
    first = spent
    rest = ask(fleet, 1, (1,), 4, tokens=30)
    spent += rest.cost
    hosts = fleet.hosts
    settle(lambda: all(booked(one) == logged(one) for one in hosts), lambda: [booked(one) for one in hosts])
    ids = Counter(
        entry["request"] for one in fleet.hosts for entry in written(one.state / "audit") if entry["kind"] == "request"
    )
    assert max(ids.values()) == 1
    collected = {**exported(hosts[0]), **exported(hosts[1]), **exported(hosts[0])}  # The first host's came twice.
    sums = len(collected), *(sum(one[name] for one in collected.values()) for name in ("output_tokens", "cost"))
    assert sums == tuple(map(sum, zip(*map(booked, hosts), strict=True)))
    tenant = TENANTS[1]
    charged = sum(
        entry["cost"]
        for one in fleet.hosts
        for entry in written(one.state / "audit")
        if entry["kind"] == "request" and entry["tenant"] == tenant
    )
    print(f"budget {BUDGET}: {first} at one host, {spent} at both by the answers, {charged} by both logs")
    assert spent <= charged <= BUDGET
    assert first > 0.6 * BUDGET


async def overwrite(fleet: Fleet, stop: threading.Event) -> None:
    """Put what no host has written in place of every value, as fast as the store takes it."""
    known = Store(FleetConfig(host="a", hosts=("a", "b"), store=fleet.store.address))
    keys = [f"athanor:limits:{Sealer(bytes.fromhex(FLEET_KEY)).fleet}:{host}".encode() for host in ("a", "b")]
    (value, other) = await known.exchange(b"none", b"", keys)
    assert value is not None and other is not None, "these are not the keys of the hosts"
    while not stop.is_set():
        for key in keys:
            await known.exchange(key, b"x" * 200, [])


def test_without_its_store_each_host_has_its_part(fleet: Fleet) -> None:
    """A store whose values are all overwritten lends nothing and is told; one that is gone likewise. Both hosts serve
    on, each its own part and no more."""
    stop = threading.Event()
    liar = threading.Thread(target=lambda: asyncio.run(overwrite(fleet, stop)))
    liar.start()
    try:
        settle(lambda: fleet.metric(0, "athanor_fleet_refused_values_total") > 0, lambda: "no value was refused")
    finally:
        stop.set()
        liar.join()
    fleet.store.process.kill()
    settle(lambda: all(fleet.metric(one, "athanor_fleet_store_away") == 1 for one in (0, 1)), lambda: "nobody noticed")
    began = time.monotonic()
    found = ask(fleet, 0, (0, 1), 8)
    seconds = time.monotonic() - began
    for number in (0, 1):
        # What it had left from before, its part at most, and what that gains meanwhile.
        gained = seconds * RPM / 120
        assert gained - 2 <= found.served(number) <= RPM // 2 + gained + 1
