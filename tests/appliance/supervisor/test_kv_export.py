"""What the audit log and the gateway are told of the store outside: who may use it, and whether it serves."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from appliance.common.audit.entry import Entry
from appliance.common.carrier_wire import ObjectStatus
from appliance.common.control import LEAVES, SpillState
from appliance.common.kv_store_state import STORE_STATE, KvStoreState
from appliance.gateway.watch.gauges import SpillGauges
from appliance.supervisor import kv_carrier
from appliance.supervisor.kv_carrier import KvCarrier
from appliance.supervisor.namespaces import Namespace
from appliance.supervisor.spill_service import Vault
from appliance.supervisor.spill_store import SpillStore
from appliance.supervisor.spill_tiers import SpillLimits
from isolation.keys.keyring import Keyring
from isolation.keys.seal import OVERHEAD_BYTES, Binding
from tests.appliance.carrier.carrying import carrier
from tests.stores import store

SIZE = 64
LIMITS = SpillLimits(SIZE + OVERHEAD_BYTES, store=1 << 20, store_seconds=60)


@pytest.fixture
def keyring(tmp_path: Path) -> Iterator[Keyring]:
    """A keyring of its own."""
    ring = Keyring(tmp_path / "keys", os.urandom(32))
    yield ring
    ring.close()


def vault_of(keyring: Keyring, way: KvCarrier | None) -> tuple[Vault, SpillStore, list[Entry]]:
    """A vault before a carrier, its store, and what it tells the audit log."""
    leaving, told = set[str](), list[Entry]()
    kept = SpillStore(LIMITS, keyring, way, leaving.__contains__)
    vault = Vault(keyring, kept, Namespace(), leaving, way)
    vault.on_export = told.append
    return vault, kept, told


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait for what other processes do."""
    until = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_who_may_leave_is_in_the_audit_log(keyring: Keyring, tmp_path: Path) -> None:
    """An entry says when the policy allows a tenant and when it withdraws that, by either key, and nothing where
    nothing changes. Control: without a store nothing is told, for nothing leaves."""
    way = KvCarrier(tmp_path / "nobody", 60)
    vault, _, told = vault_of(keyring, way)
    for kept in ({"alpha": LEAVES, "beta": 1, "gamma": LEAVES}, {"alpha": LEAVES, "beta": 1}, {"alpha": 1, "gamma": 0}):
        vault.set_retention(kept)
    assert [(one.kind, *one.fields.values()) for one in told] == [
        ("kv_export", "allowed", "alpha", 0),
        ("kv_export", "allowed", "gamma", 0),
        ("kv_export", "withdrawn", "alpha", 0),
        ("kv_export", "withdrawn", "gamma", 0),
    ]
    way.close()
    vault, _, told = vault_of(keyring, None)
    vault.set_retention({"alpha": LEAVES})
    assert told == [] and vault.figures[STORE_STATE] == KvStoreState.NONE


def test_the_gateway_is_told_whether_the_store_serves(keyring: Keyring, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any traffic: no carrier, a store that serves, one that refuses a user's command or is full, and one that
    is gone each give their state, which the gateway's gauge takes; a withdrawal counts the blocks that it drops."""
    monkeypatch.setattr(kv_carrier, "PROBE_S", 0.1)
    monkeypatch.setattr(kv_carrier, "RETRY_S", 0.1)
    monkeypatch.setattr(kv_carrier, "REFUSED_S", 1.0)
    gauges = SpillGauges()
    with tempfile.TemporaryDirectory(prefix="kv-", dir="/tmp") as name:
        folder = Path(name)
        way = KvCarrier(folder / "c", 60)
        vault, kept, told = vault_of(keyring, way)

        def wait_for(state: KvStoreState) -> None:
            wait_until(lambda: vault.figures[STORE_STATE] == state)
            gauges.take(SpillState(vault.figures))
            assert gauges.store_state is state
            levels = {
                one.labels["reason"]: one.value
                for one in gauges.levels(lambda *_, **__: None)
                if "reason" in one.labels
            }
            assert sum(levels.values()) == (state is not KvStoreState.SERVES) and len(levels) == 3

        wait_for(KvStoreState.CARRIER_AWAY)
        with store(folder, "--maxmemory", "3mb") as running, carrier(folder / "c", running.address):
            wait_for(KvStoreState.SERVES)
            vault.set_retention({"alpha": LEAVES})
            for number in range(4):
                kept.put(Binding("alpha", "00", number.to_bytes(16, "little"), b"epoch"), bytes(SIZE))
            wait_until(lambda: vault.figures["stored"] == 3)
            vault.set_retention({"alpha": 1})
            assert told[-1].fields == {"what": "withdrawn", "tenant": "alpha", "count": 3}
            full: list[ObjectStatus] = []
            for number in range(2):
                assert way.offer(bytes([number]) * 32, memoryview(bytes(3 << 20)), full.append, owner=str(number))
            wait_for(KvStoreState.REFUSES)
            wait_for(KvStoreState.SERVES)
            running.process.kill()
            running.process.wait()
            wait_for(KvStoreState.STORE_AWAY)
        wait_for(KvStoreState.CARRIER_AWAY)
        vault.close()


class EndingPort:
    """A port, in place of a real one with a thread; its engine ends while it is told to forget a namespace."""

    def __init__(self, ports: set[Any]) -> None:
        self.told: list[bytes] = []
        self._ports = ports

    def forget(self, namespace: bytes) -> None:
        """Note it, and leave the ports as ``Vault.end`` does in its thread."""
        self.told.append(namespace)
        self._ports.discard(self)


def test_an_engine_that_ends_meanwhile_keeps_no_policy_from_being_set(keyring: Keyring) -> None:
    """Ports end in threads. One that ends while others are told to forget a tenant stops nothing: all ports that were
    there are told, and the tenant's blocks are kept no more. Control: before, the tenant is the owner of its key."""
    vault, _, _ = vault_of(keyring, None)
    key = bytes.fromhex(vault._namespace.keys(["alpha"])["alpha"])
    ports = [EndingPort(vault._ports) for _ in range(3)]
    vault._ports |= set(ports)  # type: ignore[arg-type]
    vault.set_retention({"alpha": 1})
    assert vault.owner(key) == "alpha"
    vault.set_retention({"alpha": 0})
    assert [one.told for one in ports] == [[key]] * 3 and vault.owner(key) is None
