"""Everything of the supervisor that keeps tenants' KV outside of engines: keyring, store, and a port for each engine.

Whose blocks may be kept is told by the gateway from the policy (``Retention``); until it has been told, nobody's are.
A gateway that was taken over could have a tenant's KV kept that should not be; it reads that tenant's prompts anyway.
"""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from appliance.config import ApplianceConfig
from appliance.errors import StartError
from appliance.supervisor.namespaces import Namespace
from appliance.supervisor.spill_port import ModelName, SpillPort
from appliance.supervisor.spill_store import SpillFigures, SpillLimits, SpillStore
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


class Vault:
    """Made once a run. ``owner`` is called from the ports' threads, ``shred`` and ``close`` block."""

    def __init__(self, keyring: Keyring, store: SpillStore, namespace: Namespace) -> None:
        self._keyring = keyring
        self._store = store
        self._namespace = namespace
        self._kept: set[str] = set()
        self._ports: set[SpillPort] = set()

    @property
    def figures(self) -> SpillFigures:
        """What became of blocks so far."""
        return self._store.figures

    def owner(self, key: bytes) -> str | None:
        """Whose namespace key this is, if that tenant's blocks may be kept."""
        tenant = self._namespace.owner(key)
        return tenant if tenant in self._kept else None

    def serve(self, channel: Channel, model: ModelName, name: str) -> SpillPort:
        """Begin to serve an engine; the port owns the channel."""
        port = SpillPort(channel, model, self._store, self.owner, name)
        self._ports.add(port)
        port.start()
        return port

    def end(self, port: SpillPort) -> None:
        """An engine is gone: forget what it sent. Blocks for a moment."""
        self._ports.discard(port)
        port.close()

    def set_retention(self, kept: dict[str, int]) -> None:
        """Note of some tenants whether their blocks may be kept; what was kept of one who wants that no more is
        forgotten, here and in the engines."""
        for tenant, wanted in kept.items():
            if wanted:
                self._kept.add(tenant)
            elif tenant in self._kept:
                self._kept.discard(tenant)
                self._store.drop_tenant(tenant)
                self._forget(self._namespace.key(tenant))

    def renew(self, tenant: str) -> str | None:
        """Give the tenant another namespace key, which is returned in hex, and have the engines forget the old one;
        None when it has none."""
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
        return Shredded(self._store.shred(tenant), had_key)

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
        """Forget everything and let go of the keyring. Blocks."""
        for port in tuple(self._ports):
            self.end(port)
        self._store.close()
        self._keyring.close()

    def _forget(self, key: bytes | None) -> None:
        if key is not None:
            for port in self._ports:
                port.forget(key)


def open_vault(config: ApplianceConfig, namespace: Namespace) -> Vault | None:
    """The vault that the configuration asks for, if it does.

    Raises:
        StartError: keys or folders cannot be used.
    """
    spill, keys = config.sandbox.spill, config.keys
    if spill is None:
        return None
    assert keys is not None, "the configuration was checked"
    try:
        keyring = Keyring(keys.keyring, read_root(keys.root_key))
    except KeysError as error:
        raise StartError(str(error)) from error
    try:
        store = SpillStore(SpillLimits(spill.memory, spill.disk, spill.directory), keyring)
    except OSError as error:
        keyring.close()
        raise StartError(f"cannot use the spill directory {spill.directory}: {error.strerror}") from error
    log.info("KV spills", memory=spill.memory, disk=spill.disk)
    return Vault(keyring, store, namespace)
