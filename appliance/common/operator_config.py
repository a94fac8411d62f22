"""Sections of the configuration about operators: ``operator_api``, who may do what on the operator's gRPC socket, and
``remote_operators``, who may do what from other machines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from appliance.common.addresses import collide, split_address
from appliance.common.config_section import Section
from appliance.common.listen_config import ClientCertificates, TlsConfig
from appliance.common.operator_roles import OperatorRole
from appliance.common.token_config import IssuerConfig, check_issuers
from policy.credential_form import checked_credential

MAX_NAMES = 64
"""Most users and groups of one role."""

Account = Annotated[str, Field(pattern=r"^@?[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}\$?$")]
"""User of this machine, or a group behind an ``@``: by name, or by number."""

Accounts = Annotated[tuple[Account, ...], Field(max_length=MAX_NAMES, strict=False)]


class OperatorApiConfig(Section):
    """The operator's gRPC API (docs/admin-api.md) on a Unix socket. Root and the service's own user have every role;
    others have the roles that are listed for them, by user name or number, and by group with an `@` before it."""

    socket: Path | None = Field(default=None, strict=False)
    """The socket; its folder must be open to those who are to connect. Left out: `operator-api.sock` in run_dir."""
    viewers: Accounts = ()
    """Accounts that may read."""
    operators: Accounts = ()
    """Accounts that may drain the appliance and change models and requests, and read."""
    security: Accounts = ()
    """Accounts that may change policy and keys and forget tenants, and read."""


TOKEN, DNS, EMAIL = "oidc:", "dns:", "email:"
"""Beginnings of operators' credentials beside ``spiffe://``: what a token claims, and other names of a certificate."""

_OTHER_NAME = re.compile(r"(?:dns|email):[!-~]{1,253}")


def _checked(value: str) -> str:
    """Return an operator's credential that can be one.

    Raises:
        ValueError: it cannot.
    """
    if value.startswith((DNS, EMAIL)):
        if not _OTHER_NAME.fullmatch(value) or "*" in value:
            raise ValueError(f"{value!r}: the name has 1 to 253 characters without spaces, and no wildcard")
        return value
    if not value.startswith(("spiffe://", TOKEN)):
        raise ValueError(
            f"{value!r}: an operator elsewhere is spiffe://TRUST-DOMAIN/PATH, dns:NAME or email:ADDRESS of a "
            "certificate, or oidc:ISSUER:VALUE of a token"
        )
    return checked_credential(value)


OperatorCredential = Annotated[str, AfterValidator(_checked)]
"""Who an operator on another machine is."""

OperatorCredentials = Annotated[tuple[OperatorCredential, ...], Field(max_length=MAX_NAMES, strict=False)]


class OperatorTlsConfig(Section):
    """Certificates of the listeners for operators elsewhere. The files are read again when they change."""

    certificate: Path = Field(strict=False)
    """PEM file of the server's certificate, with its chain."""
    key: Path = Field(strict=False)
    """PEM file of the certificate's private key."""
    client_ca: Path | None = Field(default=None, strict=False)
    """PEM file of the authorities that sign operators' certificates. Left out: none is asked for, and operators need
    tokens. Use an authority that signs no tenant's certificate."""

    @property
    def files(self) -> TlsConfig:
        """The files as a port of tenants has them; a caller without a certificate needs a token."""
        asked: ClientCertificates = "off" if self.client_ca is None else "optional"
        return TlsConfig(
            certificate=self.certificate, key=self.key, client_ca=self.client_ca, grpc_clients=asked, http_clients=asked
        )


class OperatorIssuerConfig(IssuerConfig):
    """OIDC providers whose tokens (JWT) are operators' credentials, a list with one entry for each. A tenant's token is
    none of these, whatever it claims, unless the audience is the same: name one that no tenant has."""

    role_claim: str = Field(default="sub", min_length=1, max_length=128)
    """Claim with the VALUE of the credential oidc:NAME:VALUE: its exact text, or each text of a list, such as groups.
    The claim sub, which is needed, names the operator in the audit log."""


class RemoteOperatorsConfig(Section):
    """Operators on other machines (docs/admin-api.md): listeners over TLS, whose callers have roles by certificate or
    token. A credential that is listed for no role may do nothing."""

    admin: str | None = None
    """HOST:PORT of the routes of the admin listener, which the gateway serves. Left out: there is none."""
    grpc: str | None = None
    """HOST:PORT of the operator's gRPC API, beside its socket. Needs operator_api. Left out: there is none."""
    tls: OperatorTlsConfig
    """Certificates of both listeners."""
    tokens: tuple[OperatorIssuerConfig, ...] = Field(default=(), max_length=16, strict=False)
    """OIDC providers whose tokens are taken. Without any, tokens are refused."""
    viewers: OperatorCredentials = ()
    """Credentials whose holders may read."""
    operators: OperatorCredentials = ()
    """Credentials whose holders may drain the appliance and change models and requests, and read."""
    security: OperatorCredentials = ()
    """Credentials whose holders may change policy and keys and forget tenants, and read."""

    def addresses(self) -> Iterator[tuple[str, str]]:
        """Every address that there is, with the name of its key."""
        for name, address in (("admin", self.admin), ("grpc", self.grpc)):
            if address is not None:
                yield name, address

    def listed(self) -> Iterator[tuple[OperatorRole, str]]:
        """Every credential, with the role for which it is listed."""
        for role, names in (
            (OperatorRole.VIEWER, self.viewers),
            (OperatorRole.OPERATOR, self.operators),
            (OperatorRole.SECURITY, self.security),
        ):
            yield from ((role, name) for name in names)

    @field_validator("admin", "grpc")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        if value is not None:
            split_address(value)
        return value

    @field_validator("tokens")
    @classmethod
    def _issuers(cls, value: tuple[OperatorIssuerConfig, ...]) -> tuple[OperatorIssuerConfig, ...]:
        check_issuers(value)
        return value

    @model_validator(mode="after")
    def _provable(self) -> Self:
        found = dict(self.addresses())
        if not found:
            raise ValueError("operators elsewhere need an address; name admin or grpc")
        if len(found) > 1 and collide(*found.values()):
            raise ValueError(f"admin and grpc name one address, {self.admin}: each listener needs its own")
        if self.tls.client_ca is None and not self.tokens:
            raise ValueError("nobody can prove who they are; name tls.client_ca, or issuers of tokens")
        issuers = {one.name for one in self.tokens}
        for _, name in self.listed():
            if name.startswith(TOKEN):
                issuer = name.split(":")[1]
                if issuer not in issuers:
                    raise ValueError(f"{name!r} names the issuer {issuer}, which is not in tokens")
            elif self.tls.client_ca is None:
                raise ValueError(f"{name!r} is of a certificate, and tls.client_ca says of no authority who signs them")
        return self
