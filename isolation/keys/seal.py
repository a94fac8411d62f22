"""Sealing of objects that leave an engine: AES-256-GCM, a key for each object, the name in the associated data.

Each object gets 32 random bytes, its *id*, and a key of its own by HKDF from the tenant's KEK with the id as salt. So
no nonce can ever meet a key twice (SP 800-38D, 8), and one nonce serves all. The key also takes in a secret that lives
in this process's memory alone: what a run of the appliance sealed is unreadable after it, whoever has KEK and root key.

A sealed object is ``magic 4, version u16, 0 u16, id 32, KEK id 16, length u64, ciphertext, tag 16``, little-endian.
Header and ``Binding`` are the associated data. So an object that was moved to another name, swapped, taken from an
earlier run, cut or changed in any bit does not open. An older object under the same name (a replay) is told by its id:
whoever keeps objects remembers it. Sizes are checked first, then the tag; nothing is used before.
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
"""The one nonce: every key seals one object."""

OVERHEAD_BYTES = _HEADER.size + _TAG_BYTES
"""Bytes that sealing adds."""

RUN_SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class Binding:
    """What sealed bytes are: everything that must match for them to open."""

    tenant: str
    model: str
    """Hex digest of the model's files."""
    block: bytes
    """Id of the KV block."""
    epoch: bytes
    """The life of the engine that computed it."""
    adapter: str = ""
    layers: str = "all"
    """Range of layers."""
    dtype: str = ""

    def framed(self) -> bytes:
        """The fields, each behind its length, so that no two bindings give the same bytes."""
        parts = (
            self.tenant.encode(), self.model.encode(), self.adapter.encode(), self.block, self.layers.encode(),
            self.dtype.encode(), self.epoch,
        )  # fmt: skip
        return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


class Sealer:
    """Seals and opens for one run of the appliance."""

    def __init__(self, keyring: Keyring) -> None:
        self._keyring = keyring
        self._run_secret = secrets.token_bytes(RUN_SECRET_BYTES)

    def seal(self, binding: Binding, data: bytes) -> tuple[bytes, bytes]:
        """The sealed object and its id.

        Raises:
            KeyringError: the tenant's key cannot be had.
        """
        object_id = secrets.token_bytes(OBJECT_ID_BYTES)
        kek_id, key = self._key(binding, object_id)
        header = _HEADER.pack(_MAGIC, VERSION, 0, object_id, kek_id, len(data))
        return header + AESGCM(key).encrypt(_NONCE, data, header + binding.framed()), object_id

    def open(self, binding: Binding, sealed: bytes, object_id: bytes) -> bytes:
        """What was sealed under this binding as the object of this id.

        Raises:
            SealBrokenError: anything differs, or the tenant's key is another by now.
            KeyringError: the tenant's key cannot be had.
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
