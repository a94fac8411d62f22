"""A supervisor's part in the KV of its fleet: whose namespace keys follow from generations, and what ends them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.common.audit.entry import Entry
from appliance.common.control import LEAVES, SHARED, Control, Namespaces
from appliance.common.errors import AccountNameError
from appliance.common.kv_store_state import FLEET_SHREDS, FLEET_STATE, FleetKeyState
from appliance.supervisor.fleet_keys import keeper
from appliance.supervisor.fleet_keys.exchange import KeyExchange
from appliance.supervisor.fleet_share import FleetShare
from appliance.supervisor.kv_carrier import KvCarrier
from appliance.supervisor.namespaces import Namespace
from appliance.supervisor.spill_service import Vault
from appliance.supervisor.spill_store import SpillStore
from appliance.supervisor.spill_tiers import SpillFigures, SpillLimits
from isolation.ipc.messages import Role
from isolation.ipc.spill import Forget, Share, mark_of
from isolation.keys.keyring import Keyring
from tests.appliance.supervisor.fleet_keys.fleets import joined
from tests.appliance.supervisor.fleet_keys.test_exchange import OwnedStore
from tests.isolation.ipc.wire import Wire, connect

LIMITS = SpillLimits(1 << 20, store=1 << 20, store_seconds=600)


async def wait_until(holds: Callable[[], bool]) -> None:
    """Wait for what threads do."""
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.02)


def words(wire: Wire) -> list[object]:
    """What an engine was told."""
    return [one for one in wire.guest.receive(64) if isinstance(one, Forget | Share)]


async def test_a_generation_is_a_namespace_and_ends_with_a_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the key server: a tenant that shares gets a namespace key of its generation, its engine is told to forget the
    old one and that others may have blocks of the new, and the gateway is told. A tenant whose KV only leaves the
    machine keeps its key. After the engine died as none should, or a shred, the tenant has another one; when the policy
    withdraws its word it has a key of this host alone. The audit log has each of these."""
    monkeypatch.setattr(keeper, "LOOK_S", 0.05)
    keyring, way = Keyring(tmp_path / "keys", os.urandom(32)), KvCarrier(tmp_path / "nobody", 60)
    store, namespace = SpillStore(LIMITS, keyring), Namespace()
    fleet = FleetShare(
        joined(tmp_path)[0],
        KvCarrier(tmp_path / "nobody", 60),
        KvCarrier(tmp_path / "nobody", 60),
        LIMITS,
        store.figures,
    )
    vault = Vault(keyring, store, namespace, set(), way, fleet)
    told, entries = list[Control](), list[Entry]()
    vault.publish, vault.on_export = lambda message, _fds: not told.append(message), entries.append
    assert vault.figures[FLEET_STATE] == FleetKeyState.NONE_HELD
    vault.start()
    wire = connect(Role.SPILL)
    try:
        assert vault.figures[FLEET_STATE] == FleetKeyState.HELD, "a host has the fleet's key while no tenant shares"
        first = {name: bytes.fromhex(key) for name, key in namespace.keys(["alpha", "beta"]).items()}
        port = vault.serve(wire.host, "00" * 32, "engine", backend=lambda: b"b" * 32)
        vault.set_retention({"alpha": SHARED, "beta": LEAVES})
        await wait_until(lambda: namespace.key("alpha") != first["alpha"])
        shared = namespace.key("alpha")
        assert shared is not None and fleet.namespaces == [shared] and namespace.key("beta") == first["beta"]
        assert told == [Namespaces({"alpha": shared.hex()})] and vault.owner(first["alpha"]) is None
        heard, share = list[object](), Share(mark_of(shared), lasts_s=fleet.kv.lasts_s)
        await wait_until(lambda: not heard.extend(words(wire)) and heard == [Forget(mark_of(first["alpha"])), share])
        assert (vault.figures[FLEET_STATE], vault.figures[FLEET_SHREDS]) == (FleetKeyState.HELD, 0)

        port.shared.add("alpha")
        await asyncio.to_thread(vault.end, port, suspicious=True)
        assert shared not in fleet.namespaces
        await wait_until(lambda: fleet.namespaces == [namespace.key("alpha")])
        second = namespace.key("alpha")
        assert second != shared and vault.figures[FLEET_SHREDS] == 1
        done = await asyncio.to_thread(vault.shred, "alpha")
        assert done.ordered and not (await asyncio.to_thread(vault.shred, "beta")).ordered
        await wait_until(lambda: namespace.key("alpha") not in (shared, second, None))
        vault.set_retention({"alpha": LEAVES})
        await wait_until(lambda: fleet.namespaces == [] and len(told) == 4)
        assert [one.fields["what"] for one in entries if one.fields["tenant"] == "alpha"] == [
            *("shared", "suspected", "unshared", "allowed")
        ]
    finally:
        await asyncio.to_thread(vault.close)
        keyring.close()
        wire.guest.close()
        wire.raw.close()


def test_a_name_that_no_policy_has_leaves_nothing_behind(tmp_path: Path) -> None:
    """A gateway that was taken over has the fleet use blocks under a name that no envelope carries: a typed error, by
    which it is dropped, and nothing has changed. What the next gateway says holds (control)."""
    keyring = Keyring(tmp_path / "keys", os.urandom(32))
    store = SpillStore(LIMITS, keyring)
    fleet = FleetShare(
        joined(tmp_path)[0],
        KvCarrier(tmp_path / "nobody", 60),
        KvCarrier(tmp_path / "nobody", 60),
        LIMITS,
        store.figures,
    )
    vault = Vault(keyring, store, Namespace(), set(), KvCarrier(tmp_path / "nobody", 60), fleet)
    entries = list[Entry]()
    vault.on_export = entries.append
    try:
        with pytest.raises(AccountNameError):
            vault.set_retention({"alpha": SHARED, "gr\u00fcn": SHARED, "beta": LEAVES})
        assert entries == []
        vault.set_retention({"alpha": SHARED, "beta": LEAVES})
        assert [(one.fields["what"], one.fields["tenant"]) for one in entries] == [
            ("shared", "alpha"),
            ("allowed", "beta"),
        ]
    finally:
        vault.close()
        keyring.close()


@pytest.mark.parametrize("there", [True, False])
async def test_keys_wait_for_no_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    """The way on which engines ask for blocks, and send some, does not serve: the host gets the fleet's keys all the
    same, by a way of their own. Control: where that does not serve either, it gets none."""
    for name in ("LOOK_S", "TURN_S"):
        monkeypatch.setattr(keeper, name, 0.02)
    server, member, *_ = joined(tmp_path)
    keys = OwnedStore()
    blocks, figures = KvCarrier(tmp_path / "nobody", 60), SpillFigures()
    fleet = FleetShare(member, blocks, keys if there else blocks, LIMITS, figures)  # type: ignore[arg-type]
    exchange = KeyExchange(server, keys)
    exchange.share(())
    fleet.start()
    try:
        for _ in range(100):
            await asyncio.to_thread(exchange.turn)
            await asyncio.sleep(0.02)
            if fleet.figures[FLEET_STATE] == FleetKeyState.HELD:
                break
        assert (fleet.figures[FLEET_STATE] == FleetKeyState.HELD) is there
    finally:
        await asyncio.to_thread(fleet.close)
