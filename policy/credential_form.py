"""Credentials as a policy names them: API keys, tokens of issuers, SPIFFE URIs. Pure."""

from __future__ import annotations

import re

MAX_SPIFFE_ID_BYTES = 2_048
"""Longest SPIFFE ID that validators must support (SPIFFE-ID specification, section 2.3)."""

MAX_TRUST_DOMAIN_BYTES = 255
"""Longest trust domain in bytes (SPIFFE-ID specification, section 2.1)."""

_TOKEN_VALUE = re.compile(r"oidc:[a-z0-9][a-z0-9-]{0,31}:[!-~]{1,200}")
_KEY_ID = re.compile(r"key:[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_TRUST_DOMAIN = re.compile(r"[a-z0-9._-]+")
_PATH_SEGMENT = re.compile(r"[A-Za-z0-9._-]+")


def checked_credential(value: str) -> str:
    """Return a credential that can be one.

    Raises:
        ValueError: it cannot; the message says what it must be.
    """
    if value.startswith("key:"):
        if not _KEY_ID.fullmatch(value):
            raise ValueError("must be key:ID with letters, digits, dot, dash and underscore, at most 63 of them")
        return value
    if value.startswith("oidc:"):
        if not _TOKEN_VALUE.fullmatch(value):
            raise ValueError(
                "must be oidc:ISSUER:VALUE, the configured name of an issuer and at most 200 characters of "
                "printable ASCII without spaces"
            )
        return value
    if not value.startswith("spiffe://"):
        raise ValueError("must be key:ID, oidc:ISSUER:VALUE or a SPIFFE URI, spiffe://TRUST-DOMAIN/PATH")
    if len(value.encode()) > MAX_SPIFFE_ID_BYTES:
        raise ValueError(f"a SPIFFE ID has at most {MAX_SPIFFE_ID_BYTES} bytes")
    domain, slash, path = value.removeprefix("spiffe://").partition("/")
    if not _TRUST_DOMAIN.fullmatch(domain) or len(domain) > MAX_TRUST_DOMAIN_BYTES:
        raise ValueError(
            "the trust domain has lower-case letters, digits, dot, dash and underscore only; "
            "no user, port, query or fragment"
        )
    if not slash:
        raise ValueError("names a trust domain and no workload; add the path")
    for segment in path.split("/"):
        if not _PATH_SEGMENT.fullmatch(segment) or segment in (".", ".."):
            raise ValueError(
                "each path segment has letters, digits, dot, dash and underscore only and is "
                "neither empty nor a dot segment; no query or fragment"
            )
    return value
