"""JSON web tokens as a stranger sends them: read strictly, before and after their signature is checked. Pure.

What is refused: anything but three parts of unpadded base64url, a name twice in one object, an algorithm that is not
asymmetric, headers that bring a key or the address of one, times beyond the clock's leeway, and any issuer, audience or
value that is not spelled exactly as configured.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass
from typing import Any

from appliance.common.refused_credentials import CredentialRefusal
from appliance.common.scopes import Scope
from appliance.common.strict_json import JsonError, parse_json

MAX_TOKEN_CHARS = 8_192
"""Characters of a token: providers' have some hundred to 4,000, with lists of groups."""

MAX_CONTAINERS = 256
"""Arrays and objects of a token's header or claims."""

MAX_AUDIENCES = 32
"""Audiences of one token."""

MAX_TIME = 1 << 40
"""Bound of a token's times, in seconds of the Unix epoch."""

TOKEN_CREDENTIAL = "oidc:"  # noqa: S105 - the beginning of a name
"""Beginning of a credential that is a token, as the policy spells it: ``oidc:ISSUER:VALUE``."""

ALGORITHMS = frozenset({"RS256", "ES256", "EdDSA"})
"""Algorithms that a header may name; each key has one of its own besides."""

_TOKEN = re.compile(r"e[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+")
"""The first letter is that of an encoded brace: a key whose id has dots is no token."""
_VALUE = re.compile(r"[!-~]{1,200}")
"""A claim's value that can be a tenant's credential."""
_TYPES = frozenset({"jwt", "at+jwt", "application/at+jwt"})
_KEY_HEADERS = frozenset({"jwk", "jku", "x5u", "x5c", "crit", "b64", "zip", "enc"})
"""Headers that bring a key or its address, or change how the token is to be read."""


class TokenError(Exception):
    """A token is refused; ``refusal`` says why, to the operator."""

    def __init__(self, refusal: CredentialRefusal) -> None:
        super().__init__(refusal.value)
        self.refusal = refusal


@dataclass(frozen=True, slots=True)
class Unproved:
    """What a token says of itself; nothing of it may be believed but to find the key that checks it."""

    algorithm: str
    kid: str | None
    issuer: str
    claims: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Rules:
    """What the claims of one issuer must be."""

    name: str
    """The issuer's name in the configuration, which the policy's credentials have."""
    issuer: str
    audiences: frozenset[str]
    tenant_claim: str
    scope_claim: str = ""
    """Claim with the scopes that a token is limited to; empty: none."""
    role_claim: str = ""
    """Claim with what an operator's roles are looked up by; empty: none."""
    leeway_s: int = 30
    max_age_s: int = 0
    """Longest time that a token may hold from now on; 0: any."""


@dataclass(frozen=True, slots=True)
class Claims:
    """What a token proves."""

    credential: str
    """As the policy spells it."""
    scopes: frozenset[Scope] | None
    ends: float
    """Unix time at which it ends, the leeway included."""
    grounds: frozenset[str] = frozenset()
    """Credentials by which an operator's roles are looked up, as the configuration spells them."""


def looks_like_token(text: str) -> bool:
    """Whether a text has the form of a token, and of no API key."""
    return len(text) <= MAX_TOKEN_CHARS and _TOKEN.fullmatch(text) is not None


def read_unproved(token: str) -> Unproved:
    """Return what a token says of itself.

    Raises:
        TokenError: it is malformed, or its header asks for what is never done.
    """
    if not looks_like_token(token):
        raise TokenError(CredentialRefusal.JWT_MALFORMED)
    first, second, _ = token.split(".")
    header, claims = _object(first), _object(second)
    algorithm, kid, kind = header.get("alg"), header.get("kid"), header.get("typ", "JWT")
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
        raise TokenError(CredentialRefusal.JWT_ALGORITHM)
    known = isinstance(kind, str) and kind.lower() in _TYPES
    if not known or not isinstance(kid, str | None) or not _KEY_HEADERS.isdisjoint(header):
        raise TokenError(CredentialRefusal.JWT_MALFORMED)
    issuer = claims.get("iss")
    if not isinstance(issuer, str):
        raise TokenError(CredentialRefusal.JWT_ISSUER)
    return Unproved(algorithm, kid, issuer, claims)


def judge(claims: dict[str, Any], rules: Rules, now: float) -> Claims:
    """Return what the claims of a token prove whose signature is its issuer's.

    Raises:
        TokenError: they do not hold at ``now`` (Unix time), or name no value for a tenant.
    """
    if claims.get("iss") != rules.issuer:
        raise TokenError(CredentialRefusal.JWT_ISSUER)
    _check_audience(claims.get("aud"), rules.audiences)
    ends = _time(claims, "exp", needed=True)
    if now >= ends + rules.leeway_s:
        raise TokenError(CredentialRefusal.JWT_EXPIRED)
    if max(_time(claims, "nbf"), _time(claims, "iat")) > now + rules.leeway_s:
        raise TokenError(CredentialRefusal.JWT_EARLY)
    if rules.max_age_s and ends > now + rules.max_age_s + rules.leeway_s:
        raise TokenError(CredentialRefusal.JWT_CLAIMS)
    value = claims.get(rules.tenant_claim)
    if not isinstance(value, str) or not _VALUE.fullmatch(value):
        raise TokenError(CredentialRefusal.JWT_CLAIMS)
    credential = f"{TOKEN_CREDENTIAL}{rules.name}:{value}"
    grounds = _grounds(claims.get(rules.role_claim), rules.name) if rules.role_claim else frozenset()
    return Claims(credential, _scopes(claims, rules.scope_claim), ends + rules.leeway_s, grounds)


def _object(part: str) -> dict[str, Any]:
    try:
        text = base64.b64decode(part + "=" * (-len(part) % 4), altchars=b"-_", validate=True)
        found = parse_json(text, max_containers=MAX_CONTAINERS)
    except (binascii.Error, JsonError):
        raise TokenError(CredentialRefusal.JWT_MALFORMED) from None
    if not isinstance(found, dict):
        raise TokenError(CredentialRefusal.JWT_MALFORMED)
    return found


def _check_audience(value: object, wanted: frozenset[str]) -> None:
    """Check that one of the audiences is ours.

    Raises:
        TokenError: none is.
    """
    given = value if isinstance(value, list) else [value]
    if len(given) > MAX_AUDIENCES or not any(isinstance(one, str) and one in wanted for one in given):
        raise TokenError(CredentialRefusal.JWT_AUDIENCE)


def _time(claims: dict[str, Any], name: str, *, needed: bool = False) -> float:
    """Return a time among the claims; 0 where there is none and none is needed.

    Raises:
        TokenError: it is no time.
    """
    value = claims.get(name, None if needed else 0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < MAX_TIME:
        raise TokenError(CredentialRefusal.JWT_CLAIMS)
    return float(value)


def _scopes(claims: dict[str, Any], name: str) -> frozenset[Scope] | None:
    """Return the scopes that a token is limited to; words that are no scope of ours count nothing, and a token without
    the claim is limited to nothing."""
    if not name:
        return None
    value = claims.get(name, "")
    words = value.split(" ") if isinstance(value, str) else value if isinstance(value, list) else []
    return frozenset(scope for scope in Scope if scope.value in words)


def _grounds(value: object, name: str) -> frozenset[str]:
    """Return credentials of a claim's text, or of the texts in its list; what else is in it counts nothing."""
    given = value if isinstance(value, list) else [value]
    return frozenset(
        f"{TOKEN_CREDENTIAL}{name}:{one}" for one in given if isinstance(one, str) and _VALUE.fullmatch(one)
    )
