"""Public keys of others and their signatures: ECDSA over the curves P-256, P-384 and P-521, and Ed25519."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, SECP256R1, SECP384R1, SECP521R1, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_der_public_key

from isolation.keys.errors import KeysError

MAX_KEY_CHARS = 1_024
"""Most characters of a key as text; one of P-521 has 270."""

_BEGIN, _END = "-----BEGIN PUBLIC KEY-----", "-----END PUBLIC KEY-----"

_HASHES: Mapping[str, hashes.HashAlgorithm] = {
    SECP256R1.name: hashes.SHA256(),
    SECP384R1.name: hashes.SHA384(),
    SECP521R1.name: hashes.SHA512(),
}
"""Hash that goes with each curve, as Sigstore has it."""


class PublicKeyError(KeysError):
    """A text is no public key of a kind that is used here; the message says why."""


@dataclass(frozen=True, slots=True)
class PublicKey:
    """A public key of someone who signs."""

    line: str
    """The key as one line of base64: a PEM text without its frame."""
    id: str
    """SHA-256 of the PEM text, in hex: what bundles of model signing name a key by (``hint``)."""
    _key: EllipticCurvePublicKey | Ed25519PublicKey

    def __repr__(self) -> str:
        return f"<PublicKey {self.id[:16]}>"

    def verifies(self, signature: bytes, data: bytes) -> bool:
        """Return whether the signature over the data was made with this key's private key."""
        try:
            if isinstance(self._key, Ed25519PublicKey):
                self._key.verify(signature, data)
            else:
                self._key.verify(signature, data, ECDSA(_HASHES[self._key.curve.name]))
        except InvalidSignature:
            return False
        return True


def public_key_of(text: str) -> PublicKey:
    """Read a key: a PEM text, or one without its frame and line ends.

    Raises:
        PublicKeyError: it is malformed, or of a kind that is not used here.
    """
    bare = "".join(text[: MAX_KEY_CHARS + 1].replace(_BEGIN, "").replace(_END, "").split())
    if len(text) > MAX_KEY_CHARS:
        raise PublicKeyError(f"a public key has at most {MAX_KEY_CHARS} characters")
    try:
        key = load_der_public_key(base64.b64decode(bare, validate=True))
    except (binascii.Error, ValueError, UnsupportedAlgorithm) as error:
        raise PublicKeyError("not a public key: a PEM text (BEGIN PUBLIC KEY), or its base64 in one line") from error
    known = isinstance(key, EllipticCurvePublicKey) and key.curve.name in _HASHES
    if not known and not isinstance(key, Ed25519PublicKey):
        raise PublicKeyError("not a public key that is used: ECDSA over P-256, P-384 or P-521, or Ed25519")
    assert isinstance(key, EllipticCurvePublicKey | Ed25519PublicKey), "one of the two"
    form = PublicFormat.SubjectPublicKeyInfo
    line = base64.b64encode(key.public_bytes(Encoding.DER, form)).decode()
    return PublicKey(line, hashlib.sha256(key.public_bytes(Encoding.PEM, form)).hexdigest(), key)
