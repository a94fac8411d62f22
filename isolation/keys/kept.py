"""Sealing of what is kept over restarts: AES-256-GCM, one key for each object, its name in the associated data.

As ``seal`` for what leaves an engine, but without a secret of the run: what was sealed opens until the tenant's key is
destroyed. A name is sealed once, or again with what takes its place; which of two holds is the keeper's to know.

A sealed object is ``magic 4, version u16, 0 u16, salt 32, KEK id 16, ciphertext, tag 16``, little-endian. Header and
``KeptName`` are the associated data: an object that was moved to another name, cut or changed does not open.
"""

from __future__ import annotations

import secrets
import struct
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from isolation.keys.errors import SealBrokenError
from isolation.keys.keyring import KEK_ID_BYTES, Keyring

SALT_BYTES = 32
VERSION = 1
_MAGIC = b"ATHK"
_HEADER = struct.Struct(f"<4sHH{SALT_BYTES}s{KEK_ID_BYTES}s")
_TAG_BYTES = 16
_NONCE = bytes(12)
"""Constant nonce: every key seals exactly one object."""

KEPT_OVERHEAD_BYTES = _HEADER.size + _TAG_BYTES
"""Bytes that sealing adds to an object."""


@dataclass(frozen=True, slots=True)
class KeptName:
    """Name of a sealed object: all fields must match for it to open."""

    tenant: str
    kind: str
    """What it is: ``file``, ``result``."""
    owner: str
    """Id of the file or the batch."""
    part: int = 0

    def framed(self) -> bytes:
        """Encode the fields with length prefixes, so that no two names give equal bytes."""
        parts = (self.tenant.encode(), self.kind.encode(), self.owner.encode(), self.part.to_bytes(8, "little"))
        return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


class KeptSealer:
    """Seals and opens objects with the keys of a keyring."""

    def __init__(self, keyring: Keyring) -> None:
        self._keyring = keyring

    def seal(self, name: KeptName, data: bytes) -> bytes:
        """Seal an object.

        Raises:
            KeyringError: the tenant's key is not available.
        """
        salt = secrets.token_bytes(SALT_BYTES)
        kek_id, key = self._key(name, salt)
        header = _HEADER.pack(_MAGIC, VERSION, 0, salt, kek_id)
        return header + AESGCM(key).encrypt(_NONCE, data, header + name.framed())

    def open(self, name: KeptName, sealed: bytes) -> bytes:
        """Open the object that was sealed under this name.

        Raises:
            SealBrokenError: anything differs, or the tenant's key is another.
            KeyringError: the tenant's key is not available.
        """
        if len(sealed) < KEPT_OVERHEAD_BYTES:
            raise SealBrokenError("sealed bytes are cut off")
        magic, version, reserved, salt, kek_id = _HEADER.unpack_from(sealed)
        if (magic, version, reserved) != (_MAGIC, VERSION, 0):
            raise SealBrokenError("sealed bytes have another form")
        if self._keyring.key_id(name.tenant) != kek_id:
            raise SealBrokenError("sealed bytes belong to a key that is gone")
        _, key = self._key(name, salt)
        view = memoryview(sealed)
        try:
            return AESGCM(key).decrypt(_NONCE, view[_HEADER.size :], bytes(view[: _HEADER.size]) + name.framed())
        except InvalidTag:
            raise SealBrokenError("sealed bytes were changed, or belong under another name") from None

    def _key(self, name: KeptName, salt: bytes) -> tuple[bytes, bytes]:
        info = b"athanor-kept\x00" + VERSION.to_bytes(2, "little") + name.framed()
        return self._keyring.derive(name.tenant, salt, info)
