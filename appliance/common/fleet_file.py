"""The hosts of a fleet, as the operator lists them in a file: ``athanor fleet`` asks their admin listeners."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, field_validator, model_validator

from appliance.common.addresses import is_loopback
from appliance.common.config_section import Section
from appliance.common.config_text import ConfigText, Place
from appliance.common.errors import ConfigError, os_errors_as
from policy.positions import dotted
from policy.wording import worded

MAX_HOSTS = 256
"""Hosts of one file: each is asked over a connection of its own."""


class FleetTls(Section):
    """Certificates for the hosts' admin addresses that begin with https."""

    ca: Path = Field(strict=False)
    """PEM file of the authorities that sign the hosts' certificates; the machine's own ones are not trusted."""
    certificate: Path = Field(strict=False)
    """PEM file of the operator's certificate, which the hosts ask for."""
    key: Path = Field(strict=False)
    """PEM file of its private key."""


class FleetHost(Section):
    """One host."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.-]{0,62}$")
    """Its name in tables and on the command line."""
    admin: str
    """Its admin listener: unix:PATH, http://HOST:PORT on loopback (a tunnel), or https://HOST:PORT."""

    @field_validator("admin")
    @classmethod
    def _address(cls, value: str) -> str:
        if value.startswith("unix:") and value != "unix:":
            return value
        parts = urlsplit(value)
        try:
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        if parts.scheme not in ("http", "https") or not host or port is None or parts.path not in ("", "/"):
            raise ValueError(f"{value!r} is no admin address: unix:PATH, http://HOST:PORT or https://HOST:PORT")
        if parts.scheme == "http" and not is_loopback(host):
            raise ValueError(
                f"{value} is not on loopback: beyond it the operator is known by a certificate, over https"
            )
        return value


class Fleet(Section):
    """The file."""

    hosts: tuple[FleetHost, ...] = Field(min_length=1, max_length=MAX_HOSTS, strict=False)
    tls: FleetTls | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if len({host.name for host in self.hosts}) != len(self.hosts):
            raise ValueError("two hosts have one name")
        if self.tls is None and any(host.admin.startswith("https:") for host in self.hosts):
            raise ValueError("an admin address begins with https, and there is no section tls to prove the operator")
        return self

    def context(self) -> ssl.SSLContext | None:
        """Return what connects to hosts over TLS; None where no section says how.

        Raises:
            ConfigError: a file cannot be used.
        """
        if self.tls is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            context.load_verify_locations(self.tls.ca)
            context.load_cert_chain(self.tls.certificate, self.tls.key)
        except ssl.SSLError as error:
            raise ConfigError(f"the section tls of the fleet's file names no usable certificates: {error}") from None
        except OSError:
            for path in (self.tls.ca, self.tls.certificate, self.tls.key):
                with os_errors_as(f"cannot read {path}"):
                    path.read_bytes()
            raise
        return context


def read_fleet(path: Path) -> Fleet:
    """Read the list of hosts; relative paths are taken from the file's folder.

    Raises:
        ConfigError: it cannot be read, or says what cannot be; a line for each problem, with its place.
    """
    text = ConfigText(path)
    try:
        found = Fleet.model_validate(text.values)
    except ValidationError as error:
        raise ConfigError(
            "\n".join(_line(text, tuple(item["loc"]), worded(item, ())) for item in error.errors())
        ) from None
    hosts = tuple(
        host.model_copy(update={"admin": f"unix:{path.parent / host.admin.removeprefix('unix:')}"})
        if host.admin.startswith("unix:")
        else host
        for host in found.hosts
    )
    return found.anchored(path.parent).model_copy(update={"hosts": hosts})


def _line(text: ConfigText, where: Place, said: str) -> str:
    known = where
    while known and not text.has(known):
        known = known[:-1]
    name = f"{dotted(where)}: " if where else ""
    return f"{text.place(known)}: {name}{said.removeprefix('Value error, ')}"
