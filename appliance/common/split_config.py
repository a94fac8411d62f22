"""Section ``split`` of the configuration: whether this host computes prompts for others of its fleet, or has others
compute its own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from appliance.common.addresses import split_address
from appliance.common.config_section import Section
from appliance.common.fleet_config import HostName
from appliance.common.listen_config import TlsConfig

MAX_PEERS = 64
"""Most hosts of one kind that a host knows: each has its own connections and counts."""

MAX_IDENTITY_CHARS = 2_048
"""Longest SPIFFE id, by its specification."""

_IDENTITY = re.compile(r"spiffe://[a-z0-9._-]{1,255}(?:/[A-Za-z0-9._-]+)+")


def _identity(value: str) -> str:
    if len(value) > MAX_IDENTITY_CHARS or not _IDENTITY.fullmatch(value):
        raise ValueError(f"{value!r} is no identity of a host: write spiffe://TRUST-DOMAIN/PATH")
    return value


HostIdentity = Annotated[str, AfterValidator(_identity)]
"""SPIFFE id that a host's certificate has as its one URI."""


class PrefillHost(Section):
    """Hosts that compute prompts for this one, a list with one entry for each."""

    host: HostName
    """Name of the host, in metrics and in the audit log."""
    address: str
    """HOST:PORT of its `split.listen`. A router's header x-prefiller-host-port names it so."""
    identity: HostIdentity
    """SPIFFE id of its certificate. Another one is refused, whatever authority has signed it."""

    @model_validator(mode="after")
    def _checked(self) -> Self:
        split_address(self.address)
        return self


class SplitTlsConfig(Section):
    """Certificate of this host towards other hosts, as server and as client. The files are read again when they
    change."""

    certificate: Path = Field(strict=False)
    """PEM file of this host's certificate, with its chain. Its one URI is the host's SPIFFE id."""
    key: Path = Field(strict=False)
    """PEM file of the certificate's private key."""
    ca: Path = Field(strict=False)
    """PEM file of the authorities that sign the hosts' certificates. Use an authority that signs no tenant's."""

    @property
    def files(self) -> TlsConfig:
        """The files as a port has them; a caller without a certificate ends in the handshake."""
        return TlsConfig(
            certificate=self.certificate,
            key=self.key,
            client_ca=self.ca,
            grpc_clients="required",
            http_clients="required",
        )


class SplitConfig(Section):
    """Prompts that one host computes and another continues (docs/fleet.md). Both hosts are members of `kv_store`, and
    tenants need `kv_fleet: true` in the policy."""

    role: Literal["mixed", "prefill", "decode"] = "mixed"
    """What this host does. mixed: computes its own requests whole. prefill: computes prompts for the hosts of
    `decode_hosts` too. decode: has long prompts computed by a host of `prefill_hosts`, where that answers in time."""
    listen: str | None = None
    """HOST:PORT on which a host with `role: prefill` takes prompts of other hosts, over TLS alone."""
    tls: SplitTlsConfig | None = None
    """Certificates between hosts. Needed by the roles prefill and decode."""
    prefill_hosts: tuple[PrefillHost, ...] = Field(default=(), max_length=MAX_PEERS, strict=False)
    """Hosts that compute prompts for this one."""
    decode_hosts: tuple[HostIdentity, ...] = Field(default=(), max_length=MAX_PEERS, strict=False)
    """SPIFFE ids of the hosts for which this one computes prompts. Others are refused."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.role != "mixed" and self.tls is None:
            raise ValueError(f"role {self.role} needs tls: hosts prove to each other who they are by certificates")
        if self.role == "prefill" and not (self.listen and self.decode_hosts):
            raise ValueError("role prefill needs listen, and decode_hosts: the hosts for which it computes prompts")
        if self.role == "decode" and not self.prefill_hosts:
            raise ValueError("role decode needs prefill_hosts: the hosts that compute its prompts")
        if self.listen is not None:
            split_address(self.listen)
        for what in ("host", "address", "identity"):
            named = [getattr(one, what) for one in self.prefill_hosts]
            if len({*named}) != len(named):
                raise ValueError(f"two of prefill_hosts have one {what}")
        return self
