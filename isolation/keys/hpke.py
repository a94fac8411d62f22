"""Hybrid public key encryption (HPKE, RFC 9180): DHKEM(X25519, HKDF-SHA256), HKDF-SHA256, AES-256-GCM, base mode.

Base mode does not authenticate the sender: who has the public key can wrap anything. A message that must come from
somebody needs a signature beside it. What both sides know of a message belongs into ``info``: the bytes open under no
other. A text that was wrapped once opens any number of times; freshness is the caller's.
"""

from __future__ import annotations

from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite

from isolation.keys.errors import KeysError, SealBrokenError

PRIVATE_BYTES = 32
PUBLIC_BYTES = 32

OVERHEAD_BYTES = 48
"""Bytes that wrapping adds: an encapsulated key of 32 bytes and a tag of 16."""

_SUITE = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.AES_256_GCM)


@dataclass(frozen=True, slots=True)
class HpkeKey:
    """A private key and its public key."""

    _private: X25519PrivateKey
    public: bytes
    """The public key, ``PUBLIC_BYTES`` long."""

    def __repr__(self) -> str:
        return f"<HpkeKey {self.public.hex()[:16]}>"

    def open(self, wrapped: bytes, info: bytes) -> bytes:
        """Open what was wrapped to this key with this ``info``.

        Raises:
            SealBrokenError: anything differs.
        """
        try:
            return _SUITE.decrypt(wrapped, self._private, info)
        except (InvalidTag, ValueError):
            raise SealBrokenError("wrapped bytes were changed, or are for another key or another context") from None


def draw_key() -> HpkeKey:
    """Draw a random key, which this process alone has."""
    return _of(X25519PrivateKey.generate())


def hpke_key_of(private: bytes) -> HpkeKey:
    """Make the key from its private bytes.

    Raises:
        KeysError: they are not ``PRIVATE_BYTES`` long.
    """
    if len(private) != PRIVATE_BYTES:
        raise KeysError(f"a private key of X25519 has {PRIVATE_BYTES} bytes, not {len(private)}")
    return _of(X25519PrivateKey.from_private_bytes(private))


def wrap(public: bytes, data: bytes, info: bytes) -> bytes:
    """Wrap bytes to a public key, bound to ``info``; gives ``OVERHEAD_BYTES`` more.

    Raises:
        KeysError: it is no public key of X25519, or one of small order, for which anybody could open the bytes.
    """
    try:
        return _SUITE.encrypt(data, X25519PublicKey.from_public_bytes(public), info)
    except ValueError as error:
        raise KeysError("no public key of X25519 to which anything can be wrapped") from error


def _of(private: X25519PrivateKey) -> HpkeKey:
    return HpkeKey(private, private.public_key().public_bytes_raw())
