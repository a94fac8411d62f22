"""Authentication: from the proofs of a connection to a ``Principal``, for both front ends.

Two proofs are taken: an API key in ``authorization: Bearer``, and over mTLS a client certificate with exactly one URI
among its names, a SPIFFE id. Where both are given they must name the same tenant; the key then counts. Why a proof was
refused is never said: unknown, wrong, expired, revoked, and from outside of the tenant's networks look alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from enum import Enum, auto

from appliance.common.errors import UnauthenticatedError
from appliance.common.keys import KeyTable
from appliance.gateway.generate_request import Principal, Service

MAX_AUTHORIZATION_CHARS = 256
"""Characters of an authorization header; a key has at most 132."""

MAX_SPIFFE_CHARS = 2_048
"""Characters of a SPIFFE id (SPIFFE-ID, section 2.3)."""

KEY_CREDENTIAL = "key:"
"""Beginning of a credential that is an API key, as the policy spells it."""

_SPIFFE = re.compile(r"spiffe://[a-z0-9._-]{1,255}(?:/(?!\.{1,2}(?:/|$))[A-Za-z0-9._-]+)+")
"""Trust domain and at least one path segment; no empty, ``.`` or ``..`` segment (SPIFFE-ID, sections 2.1 and 2.2)."""


class Auth(Enum):
    """Authentication that a route or a method demands of its caller."""

    PUBLIC = auto()
    TENANT = auto()


def _utc_now() -> datetime:
    return datetime.now(UTC)


class Resolver:
    """Turns proofs into principals, by the keys and the policy in force at the moment of the call."""

    def __init__(self, service: Service, keys: Callable[[], KeyTable], now: Callable[[], datetime] = _utc_now) -> None:
        self._service = service
        self._keys = keys
        self._now = now

    def resolve(
        self, authorization: Sequence[str], peer_uris: Sequence[str] | None = None, *, address: str
    ) -> Principal:
        """Return the caller's principal.

        ``authorization`` holds the values of every such header; ``peer_uris`` the URI names of a verified client
        certificate, None where there is none; ``address`` is the caller's.

        Raises:
            UnauthenticatedError: no proof, a proof that does not hold, two that disagree.
        """
        by_certificate = self._by_certificate(peer_uris, address) if peer_uris else None
        if not authorization:
            if by_certificate is None:
                raise _refusal()
            return by_certificate
        by_key = self._by_key(authorization, address)
        if by_certificate is not None and by_certificate.tenant != by_key.tenant:
            raise _refusal()
        return by_key

    def _by_key(self, authorization: Sequence[str], address: str) -> Principal:
        value = authorization[0] if len(authorization) == 1 else ""
        scheme, _, plain = value.partition(" ") if len(value) <= MAX_AUTHORIZATION_CHARS else ("", "", "")
        key_id = self._keys().verify(plain, self._now())
        if key_id is None or scheme.lower() != "bearer":
            raise _refusal()
        return self._principal(f"{KEY_CREDENTIAL}{key_id}", address)

    def _by_certificate(self, uris: Sequence[str], address: str) -> Principal:
        uri = uris[0] if len(uris) == 1 else ""
        if len(uri) > MAX_SPIFFE_CHARS or not _SPIFFE.fullmatch(uri):
            raise _refusal()
        return self._principal(uri, address)

    def _principal(self, credential: str, address: str) -> Principal:
        principal = self._service.authenticate(credential, address)
        if principal is None:
            raise _refusal()
        return principal


def holds(credential: str, keys: KeyTable, now: datetime) -> bool:
    """Whether the credential of a request that was admitted before is still in force; a certificate is judged by its
    connection and by the policy alone."""
    return not credential.startswith(KEY_CREDENTIAL) or keys.holds(credential.removeprefix(KEY_CREDENTIAL), now)


def _refusal() -> UnauthenticatedError:
    return UnauthenticatedError(
        "no valid credential; send a known API key as 'authorization: Bearer ath_...', or over gRPC a client"
        " certificate with exactly one SPIFFE URI that the policy names"
    )
