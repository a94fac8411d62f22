"""Signatures of JSON web tokens (RFC 7515) and the public keys that check them (RFC 7517).

Asymmetric algorithms alone: a key has exactly one, and a token's header cannot choose another. Only signatures are
checked here; what a token claims is for its caller to judge.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from isolation.keys.errors import KeysError

ALGORITHMS = ("RS256", "ES256", "EdDSA")
"""Algorithms that are taken: no ``none``, and none whose key is a secret."""

MAX_SET_KEYS = 64
"""Keys of one set: a provider that rotates has a handful."""

MIN_RSA_BITS = 2_048
MAX_RSA_BITS = 8_192
"""A larger key would make each signature of a stranger costly to check."""

MAX_KID_CHARS = 256
"""Characters of a key's id."""

_CURVE = "secp256r1"


class TokenKeysError(KeysError):
    """A set of keys cannot be used."""


class SignatureError(KeysError):
    """A token's signature is not that of the key."""


@dataclass(frozen=True, slots=True)
class VerificationKey:
    """A public key of a provider."""

    algorithm: str
    """The one of ``ALGORITHMS`` that it is for."""
    thumbprint: str
    """SHA-256 of what it is made of, in hex: another key of the same id has another."""
    _key: jwt.PyJWK = field(repr=False)

    def check(self, token: str) -> bytes:
        """Return the payload of a token that this key has signed.

        Raises:
            SignatureError: it has not, or the token is malformed.
        """
        try:
            checked = _JWS.decode_complete(token, self._key, algorithms=[self.algorithm])
        except (jwt.exceptions.PyJWTError, ValueError, TypeError) as error:
            raise SignatureError("the signature is not of this key") from error
        payload: bytes = checked["payload"]
        return payload


def read_key_set(document: object) -> dict[str, VerificationKey]:
    """Return the keys of a JWK set, as parsed from JSON, by their id. Keys for other uses and other algorithms are left
    out.

    Raises:
        TokenKeysError: it is no such set, or no key of it can be used.
    """
    keys = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(keys, list):
        raise TokenKeysError('expected an object with the list "keys"')
    if len(keys) > MAX_SET_KEYS:
        raise TokenKeysError(f"{len(keys)} keys are more than {MAX_SET_KEYS}")
    found: dict[str, VerificationKey] = {}
    for one in keys:
        kid = one.get("kid", "") if isinstance(one, dict) else None
        if not isinstance(kid, str) or len(kid) > MAX_KID_CHARS:
            raise TokenKeysError("an entry is no key, or its kid is no short text")
        key = _read_key(one)
        if key is None:
            continue
        if kid in found:
            raise TokenKeysError(f"two keys have the kid {kid!r}")
        found[kid] = key
    if not found:
        raise TokenKeysError(f"no key is of {', '.join(ALGORITHMS)}, for signatures, and strong enough")
    return found


def _read_key(one: Mapping[str, Any]) -> VerificationKey | None:
    """Return the key of an entry; None where it is not for signatures of ``ALGORITHMS``, or is weak or malformed."""
    names = {"RSA": ("RS256", ("n", "e")), "EC": ("ES256", ("crv", "x", "y")), "OKP": ("EdDSA", ("crv", "x"))}
    kind = one.get("kty")
    if not isinstance(kind, str) or kind not in names:
        return None
    algorithm, parts = names[kind]
    verifies = one.get("key_ops") is None or (isinstance(one["key_ops"], list) and "verify" in one["key_ops"])
    if one.get("use", "sig") != "sig" or one.get("alg", algorithm) != algorithm or not verifies:
        return None
    # What a key is made of and nothing else: a private part is never kept.
    public = {"kty": kind, **{name: one.get(name) for name in parts}}
    if not all(isinstance(value, str) for value in public.values()):
        return None
    try:
        key = jwt.PyJWK.from_dict(public, algorithm=algorithm)
    except (jwt.exceptions.PyJWTError, ValueError, TypeError):
        return None
    if not _is_strong(key.key):
        return None
    thumbprint = hashlib.sha256(json.dumps(public, sort_keys=True).encode()).hexdigest()
    return VerificationKey(algorithm, thumbprint, key)


def _is_strong(key: object) -> bool:
    if isinstance(key, RSAPublicKey):
        return MIN_RSA_BITS <= key.key_size <= MAX_RSA_BITS and key.public_numbers().e >= 3
    if isinstance(key, EllipticCurvePublicKey):
        return key.curve.name == _CURVE
    return isinstance(key, Ed25519PublicKey)


_JWS = jwt.PyJWS(algorithms=list(ALGORITHMS))
