"""Tokens of OIDC providers as credentials, of tenants and of operators: signature, claims, and what was checked before.

A token that held once is remembered by its digest until it ends or its issuer's keys change, so that a request with it
costs one hash and no signature. What does not hold is not remembered: strangers fill nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from appliance.common.operator_config import OperatorIssuerConfig
from appliance.common.refused_credentials import CredentialRefusal
from appliance.common.token_claims import Claims, Rules, TokenError, judge, read_unproved
from appliance.common.token_config import IssuerConfig, TokenIssuerConfig
from appliance.gateway.front.issuer_keys import IssuerKeys
from appliance.gateway.generate_request import Principal

MAX_REMEMBERED = 8_192
"""Tokens remembered at once: each takes some 500 bytes."""


@dataclass(frozen=True, slots=True)
class Proved:
    """A token that holds."""

    claims: Claims
    issuer: IssuerKeys
    thumbprint: str
    """That of the key which signed it."""

    def holds(self, now: float) -> bool:
        """Whether it has not ended and its key is still its issuer's."""
        return now < self.claims.ends and self.thumbprint in self.issuer.thumbprints

    @property
    def secret(self) -> str:
        """Name of the key, for the requests that run under the token."""
        return f"{self.issuer.config.name}@{self.thumbprint}"


class TokenVerifier:
    """Tokens of the configured issuers. All methods run in one event loop."""

    def __init__(self, issuers: Sequence[IssuerConfig]) -> None:
        self.issuers = [IssuerKeys(one) for one in issuers]
        self._by_issuer = {one.config.issuer: (one, _rules(one.config)) for one in self.issuers}
        self._by_name = {one.config.name: one for one in self.issuers}
        self._remembered: OrderedDict[bytes, Proved] = OrderedDict()
        self.signatures = 0
        """Signatures checked so far."""

    @property
    def in_force(self) -> Iterable[IssuerKeys]:
        """Issuers whose tokens are taken."""
        return self._by_name.values()

    def keep(self, issuers: Sequence[IssuerConfig]) -> None:
        """Take tokens of these issuers alone, of those that there are. Tokens of one that is configured otherwise now,
        or no more, are refused; issuers that are not there yet are not added."""
        kept = [one for one in self.issuers if one.config in issuers]
        self._by_issuer = {one.config.issuer: (one, _rules(one.config)) for one in kept}
        self._by_name = {one.config.name: one for one in kept}
        self._remembered.clear()

    def check(self, token: str, now: float) -> Proved:
        """Return what a token proves at this Unix time.

        Raises:
            TokenError: it does not hold; the reason is for the operator alone.
        """
        digest = hashlib.sha256(token.encode("utf-8", "replace")).digest()
        found = self._remembered.get(digest)
        if found is not None:
            if found.holds(now):
                self._remembered.move_to_end(digest)
                return found
            del self._remembered[digest]
        proved = self._prove(token, now)
        self._remembered[digest] = proved
        if len(self._remembered) > MAX_REMEMBERED:
            self._remembered.popitem(last=False)
        return proved

    def _prove(self, token: str, now: float) -> Proved:
        said = read_unproved(token)
        known = self._by_issuer.get(said.issuer)
        if known is None:
            raise TokenError(CredentialRefusal.JWT_ISSUER)
        issuer, rules = known
        key = issuer.find(said.kid)
        if key is None:
            raise TokenError(CredentialRefusal.JWT_KEY)
        if key.algorithm != said.algorithm:
            raise TokenError(CredentialRefusal.JWT_ALGORITHM)
        from isolation.keys.tokens import SignatureError

        self.signatures += 1
        try:
            key.check(token)
        except SignatureError:
            raise TokenError(CredentialRefusal.JWT_SIGNATURE) from None
        return Proved(judge(said.claims, rules, now), issuer, key.thumbprint)

    def holds(self, caller: Principal, now: float) -> bool:
        """Whether the token of a request that was admitted before still holds: it has not ended, and the key that
        signed it is still its issuer's."""
        name, _, thumbprint = caller.secret.partition("@")
        issuer = self._by_name.get(name)
        return issuer is not None and thumbprint in issuer.thumbprints and now < caller.ends

    async def run(self) -> None:
        """Keep the keys of all issuers fresh until cancelled."""
        if self.issuers:
            await asyncio.gather(*(one.run() for one in self.issuers))
        else:
            await asyncio.Event().wait()


def _rules(config: IssuerConfig) -> Rules:
    """Return what the claims of an issuer must be: an operator is named by ``sub``."""
    return Rules(
        name=config.name,
        issuer=config.issuer,
        audiences=frozenset(config.audiences),
        tenant_claim=config.tenant_claim if isinstance(config, TokenIssuerConfig) else "sub",
        scope_claim=config.scope_claim if isinstance(config, TokenIssuerConfig) else "",
        role_claim=config.role_claim if isinstance(config, OperatorIssuerConfig) else "",
        leeway_s=config.leeway_s,
        max_age_s=config.max_age_s,
    )
