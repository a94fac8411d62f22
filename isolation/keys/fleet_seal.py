"""Sealed objects that the hosts of a fleet give to each other: they stand alone, and open under a tenant's generation.

An object is ``magic 4, version u16, 0 u16, salt 32, producer 32, epoch 16, length u64, ciphertext, tag 16``,
little-endian. Its key is derived by HKDF from the generation with the salt, which is random, so one constant nonce
suffices (``isolation.keys.seal``). Header, account, generation and ``FleetBinding`` are the associated data: an object
under another name, of another tenant, generation, model or backend, and one that was changed in any bit, does not open.
Only who has the generation can make one that does. Older bytes under the same name open: they are the same KV.

There is no other secret, so an object is unreadable from the moment at which the last host has erased its generation.
Names and namespace keys are made here too: both from keys that the hosts have in common, each with a label of its own.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from isolation.keys.errors import SealBrokenError

PRODUCER_BYTES = 32
EPOCH_BYTES = 16

_VERSION = 1
_MAGIC = b"ATHF"
_SALT_BYTES = 32
_KEY_BYTES = 32
_HEADER = struct.Struct(f"<4sHH{_SALT_BYTES}s{PRODUCER_BYTES}s{EPOCH_BYTES}sQ")
_TAG_BYTES = 16
_NONCE = bytes(12)
"""Constant nonce: every key seals exactly one object."""

OVERHEAD_BYTES = _HEADER.size + _TAG_BYTES
"""Bytes that sealing adds to an object."""

_NAME, _NAMESPACE, _OBJECT = (
    b"athanor fleet name 1\x00",
    b"athanor fleet namespace 1\x00",
    b"athanor fleet object 1\x00",
)
"""Labels of the uses of a key."""


@dataclass(frozen=True, slots=True)
class Generation:
    """A tenant's key among the hosts of a fleet, with its number."""

    account: str
    number: int
    key: bytes

    def __repr__(self) -> str:
        return f"<Generation {self.number:#x} of {self.account}>"

    def namespace(self) -> bytes:
        """Return the namespace key that all hosts with this generation give their engines."""
        return hmac.digest(self.key, _NAMESPACE + self.account.encode(), hashlib.sha256)


@dataclass(frozen=True, slots=True)
class FleetBinding:
    """What the KV of a block is; hosts for which a field differs find nothing of each other."""

    block: bytes
    """Id of the block, a keyed hash of all tokens up to its end, of the model's root and of the adapter's."""
    model: str
    """Hex digest of the model's files."""
    backend: bytes
    """Digest of all that the bits of KV depend on beside model and tokens: kernels, processor or card, form."""

    def framed(self, of: Generation) -> bytes:
        """Encode account, generation and fields with length prefixes, so that no two give equal bytes."""
        parts = (of.account.encode(), of.number.to_bytes(8, "little"), self.block, self.model.encode(), self.backend)
        return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


def fleet_name(fleet_key: bytes, of: Generation, binding: FleetBinding) -> bytes:
    """Return the name of an object in the store, 32 bytes: an HMAC under the fleet's key, which tells nothing."""
    return hmac.digest(fleet_key, _NAME + binding.framed(of), hashlib.sha256)


def seal_for_fleet(of: Generation, binding: FleetBinding, producer: bytes, epoch: bytes, data: bytes) -> bytes:
    """Seal an object of ``len(data) + OVERHEAD_BYTES``.

    Args:
        of: the tenant's generation.
        binding: what the data is.
        producer: digest of the host's entry in the list of members.
        epoch: number of the life of the engine that computed it.
        data: KV of the block.
    """
    salt = secrets.token_bytes(_SALT_BYTES)
    header = _HEADER.pack(_MAGIC, _VERSION, 0, salt, producer, epoch, len(data))
    framed = binding.framed(of)
    return header + AESGCM(_object_key(of, salt)).encrypt(_NONCE, data, header + framed)


def open_from_fleet(
    of: Generation, binding: FleetBinding, producers: frozenset[bytes], sealed: bytes | bytearray
) -> bytes:
    """Open what a host of the fleet has sealed for this generation and binding.

    Raises:
        SealBrokenError: anything differs, or it names a producer that is none of ``producers``.
    """
    if len(sealed) < OVERHEAD_BYTES:
        raise SealBrokenError("sealed bytes are cut off")
    magic, version, reserved, salt, producer, _, length = _HEADER.unpack_from(sealed)
    if (magic, version, reserved) != (_MAGIC, _VERSION, 0) or length != len(sealed) - OVERHEAD_BYTES:
        raise SealBrokenError("sealed bytes have another form")
    if producer not in producers:
        raise SealBrokenError("sealed bytes name a host that is no member")
    view = memoryview(sealed)
    associated = bytes(view[: _HEADER.size]) + binding.framed(of)
    try:
        return AESGCM(_object_key(of, salt)).decrypt(_NONCE, view[_HEADER.size :], associated)
    except InvalidTag:
        raise SealBrokenError("sealed bytes were changed, or belong under another name") from None


def _object_key(of: Generation, salt: bytes) -> bytes:
    info = _OBJECT + of.account.encode() + of.number.to_bytes(8, "little")
    return HKDF(algorithm=SHA256(), length=_KEY_BYTES, salt=salt, info=info).derive(of.key)
