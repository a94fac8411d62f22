"""Section ``kv_store`` of the configuration: the store outside of this machine for sealed KV, and the way to it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from appliance.common.addresses import split_address
from appliance.common.carrier_wire import MAX_SECONDS
from appliance.common.config_section import BYTES, SECONDS, Section
from appliance.common.fleet_config import HostName

CARRIER_SOCKET = "carrier.sock"
"""Name of the carrier's socket in the run directory, where the launcher starts it."""


class MembersConfig(Section):
    """List of the hosts among which keys for sealed KV may be given, and this host's place in it (docs/fleet.md).
    The supervisor checks the list at its start, and refuses to start with one that it cannot accept."""

    host: HostName
    """Name of this host in the list."""
    file: Path = Field(strict=False)
    """File of the signed list, as `athanor fleet sign-members` writes it."""
    authority: str = Field(pattern=r"^[0-9a-f]{64}$")
    """Public key, in hex, of the fleet's authority, which must have signed the list."""
    key: Path = Field(strict=False)
    """File of this host's keys (`athanor fleet member-key`), readable for the supervisor's user; under systemd a
    credential."""
    accepted: Path = Field(strict=False)
    """File in which the supervisor records the newest list that it has accepted; it refuses an older one. Keep it out
    of backups that are put back."""
    write: Literal["when_evicted", "when_computed"] = "when_evicted"
    """When this host writes a block that the fleet shares: when it leaves its engine because memory is short, or, of
    prompts, as soon as it is computed, so that another host can take over a prompt while it is computed here."""


class KvStoreConfig(Section):
    """Store outside of this machine for sealed KV blocks that find no place in memory and on disk
    (docs/retention-and-spill.md). It need not be trusted. Tenants whose blocks may go there have `kv_export: true` in
    the policy. The section `sandbox: spill` is needed."""

    store: str
    """HOST:PORT, or unix:PATH, of a Valkey or Redis."""
    size: Annotated[int, Field(ge=1 << 20), BYTES]
    """Most bytes of blocks in the store, of this host; with `members` half are for blocks that the fleet shares. The
    store's own `maxmemory` must leave room for it."""
    ttl: Annotated[int, Field(ge=60, le=MAX_SECONDS), SECONDS] = 3_600
    """Time after which the store forgets a block, counted from when it was written."""
    store_ca: Path | None = Field(default=None, strict=False)
    """File of the authorities that sign the store's certificate. Left out: no TLS."""
    store_certificate: Path | None = Field(default=None, strict=False)
    """File of the certificate that the carrier shows, with its chain. Left out: none."""
    store_key: Path | None = Field(default=None, strict=False)
    """File of that certificate's key, readable for the carrier's user; it goes together with `store_certificate`."""
    store_user: str = Field(default="", pattern=r"^[!-~]{0,128}$")
    """User of the store that the password is of. Empty: its default one."""
    store_password: Path | None = Field(default=None, strict=False)
    """File of the store's password, readable for the carrier's user; under systemd a credential. Left out: none."""
    socket: Path | None = Field(default=None, strict=False)
    """Socket of athanor-carrier.service. Left out: `athanor serve` starts a carrier, with `carrier.sock` in run_dir."""

    members: MembersConfig | None = None
    """Hosts that share the KV of tenants with `kv_fleet: true` in the policy. Without this section this host gives and
    takes none."""

    @property
    def socket_path(self) -> str:
        """Path of the store's Unix socket; empty where it has an address."""
        return self.store.removeprefix("unix:") if self.store.startswith("unix:") else ""

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the store."""
        return split_address(self.store)

    @model_validator(mode="after")
    def _checked(self) -> Self:
        if not self.socket_path:
            split_address(self.store)
        if self.store_ca is not None and self.socket_path:
            raise ValueError("store_ca is for a store at HOST:PORT, and store is a Unix socket")
        if (self.store_certificate is None) != (self.store_key is None):
            raise ValueError("store_certificate and store_key go together")
        if self.store_certificate is not None and self.store_ca is None:
            raise ValueError("store_certificate is shown over TLS, which store_ca turns on")
        return self

    def anchored(self, folder: Path) -> Self:
        """Copy with every relative path taken from ``folder``, that of the store's socket included."""
        moved = super().anchored(folder)
        return moved.model_copy(update={"store": f"unix:{folder / self.socket_path}"}) if self.socket_path else moved


def carrier_socket(config: KvStoreConfig, run_dir: Path) -> Path:
    """Return the carrier's socket: the configuration's, else that of the launcher's child."""
    return run_dir / CARRIER_SOCKET if config.socket is None else config.socket
