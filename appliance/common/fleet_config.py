"""Section ``fleet`` of the configuration: the hosts whose limits are one, and the store by which they lend."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from appliance.common.addresses import split_address
from appliance.common.config_section import Section

HostName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]

MAX_HOSTS = 16
"""Hosts that share limits: each answers each, and an answer to all fits one message."""


class FleetConfig(Section):
    """Hosts that share the policy's limits of rate, concurrency and spend (docs/fleet.md)."""

    host: HostName
    """Name of this host, one of `hosts`."""
    hosts: Annotated[tuple[HostName, ...], Field(min_length=2, max_length=MAX_HOSTS, strict=False)]
    """Names of all hosts, alike on each. Each has its part of every limit: as much as there are hosts."""
    store: str = ""
    """HOST:PORT, or unix:PATH, of a Valkey or Redis by which hosts lend each other what they do not use. It need not be
    trusted. Empty: none, and each host has its part alone."""
    store_ca: Path | None = Field(default=None, strict=False)
    """File of the authorities that sign the store's certificate. Left out: no TLS."""
    store_user: str = Field(default="", pattern=r"^[!-~]{0,128}$")
    """User of the store that the password is of. Empty: its default one."""
    store_password: Path | None = Field(default=None, strict=False)
    """File of the store's password, readable for the gateway's user. Left out: none."""

    @property
    def socket_path(self) -> str:
        """Path of the store's Unix socket; empty where it has an address."""
        return self.store.removeprefix("unix:") if self.store.startswith("unix:") else ""

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the store."""
        return split_address(self.store)

    @property
    def peers(self) -> tuple[str, ...]:
        """All hosts but this one, in their order."""
        return tuple(name for name in self.hosts if name != self.host)

    @model_validator(mode="after")
    def _checked(self) -> Self:
        if self.host not in self.hosts:
            raise ValueError(f"host {self.host} is none of hosts: name this host as all others name it")
        if len({*self.hosts}) != len(self.hosts):
            raise ValueError("two of hosts have one name")
        if self.store and not self.socket_path:
            split_address(self.store)
        if self.store_ca is not None and self.socket_path:
            raise ValueError("store_ca is for a store at HOST:PORT, and store is a Unix socket")
        if not self.store and (self.store_ca or self.store_password or self.store_user):
            raise ValueError("store_ca, store_user and store_password are of a store, and there is none")
        return self

    def anchored(self, folder: Path) -> Self:
        """Copy with every relative path taken from ``folder``, that of the store's socket included."""
        moved = super().anchored(folder)
        return moved.model_copy(update={"store": f"unix:{folder / self.socket_path}"}) if self.socket_path else moved
