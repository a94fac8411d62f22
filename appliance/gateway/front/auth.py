"""Authentication: from the proofs of a connection to a ``Principal``, for both front ends.

Three proofs are taken: in ``authorization: Bearer`` an API key or a token of a configured issuer, and over mTLS a
client certificate with exactly one URI among its names, a SPIFFE id. Where a certificate is beside one of the others
they must name the same tenant; the other one then counts. Why a proof was refused is never said: unknown, wrong,
expired, revoked, of another tenant than the
listener's, and from outside of the tenant's networks look alike. Metrics and the audit log count the reasons.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import Enum, auto

from appliance.common.errors import ScopeError, UnauthenticatedError
from appliance.common.keys import KeyTable
from appliance.common.refused_credentials import CredentialRefusal
from appliance.common.scopes import Scope
from appliance.common.token_claims import MAX_TOKEN_CHARS, TOKEN_CREDENTIAL, TokenError, looks_like_token
from appliance.gateway.front.tokens import TokenVerifier
from appliance.gateway.generate_request import Principal
from appliance.gateway.service import Service

MAX_AUTHORIZATION_CHARS = MAX_TOKEN_CHARS + 16
"""Characters of an authorization header; a key has at most 132."""

MAX_SPIFFE_CHARS = 2_048
"""Characters of a SPIFFE id (SPIFFE-ID, section 2.3)."""

KEY_CREDENTIAL = "key:"
"""Beginning of a credential that is an API key, as the policy spells it."""

SPIFFE_ID = re.compile(r"spiffe://[a-z0-9._-]{1,255}(?:/(?!\.{1,2}(?:/|$))[A-Za-z0-9._-]+)+")
"""Trust domain and at least one path segment; no empty, ``.`` or ``..`` segment (SPIFFE-ID, sections 2.1 and 2.2)."""


class Auth(Enum):
    """Authentication that a route or a method demands of its caller."""

    PUBLIC = auto()
    TENANT = auto()


@dataclass(frozen=True, slots=True)
class _Caller:
    """From where a caller comes."""

    address: str
    only: str
    """The one tenant whose listener was called; empty where it takes all tenants."""
    listener: str


def _utc_now() -> datetime:
    return datetime.now(UTC)


class Resolver:
    """Turns proofs into principals, by the keys and the policy in force at the moment of the call."""

    def __init__(
        self,
        service: Service,
        keys: Callable[[], KeyTable],
        now: Callable[[], datetime] = _utc_now,
        used: Callable[[str, float], None] = lambda _secret, _now_s: None,
        tokens: TokenVerifier | None = None,
    ) -> None:
        """``used`` is told of each use of a key: the name of its secret and the Unix time; ``tokens``: None where no
        issuer is configured."""
        self._tokens = tokens
        self._service = service
        self._keys = keys
        self._now = now
        self._used = used

    def resolve(
        self,
        authorization: Sequence[str],
        peer_uris: Sequence[str] | None = None,
        *,
        address: str,
        only: str = "",
        listener: str = "",
    ) -> Principal:
        """Return the caller's principal.

        ``authorization`` holds the values of every such header; ``peer_uris`` the URI names of a verified client
        certificate, None where there is none; ``address`` is the caller's; ``only`` the one tenant whose listener was
        called, if it takes one alone; ``listener`` is told by the audit log.

        Raises:
            UnauthenticatedError: no proof, a proof that does not hold, two that disagree.
        """
        caller = _Caller(address, only, listener)
        by_certificate = self._by_certificate(peer_uris, caller) if peer_uris else None
        if not authorization:
            if by_certificate is None:
                raise _refusal(CredentialRefusal.ABSENT)
            return by_certificate
        by_text = self._by_text(authorization, caller)
        if by_certificate is not None and by_certificate.tenant != by_text.tenant:
            raise _refusal(CredentialRefusal.DISAGREE)
        return by_text

    def _by_text(self, authorization: Sequence[str], caller: _Caller) -> Principal:
        value = authorization[0] if len(authorization) == 1 else ""
        scheme, _, plain = value.partition(" ") if len(value) <= MAX_AUTHORIZATION_CHARS else ("", "", "")
        now = self._now()
        if self._tokens is not None and scheme.lower() == "bearer" and looks_like_token(plain):
            return self._by_token(self._tokens, plain, now, caller)
        return self._by_key(scheme, plain, now, caller)

    def _by_token(self, tokens: TokenVerifier, plain: str, now: datetime, caller: _Caller) -> Principal:
        try:
            found = tokens.check(plain, now.timestamp())
        except TokenError as error:
            raise _refusal(error.refusal) from None
        principal = self._principal(found.claims.credential, caller)
        return replace(principal, scopes=found.claims.scopes, secret=found.secret, ends=found.claims.ends)

    def _by_key(self, scheme: str, plain: str, now: datetime, caller: _Caller) -> Principal:
        found = self._keys().check(plain, now)
        if found.refusal is not None or scheme.lower() != "bearer":
            raise _refusal(found.refusal or CredentialRefusal.MALFORMED)
        principal = self._principal(f"{KEY_CREDENTIAL}{found.key_id}", caller)
        self._used(found.secret, now.timestamp())
        return replace(principal, scopes=found.scopes, secret=found.secret)

    def _by_certificate(self, uris: Sequence[str], caller: _Caller) -> Principal:
        uri = uris[0] if len(uris) == 1 else ""
        if len(uri) > MAX_SPIFFE_CHARS or not SPIFFE_ID.fullmatch(uri):
            raise _refusal(CredentialRefusal.CERTIFICATE)
        return self._principal(uri, caller)

    def _principal(self, credential: str, caller: _Caller) -> Principal:
        principal = self._service.authenticate(credential, caller.address)
        if principal is None:
            raise _refusal(CredentialRefusal.NO_TENANT)
        if caller.only and principal.tenant != caller.only:
            raise _refusal(CredentialRefusal.LISTENER)
        return replace(principal, listener=caller.listener) if caller.listener else principal


def require(principal: Principal, scope: Scope) -> None:
    """Check that a caller's credential has a scope.

    Raises:
        ScopeError: it is limited to others.
    """
    if principal.scopes is None or scope in principal.scopes:
        return
    granted = ", ".join(sorted(principal.scopes)) or "nothing"
    error = ScopeError(f"this credential is limited to {granted}; this needs {scope}", details={"scope": scope.value})
    error.refusal = CredentialRefusal.SCOPE
    raise error


def holds(principal: Principal, keys: KeyTable, now: datetime, tokens: TokenVerifier | None = None) -> bool:
    """Whether the credential of a request that was admitted before is still in force; a certificate is judged by its
    connection and by the policy alone. So is the line of a batch that was made with a token: the batch outlives it."""
    credential = principal.credential
    if credential.startswith(TOKEN_CREDENTIAL):
        return not principal.secret or (tokens is not None and tokens.holds(principal, now.timestamp()))
    if not credential.startswith(KEY_CREDENTIAL):
        return True
    return keys.holds(credential.removeprefix(KEY_CREDENTIAL), now, principal.secret)


def certificate_wanted() -> UnauthenticatedError:
    """The error of a caller without a certificate where one is demanded, whatever else it has shown."""
    error = UnauthenticatedError(
        "this port takes callers with a client certificate of the operator's authority; connect with yours (a key or a"
        " token beside it must be of the same tenant)"
    )
    error.refusal = CredentialRefusal.CERTIFICATE_ABSENT
    return error


def _refusal(reason: CredentialRefusal) -> UnauthenticatedError:
    error = UnauthenticatedError(
        "no valid credential; send a known API key as 'authorization: Bearer ath_...', a token of an issuer known"
        " here, or where the port takes them a client certificate with exactly one SPIFFE URI that the policy names"
    )
    error.refusal = reason
    return error
