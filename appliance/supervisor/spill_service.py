"""Tenants' keys and spilled KV on the supervisor's side: keyring, store, and a port for each engine.

Whose blocks may be kept is told by the gateway from the policy (``Retention``); before that no blocks are kept.
A gateway that was taken over could have a tenant's KV kept that should not be; it reads that tenant's prompts anyway.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import structlog

from appliance.common.audit.entry import Entry, entry
from appliance.common.config import ApplianceConfig
from appliance.common.control import LEAVES, SHARED, Control, Namespaces
from appliance.common.errors import SpillPortError, StartError
from appliance.common.kv_store_config import carrier_socket
from appliance.common.kv_store_state import FLEET_SHREDS, FLEET_STATE, STORE_STATE, FleetKeyState, KvStoreState
from appliance.supervisor.fleet_keys.envelopes import check_account
from appliance.supervisor.fleet_keys.keeper import Changes
from appliance.supervisor.fleet_keys.membership import Membership, check_membership
from appliance.supervisor.fleet_share import FleetShare
from appliance.supervisor.kv_carrier import KvCarrier
from appliance.supervisor.namespaces import Namespace
from appliance.supervisor.spill_port import SpillPort
from appliance.supervisor.spill_store import SpillStore
from appliance.supervisor.spill_tiers import SpillLimits
from isolation.ipc.channel import Channel
from isolation.keys.errors import KeysError
from isolation.keys.keyring import Keyring
from isolation.keys.root import read_root

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Shredded:
    """What a shred destroyed."""

    objects: int
    had_key: bool
    ordered: bool = False
    """Whether the key that the fleet has for the tenant ends everywhere; when it has, the audit log says so."""


NO_FLEET = {FLEET_STATE: int(FleetKeyState.NO_MEMBER), FLEET_SHREDS: 0}
"""Figures of a host that is a member of no fleet."""


class Vault:
    """Keyring, store and ports of one supervisor's run. ``owner`` is called from the ports' threads; ``shred`` and
    ``close`` block."""

    def __init__(
        self,
        keyring: Keyring,
        store: SpillStore,
        namespace: Namespace,
        leaving: set[str] | None = None,
        carrier: KvCarrier | None = None,
        fleet: FleetShare | None = None,
    ) -> None:
        """``leaving``: tenants whose blocks may leave this machine, which ``store`` asks and the vault keeps;
        ``carrier``: way of ``store`` to a store outside, if there is one; ``fleet``: what hosts have in common."""
        self._carrier = carrier
        self._fleet = fleet
        self._sharing: set[str] = set()
        """Accounts whose blocks the fleet may use."""
        self.publish: Callable[[Control, tuple[int, ...]], bool] = lambda _message, _fds: False
        """Sends a message to the gateway. Set by the owner."""
        self._keyring = keyring
        self._store = store
        self._namespace = namespace
        self._kept: set[str] = set()
        self._leaving: set[str] = set() if leaving is None else leaving
        self._ports: set[SpillPort] = set()
        self._releasing = False
        """Whether a step that releases what was withdrawn is to come."""
        self.on_export: Callable[[Entry], None] = lambda _one: None
        """Takes an entry for the audit log where the policy changes whose blocks may leave this machine, if any can.
        Set by the owner."""
        self.shred_files: Callable[[str], int] = lambda _tenant: 0
        """Destroys what a tenant keeps beside KV; returns the number of objects. Set by the owner, may block."""

    @property
    def keyring(self) -> Keyring:
        """Keyring of this run, which no other process has open."""
        return self._keyring

    @property
    def figures(self) -> dict[str, int]:
        """Counts of spilled blocks, what is held now, and the state of the store outside, as the gateway takes them."""
        state = KvStoreState.NONE if self._carrier is None else self._carrier.state
        fleet = NO_FLEET if self._fleet is None else self._fleet.figures
        return {**self._store.figures.told(), STORE_STATE: state, **fleet}

    def start(self) -> None:
        """Begin to exchange keys with the fleet, where there is one. To be called in the event loop."""
        if self._fleet is not None:
            self._fleet.on_changes, self._fleet.on_entry = self._take_changes, self.on_export
            self._fleet.on_lost = self._tell_lost
            self._fleet.start()

    def owner(self, key: bytes) -> str | None:
        """Tenant of a namespace key, if that tenant's blocks may be kept."""
        tenant = self._namespace.owner(key)
        return tenant if tenant in self._kept else None

    def serve(
        self,
        channel: Channel,
        model_digest: str,
        name: str,
        backend: Callable[[], bytes] = bytes,
        failed: Callable[[SpillPortError], object] = lambda _error: None,
    ) -> SpillPort:
        """Begin to serve an engine; the port owns the channel. ``failed`` is called from the port's thread when it
        cannot go on, or the engine broke the protocol. ``backend`` gives the digest of what the bits of its KV depend
        on (``fleet_backend``), and is asked where there is a fleet; without one its blocks are not shared.

        Raises:
            SpillPortError: the machine gives no descriptors or no thread. The channel is closed.
        """
        fleet, told = None, b"" if self._fleet is None else backend()
        if self._fleet is not None and told:
            fleet = self._fleet.kv, self._fleet.life(model_digest, told)
        port = SpillPort(channel, model_digest, self._store, self.owner, name, failed, fleet)
        try:
            port.start()
        except SpillPortError:
            port.close()
            raise
        self._ports.add(port)
        for namespace in () if self._fleet is None else self._fleet.namespaces:
            port.share(namespace)
        return port

    def end(self, port: SpillPort, *, suspicious: bool = False) -> None:
        """Forget what an engine that ended has sent. Where it died as none should (``suspicious``), or had broken the
        protocol of its channel, the fleet's keys end under which it had written. Blocks for a moment."""
        self._ports.discard(port)
        port.close()
        if self._fleet is not None and (suspicious or port.broke):
            self._fleet.suspect(sorted(port.shared), port.name)

    def set_retention(self, kept: dict[str, int]) -> None:
        """Set whether tenants' blocks may be kept (1), leave this machine too (``LEAVES``) or be used by the fleet
        (``SHARED``), or none of these (0); those of a tenant that no longer allows it are found no more: outside, or
        everywhere. Blocks that the fleet uses leave by that way alone; without a fleet ``SHARED`` is ``LEAVES``.

        Raises:
            AccountNameError: the fleet is to use blocks under a name that no policy has; nothing has changed.
        """
        self._set_sharing(kept)
        for tenant, wanted in kept.items():
            leaves = wanted >= LEAVES and tenant not in self._sharing
            if leaves and tenant not in self._leaving:
                self._leaving.add(tenant)
                self._note("allowed", tenant, 0)
            elif not leaves and tenant in self._leaving:
                self._leaving.discard(tenant)
                self._note("withdrawn", tenant, self._store.drop_outside(tenant))
            if wanted:
                self._kept.add(tenant)
            elif tenant in self._kept:
                self._kept.discard(tenant)
                self._store.drop_tenant(tenant)
                self._forget(self._namespace.key(tenant))

    def _set_sharing(self, kept: dict[str, int]) -> None:
        """Set whose blocks the fleet may use, and have the store forget what this host wrote of others."""
        if self._fleet is None:
            return
        begin = {tenant for tenant, wanted in kept.items() if wanted == SHARED} - self._sharing
        over = {tenant for tenant, wanted in kept.items() if wanted != SHARED} & self._sharing
        if not (begin or over):
            return
        for tenant in begin:
            check_account(tenant)  # Before anything changes: the next gateway's word must find nothing of it.
        self._sharing = (self._sharing | begin) - over
        counts = {tenant: self._fleet.kv.count(tenant) for tenant in sorted(over)}
        # What was theirs in the store goes with the change of their generations to none.
        self._fleet.share(self._sharing)
        for tenant in sorted(begin):
            self._note("shared", tenant, 0)
        for tenant, count in counts.items():
            self._note("unshared", tenant, count)

    def _tell_lost(self, namespaces: Iterable[bytes]) -> None:
        """Tell engines that other hosts find nothing of what they sent of these namespaces."""
        for port in tuple(self._ports):
            port.lose(namespaces)

    def _take_changes(self, changes: Changes) -> None:
        """Give tenants the namespace keys that follow from their generations, or keys of this host alone; engines and
        stores forget what was computed under those that they had."""
        told = dict[str, str]()
        for account, generation in changes.items():
            old = self._namespace.key(account)
            self._forget(old)
            self._store.drop_tenant(account)
            if generation is not None:
                key = self._namespace.adopt(account, generation.namespace())
                for port in tuple(self._ports):
                    port.share(bytes.fromhex(key))
            elif old is not None:
                key = self._namespace.renew(account)
            if old is not None:
                told[account] = key
        if told:
            self.publish(Namespaces(told), ())
        if not self._releasing:
            self._release()

    def take_retention(self, kept: dict[str, int]) -> None:
        """Put the policy's retention in force (``set_retention``), and release what it withdraws in short steps of the
        event loop, in which it must be called."""
        self.set_retention(kept)
        if not self._releasing:
            self._release()

    def _release(self) -> None:
        self._releasing = self._store.release_some()
        if self._releasing:
            asyncio.get_running_loop().call_soon(self._release)

    def renew(self, tenant: str) -> str | None:
        """Draw another namespace key for the tenant and have the engines forget the old one; gives it in hex, or None
        when the tenant has none."""
        old = self._namespace.key(tenant)
        if old is None:
            return None
        self._forget(old)
        return self._namespace.renew(tenant)

    def shred(self, tenant: str) -> Shredded:
        """Destroy the tenant's key and all that it sealed. Blocks.

        Raises:
            KeysError: it is no tenant's name, or the medium refuses.
        """
        had_key = tenant in self._keyring.tenants()
        ordered = self._fleet is not None and self._fleet.shred(tenant)
        dropped = 0 if self._fleet is None else self._fleet.kv.drop(tenant)
        objects = self._store.shred(tenant)
        return Shredded(objects + dropped + self.shred_files(tenant), had_key, ordered)

    def rotate(self, tenant: str) -> Shredded:
        """Destroy the tenant's key and all that it sealed, and draw another at once. Blocks.

        Raises:
            KeysError: it is no tenant's name, or the medium refuses.
        """
        done = self.shred(tenant)
        self._keyring.rotate(tenant)
        return done

    def rewrap(self, root: bytes) -> int:
        """Wrap all keys under another root key; gives how many. What is sealed stays readable. Blocks.

        Raises:
            KeysError: a key belongs to neither root key, or the medium refuses.
        """
        return self._keyring.rewrap(root)

    def close(self) -> None:
        """Forget everything and close the keyring. Blocks."""
        for port in tuple(self._ports):
            self.end(port)
        if self._fleet is not None:
            self._fleet.close()
        self._store.close()
        self._keyring.close()

    def _note(self, what: str, tenant: str, count: int) -> None:
        if self._carrier is not None:
            self.on_export(entry("kv_export", what=what, tenant=tenant, count=count))

    def _forget(self, key: bytes | None) -> None:
        if key is not None:
            for port in tuple(self._ports):  # Threads end ports meanwhile.
                port.forget(key)


def open_vault(
    config: ApplianceConfig, namespace: Namespace, record: Callable[[Entry], None] = lambda _one: None
) -> Vault | None:
    """Vault that the configuration asks for; None where nothing is sealed. Without spill it keeps no KV. ``record``
    takes an entry for the audit log where this host has accepted the list of a fleet's members.

    Raises:
        StartError: keys or folders cannot be used.
        ConfigError: the list of the fleet's members cannot be accepted.
    """
    spill, keys = config.sandbox.spill, config.keys
    if spill is None and config.batches is None:
        return None
    assert keys is not None, "the configuration was checked"
    membership = None if config.kv_store is None else check_membership(config.kv_store, record)
    try:
        keyring = Keyring(keys.keyring, read_root(keys.root_key))
    except KeysError as error:
        raise StartError(str(error)) from error
    if spill is None:
        return Vault(keyring, SpillStore(SpillLimits(0), keyring), namespace)
    limits = SpillLimits(spill.memory, spill.disk, spill.directory)
    carrier, leaving = None, set[str]()
    if config.kv_store is not None:
        size = config.kv_store.size if membership is None else config.kv_store.size // 2
        limits = replace(limits, store=size, store_seconds=config.kv_store.ttl)
        carrier = KvCarrier(carrier_socket(config.kv_store, config.run_dir), config.kv_store.ttl)
    try:
        store = SpillStore(limits, keyring, carrier, leaving.__contains__)
    except OSError as error:
        keyring.close()
        if carrier is not None:
            carrier.close()
        raise StartError(f"cannot use the spill directory {spill.directory}: {error.strerror}") from error
    log.info("KV spills", memory=spill.memory, disk=spill.disk, store=limits.store)
    return Vault(keyring, store, namespace, leaving, carrier, _fleet_share(config, membership, limits, store))


def _fleet_share(
    config: ApplianceConfig, membership: Membership | None, limits: SpillLimits, store: SpillStore
) -> FleetShare | None:
    """Return this host's part in its fleet, which has half of the store's bytes and ways of its own to the carrier."""
    if membership is None or config.kv_store is None or config.kv_store.members is None:
        return None
    computed = config.kv_store.members.write == "when_computed"
    path, ttl = carrier_socket(config.kv_store, config.run_dir), config.kv_store.ttl
    blocks, keys = KvCarrier(path, ttl, names_recur=True), KvCarrier(path, ttl)
    return FleetShare(membership, blocks, keys, limits, store.figures, writes_computed=computed)
