"""Sealing of objects that leave an engine: AES-256-GCM, one key for each object, its name in the associated data.

Each object gets 32 random bytes, its *id*, and its own key by HKDF from the tenant's KEK with the id as salt. So no
nonce is ever used twice with a key (SP 800-38D, 8), and one constant nonce suffices. The key also depends on a secret
held only in this process's memory: objects sealed by one run of the appliance are unreadable afterwards, even with KEK
and root key.

A sealed object is ``magic 4, version u16, 0 u16, id 32, KEK id 16, length u64, ciphertext, tag 16``, little-endian.
Header and ``Binding`` are the associated data. So an object that was moved to another name, swapped, taken from an
earlier run, truncated or changed in any bit does not open. An older object under the same name (a replay) is detected
by its id, which the keeper of the objects remembers. Sizes are checked first, then the tag; nothing is used before.
"""

from __future__ import annotations

import secrets
import struct
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from isolation.keys.errors import SealBrokenError
from isolation.keys.keyring import KEK_ID_BYTES, Keyring

OBJECT_ID_BYTES = 32

VERSION = 1
_MAGIC = b"ATHS"
_HEADER = struct.Struct(f"<4sHH{OBJECT_ID_BYTES}s{KEK_ID_BYTES}sQ")
_TAG_BYTES = 16
_NONCE = bytes(12)
"""Constant nonce: every key seals exactly one object."""

HEADER_BYTES = _HEADER.size
"""Bytes before the ciphertext. They name object and KEK and hold no key; who keeps them apart can leave them out of a
copy, which then names neither and is of no use to anybody else: the id is the salt of the object's key."""

OVERHEAD_BYTES = HEADER_BYTES + _TAG_BYTES
"""Bytes that sealing adds to an object."""

RUN_SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class Binding:
    """Context of a sealed object: all fields must match for it to open."""

    tenant: str
    model: str
    """Hex digest of the model's files."""
    block: bytes
    """Id of the KV block."""
    epoch: bytes
    """Id of the engine run that computed it."""
    adapter: str = ""
    layers: str = "all"
    """Range of layers."""
    dtype: str = ""

    def framed(self) -> bytes:
        """Encode the fields with length prefixes, so that no two bindings give equal bytes."""
        parts = (
            self.tenant.encode(),
            self.model.encode(),
            self.adapter.encode(),
            self.block,
            self.layers.encode(),
            self.dtype.encode(),
            self.epoch,
        )
        return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


class Sealer:
    """Seals and opens objects during one run of the appliance."""

    def __init__(self, keyring: Keyring) -> None:
        self._keyring = keyring
        self._run_secret = secrets.token_bytes(RUN_SECRET_BYTES)

    def seal(self, binding: Binding, data: bytes) -> tuple[bytes, bytes]:
        """Seal an object; return it and its id.

        Raises:
            KeyringError: the tenant's key is not available.
        """
        object_id = secrets.token_bytes(OBJECT_ID_BYTES)
        kek_id, key = self._key(binding, object_id)
        header = _HEADER.pack(_MAGIC, VERSION, 0, object_id, kek_id, len(data))
        return header + AESGCM(key).encrypt(_NONCE, data, header + binding.framed()), object_id

    def open(self, binding: Binding, sealed: bytes, object_id: bytes) -> bytes:
        """Open the object that was sealed under this binding and id.

        Raises:
            SealBrokenError: anything differs, or the tenant's key has changed since.
            KeyringError: the tenant's key is not available.
        """
        if len(sealed) < OVERHEAD_BYTES:
            raise SealBrokenError("sealed bytes are cut off")
        magic, version, reserved, found_id, kek_id, length = _HEADER.unpack_from(sealed)
        if (magic, version, reserved) != (_MAGIC, VERSION, 0) or length != len(sealed) - OVERHEAD_BYTES:
            raise SealBrokenError("sealed bytes have another form")
        if found_id != object_id:
            raise SealBrokenError("sealed bytes are those of another object")
        known_id, key = self._key(binding, object_id)
        if known_id != kek_id:
            raise SealBrokenError("sealed bytes belong to a key that is gone")
        view = memoryview(sealed)
        try:
            return AESGCM(key).decrypt(_NONCE, view[_HEADER.size :], bytes(view[: _HEADER.size]) + binding.framed())
        except InvalidTag:
            raise SealBrokenError("sealed bytes were changed, or belong under another name") from None

    def _key(self, binding: Binding, object_id: bytes) -> tuple[bytes, bytes]:
        info = b"athanor-spill\x00" + VERSION.to_bytes(2, "little") + binding.framed()
        return self._keyring.derive(binding.tenant, object_id, info, self._run_secret)
