"""Section ``listen`` of the machine's configuration: addresses, certificates, proxies, and the listeners of tenants."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from appliance.common.addresses import collide, listens_on_loopback, split_address
from appliance.common.config_section import SECONDS, Section
from appliance.common.origins import MAX_ORIGINS, check_origin

MAX_OWN_LISTENERS = 32
"""Most tenants with listeners of their own: each has two sockets and places for connections, and the service manager
keeps one of the two over a restart."""

MAX_SOCKET_PATH = 107
"""Bytes of the path of a Unix socket (unix(7)), without the zero at its end."""

ClientCertificates = Literal["off", "optional", "required"]
"""Whether a port asks its callers for certificates."""


class TlsConfig(Section):
    """Certificates of the HTTP and the gRPC listener."""

    certificate: Path = Field(strict=False)
    """PEM file of the server's certificate, with its chain."""
    key: Path = Field(strict=False)
    """PEM file of the certificate's private key."""
    client_ca: Path | None = Field(default=None, strict=False)
    """PEM file of the authorities that sign client certificates, which grpc_clients and http_clients ask for."""
    grpc_clients: ClientCertificates = "required"
    """Client certificates over gRPC, where there is client_ca. required: of every caller, in the handshake. optional:
    callers without one need a key or a token. off: none is asked for."""
    http_clients: ClientCertificates = "off"
    """Client certificates over HTTP, where there is client_ca. required: callers without one are refused, but for
    /health. optional: callers without one need a key or a token. off: none is asked for."""

    @model_validator(mode="after")
    def _signed(self) -> Self:
        if self.http_clients != "off" and self.client_ca is None:
            raise ValueError("http_clients asks for client certificates, and no client_ca says who signs them")
        return self


class OwnListenConfig(Section):
    """Listeners of their own, a list with one entry for each tenant that has any. They take that tenant's credentials
    alone (docs/identity.md)."""

    tenant: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")
    """The tenant, as the policy names it. Every other tenant's credential is refused here as an unknown one is."""
    http: str | None = None
    """HOST:PORT, or unix:PATH, of the tenant's HTTP API. Left out: there is none of its own."""
    grpc: str | None = None
    """HOST:PORT, or unix:PATH, of the tenant's gRPC API. Left out: there is none of its own."""
    group: str | None = Field(default=None, pattern=r"^[a-zA-Z0-9_][a-zA-Z0-9_.-]{0,31}$")
    """Group of the machine, by name or number, whose members may connect to the tenant's Unix sockets: these belong to
    it, with mode 0660. A Unix socket needs one."""

    @property
    def addresses(self) -> tuple[tuple[Literal["http", "grpc"], str], ...]:
        """The addresses that there are, each with the API at it."""
        both: tuple[tuple[Literal["http", "grpc"], str | None], ...] = (("http", self.http), ("grpc", self.grpc))
        return tuple((name, address) for name, address in both if address is not None)

    @field_validator("http", "grpc")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        if value is None:
            return value
        path = value.removeprefix("unix:")
        if path == value:
            split_address(value)
        elif not path or len(os.fsencode(path)) > MAX_SOCKET_PATH:
            raise ValueError(f"{value!r}: the path of a Unix socket has 1 to {MAX_SOCKET_PATH} bytes")
        return value

    @model_validator(mode="after")
    def _grouped(self) -> Self:
        if not self.addresses:
            raise ValueError(f"the listeners of {self.tenant} have no address; name http or grpc")
        at_socket = any(address.startswith("unix:") for _, address in self.addresses)
        if at_socket and self.group is None:
            raise ValueError(f"group says whose members may use the Unix sockets of {self.tenant}, and there is none")
        if self.group is not None and not at_socket:
            raise ValueError(f"group is for Unix sockets, and {self.tenant} has none")
        return self

    def anchored(self, folder: Path) -> Self:
        """Copy with every relative path of a socket taken from ``folder``."""
        moved: dict[str, str] = {
            name: f"unix:{folder / address.removeprefix('unix:')}"
            for name, address in self.addresses
            if address.startswith("unix:")
        }
        return self.model_copy(update=moved)


class ListenConfig(Section):
    """Addresses on which the appliance listens."""

    http: str = "127.0.0.1:8080"
    """HOST:PORT of the OpenAI API. With port 0 the kernel chooses a free port."""
    grpc: str = "127.0.0.1:8081"
    """HOST:PORT of the gRPC API. With port 0 the kernel chooses a free port."""
    admin: str = "127.0.0.1:8082"
    """HOST:PORT on loopback, or unix:PATH, of the admin listener: status, metrics, traces and the console. It shows the
    figures of all tenants, so it is for the operator alone."""
    metrics: str | None = None
    """HOST:PORT or unix:PATH of a listener that serves metrics and readiness and can change nothing. It speaks plain
    text and shows names and figures of all tenants: beyond loopback it needs a firewall, and metrics_token. Left out:
    metrics are on the admin listener alone."""
    metrics_token: Path | None = Field(default=None, strict=False)
    """File of the token that a scraper of `metrics` must send (`authorization: Bearer TOKEN`): 32 to 512 characters.
    Read at the start. Left out: none is needed."""
    fleet_key: Path | None = Field(default=None, strict=False)
    """File of the key that all hosts of a fleet have (docs/fleet.md), 64 hex digits: answers then have the header
    x-session-affinity, by which a router keeps a session on one host. Read at the start. Left out: there is no such
    header."""
    fleet_hosts: Path | None = Field(default=None, strict=False)
    """List of the fleet's hosts as `athanor fleet` reads it (docs/fleet.md). The gateway asks each for its status while
    somebody looks at the console's page of the fleet, and reads the file anew each time: it must be readable for the
    gateway's user, and so must the certificate that it names. Left out: the page shows this host alone."""
    drain_notice_s: Annotated[float, Field(ge=0, le=30), SECONDS] = 0.0
    """Time between a drain, or a stop, and the first refusal. Readiness is 503 from its beginning, answers end their
    connections, and requests are taken still: longer than a router's health checks need to see it (docs/fleet.md)."""
    tls: TlsConfig | None = None
    """TLS for the HTTP and the gRPC listener. Without this section both speak plain text."""
    trusted_proxies: tuple[str, ...] = Field(default=(), max_length=64, strict=False)
    """Networks (CIDR) of reverse proxies in front of the HTTP and the gRPC listener (docs/proxies.md). They alone are
    believed when they name the address of a client."""
    client_address: Literal["x-forwarded-for", "forwarded", "proxy-protocol"] = "x-forwarded-for"
    """How trusted proxies name a client's address. x-forwarded-for, forwarded: in that header of each request.
    proxy-protocol: version 2 of the PROXY protocol, which each of their connections must begin with."""

    tenants: tuple[OwnListenConfig, ...] = Field(default=(), max_length=MAX_OWN_LISTENERS, strict=False)
    """Listeners of single tenants, beside the two of all."""
    cors_origins: tuple[str, ...] = Field(default=(), max_length=MAX_ORIGINS, strict=False)
    """Origins (SCHEME://HOST or SCHEME://HOST:PORT) of pages that browsers let call the HTTP API (docs/clients.md). A
    page needs a key as any caller does. Left out: none, and no answer mentions origins."""

    @field_validator("cors_origins")
    @classmethod
    def _origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            check_origin(text)
        return value

    @field_validator("trusted_proxies")
    @classmethod
    def _narrow(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            _check_network(text)
        return value

    @model_validator(mode="after")
    def _trusting(self) -> Self:
        if self.client_address != "x-forwarded-for" and not self.trusted_proxies:
            raise ValueError("client_address says how trusted_proxies name a client, and there are none; list them")
        if self.cors_origins and self.tls is not None and self.tls.http_clients == "required":
            raise ValueError("cors_origins is for pages, which cannot show a certificate, and http_clients is required")
        return self

    @field_validator("http", "grpc")
    @classmethod
    def _address(cls, value: str) -> str:
        split_address(value)
        return value

    @field_validator("admin")
    @classmethod
    def _admin_address(cls, value: str) -> str:
        if not listens_on_loopback(value):
            raise ValueError("admin listens on loopback or on unix:PATH only: it shows the figures of all tenants")
        return value

    @field_validator("metrics")
    @classmethod
    def _metrics_address(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith("unix:"):
            split_address(value)
        return value

    @model_validator(mode="after")
    def _apart(self) -> Self:
        for (name, address), (other, its) in combinations(self.addresses(), 2):
            if collide(address, its):
                raise ValueError(f"{name} and {other} name one address, {address}: each listener needs its own")
        if self.metrics_token is not None and self.metrics is None:
            raise ValueError("metrics_token is for the listener metrics, and that one has no address")
        return self

    def addresses(self) -> Iterator[tuple[str, str]]:
        """Every address that there is, with the name of its key."""
        for name in ("http", "grpc", "admin", "metrics"):
            if (address := getattr(self, name)) is not None:
                yield name, address
        for own in self.tenants:
            yield from ((f"tenants.{own.tenant}.{name}", address) for name, address in own.addresses)

    @field_validator("tenants")
    @classmethod
    def _once(cls, value: tuple[OwnListenConfig, ...]) -> tuple[OwnListenConfig, ...]:
        if len({one.tenant for one in value}) != len(value):
            raise ValueError("a tenant has two entries")
        return value

    def anchored(self, folder: Path) -> Self:
        """Copy with every relative path taken from ``folder``, the sockets' included."""
        moved = super().anchored(folder)
        sockets = {
            name: f"unix:{folder / address.removeprefix('unix:')}"
            for name, address in (("admin", moved.admin), ("metrics", moved.metrics))
            if address is not None and address.startswith("unix:")
        }
        return moved.model_copy(update=sockets) if sockets else moved


def _check_network(text: str) -> None:
    """Check a network of proxies.

    Raises:
        ValueError: it is no network, not exactly one, or everybody's.
    """
    try:
        network = ipaddress.ip_network(text, strict=False)
    except ValueError:
        raise ValueError(f"{text!r} is no network; write it as 10.0.0.0/8, 2001:db8::/64 or a single address") from None
    if not network.prefixlen:
        raise ValueError(f"{text} trusts every peer: anybody could name any address; list the proxies' own networks")
    if str(network.network_address) != str(ipaddress.ip_address(text.partition("/")[0])):
        raise ValueError(f"{text} has bits set behind its prefix; {network} is the whole network")
