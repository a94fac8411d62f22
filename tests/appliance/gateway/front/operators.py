"""Operators on other machines, for tests: certificates of an authority of their own, and a provider with real keys
behind a real https address."""

from __future__ import annotations

import contextlib
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography import x509

from appliance.common.operator_config import RemoteOperatorsConfig
from appliance.common.operator_roles import OperatorRole
from tests.appliance.gateway.front.issuers import AUDIENCE, ISSUER, Address, Provider, published
from tests.appliance.gateway.front.pki import Authority, Pki

SPIFFE = "spiffe://corp.example/ops/"
"""Beginning of the id in the certificate of each role's holder."""

GROUP = "ops-"
"""Beginning of the group in the token of each role's holder."""


@dataclass
class Elsewhere:
    """What operators on other machines have, and the section of the configuration that knows them."""

    folder: Path
    pki: Pki
    provider: Provider
    address: Address
    section: RemoteOperatorsConfig
    authority: Authority = field(default_factory=lambda: Authority.create("operators"))

    def shown(self, *names: x509.GeneralName, authority: Authority | None = None) -> tuple[bytes, bytes]:
        """Key and certificate with these names."""
        return (authority or self.authority).issue(*names)

    def of_role(self, role: str) -> tuple[bytes, bytes]:
        """Key and certificate of a role's holder."""
        return self.shown(x509.UniformResourceIdentifier(f"{SPIFFE}{role}"))

    def context(self, shown: tuple[bytes, bytes] | None = None) -> ssl.SSLContext:
        """TLS of a client that shows this."""
        found = ssl.create_default_context(cadata=self.pki.authority.pem.decode())
        if shown is not None:
            key, chain = self.folder / "shown.key", self.folder / "shown.pem"
            key.write_bytes(shown[0])
            chain.write_bytes(shown[1])
            found.load_cert_chain(chain, key)
        return found

    def token(self, *roles: str, kid: str = "first", **changes: Any) -> str:
        """A token of a member of these roles' groups that holds now."""
        groups = [f"{GROUP}{role}" for role in roles]
        claims = self.provider.claims(time.time(), **{"sub": "ann", "groups": groups, **changes})
        return self.provider.token(kid, claims)

    def trust(self, *authorities: Authority) -> None:
        """Have the listeners' file name these authorities."""
        (self.folder / "operators.pem").write_bytes(b"".join(one.pem for one in authorities))


@contextlib.asynccontextmanager
async def elsewhere(folder: Path, **words: Any) -> AsyncIterator[Elsewhere]:
    """A section with one certificate and one group for each role, its files, and the provider's address."""
    pki, provider = Pki.create(folder), Provider()
    provider.add("first")
    async with published(pki) as address:
        address.publish(provider.published())
        names = {OperatorRole.VIEWER: "viewers", OperatorRole.OPERATOR: "operators", OperatorRole.SECURITY: "security"}
        roles = {key: (f"{SPIFFE}{role}", f"oidc:corp:{GROUP}{role}") for role, key in names.items()}
        issuer = {
            "name": "corp",
            "issuer": ISSUER,
            "audiences": (AUDIENCE,),
            "keys_url": address.url,
            "keys_ca": folder / "ca.pem",
            "role_claim": "groups",
        }
        tls = {name: folder / file for name, file in (("certificate", "server.pem"), ("key", "server.key"))}
        given = {"tls": {**tls, "client_ca": folder / "operators.pem"}, "tokens": (issuer,), **roles, **words}
        found = Elsewhere(folder, pki, provider, address, RemoteOperatorsConfig.model_validate(given))
        found.trust(found.authority)
        yield found
