"""Reasons for which credentials are refused: for metrics and the audit log, never for the caller."""

from __future__ import annotations

from enum import StrEnum


class CredentialRefusal(StrEnum):
    """Why a credential is refused. The caller is told the same for each."""

    ABSENT = "absent"
    """No credential was given."""
    MALFORMED = "malformed"
    """It has the form of no credential, or there are several."""
    KEY_UNKNOWN = "key_unknown"
    """No key has this id."""
    KEY_WRONG = "key_wrong"
    """The key with this id has another secret."""
    KEY_EXPIRED = "key_expired"
    KEY_REVOKED = "key_revoked"
    CERTIFICATE = "certificate"
    """A client certificate without exactly one well-formed SPIFFE id."""
    CERTIFICATE_ABSENT = "certificate_absent"
    """No client certificate at a port that demands one."""
    NO_TENANT = "no_tenant"
    """It holds, and the policy names it for no tenant, or its tenant is not called from this address."""
    DISAGREE = "disagree"
    """Two credentials of different tenants."""
    SCOPE = "scope"
    """It holds, and is limited to other operations, which the caller learns."""
