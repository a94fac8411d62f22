"""Ed25519 signing key of the audit log (RFC 8032)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from isolation.keys.errors import KeysError

SEED_BYTES = 32
"""Bytes of a private key's seed, which is the content of its file."""

PUBLIC_BYTES = 32
SIGNATURE_BYTES = 64


class SigningKeyError(KeysError):
    """A signing key file cannot be used; the message gives the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A private key and its public key."""

    _private: Ed25519PrivateKey
    public: bytes
    """The public key, ``PUBLIC_BYTES`` long."""

    def __repr__(self) -> str:
        return f"<SigningKey {self.public.hex()[:16]}>"

    def sign(self, data: bytes) -> bytes:
        """Sign the data; return ``SIGNATURE_BYTES``."""
        return self._private.sign(data)


def key_of(seed: bytes) -> SigningKey:
    """Make the signing key from a seed.

    Raises:
        SigningKeyError: it is not ``SEED_BYTES`` long.
    """
    if len(seed) != SEED_BYTES:
        raise SigningKeyError(f"a signing key has {SEED_BYTES} bytes, not {len(seed)}")
    private = Ed25519PrivateKey.from_private_bytes(seed)
    return SigningKey(private, private.public_key().public_bytes_raw())


def load_or_make(path: Path) -> tuple[SigningKey, bool]:
    """Load the key from a file that only its owner may read, or create it; also return whether it was created.

    Raises:
        SigningKeyError: the file is accessible to others, damaged, or cannot be read or created.
    """
    try:
        made = _make(path)
    except OSError as error:
        raise _unusable(path, error) from error
    return load(path), made


def load(path: Path) -> SigningKey:
    """Load the key from a file that only its owner may read.

    Raises:
        SigningKeyError: the file is missing, accessible to others, damaged, or cannot be read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            opened, seed = _is_open_to_others(fd), os.read(fd, SEED_BYTES + 1)
        finally:
            os.close(fd)
    except OSError as error:
        raise _unusable(path, error) from error
    if opened:
        raise SigningKeyError(f"the signing key {path} is open to other users; close it with: chmod 600 '{path}'")
    try:
        return key_of(seed)
    except SigningKeyError as error:
        raise SigningKeyError(f"{path} holds no signing key: {error}") from error


def verifies(public: bytes, signature: bytes, data: bytes) -> bool:
    """Return whether the signature over the data was made with the private key of this public key."""
    if len(public) != PUBLIC_BYTES or len(signature) != SIGNATURE_BYTES:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def _unusable(path: Path, error: OSError) -> SigningKeyError:
    return SigningKeyError(f"cannot use the signing key {path}: {error.strerror}")


def _is_open_to_others(fd: int) -> bool:
    """Return whether users other than the owner may access the file. A systemd credential has an access list instead,
    and the group bits are then the mask of that list (acl(5))."""
    mode = os.fstat(fd).st_mode
    if not mode & 0o040 or mode & 0o037:
        return bool(mode & 0o077)
    try:
        os.getxattr(fd, "system.posix_acl_access")
    except OSError:
        return True
    return False


def _make(path: Path) -> bool:
    """Create the file with a fresh seed, unless it exists."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    if path.exists():
        return False
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            os.write(fd, os.urandom(SEED_BYTES))
            os.fsync(fd)
        finally:
            os.close(fd)
        # A link fails where a rename would replace a file that another process has created meanwhile.
        os.link(draft, path)
    except FileExistsError:
        return False
    finally:
        draft.unlink(missing_ok=True)
    return True
