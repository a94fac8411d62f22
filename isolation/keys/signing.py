"""Ed25519 (RFC 8032): the key that the audit log is signed with."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

SEED_BYTES = 32
"""Of a private key, which is what its file holds."""

PUBLIC_BYTES = 32
SIGNATURE_BYTES = 64


class SigningKeyError(Exception):
    """A key file that cannot be used; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A private key and the public one that belongs to it."""

    _private: Ed25519PrivateKey
    public: bytes
    """``PUBLIC_BYTES``."""

    def __repr__(self) -> str:
        return f"<SigningKey {self.public.hex()[:16]}>"

    def sign(self, data: bytes) -> bytes:
        """``SIGNATURE_BYTES`` over the data."""
        return self._private.sign(data)


def key_of(seed: bytes) -> SigningKey:
    """The key of a seed.

    Raises:
        SigningKeyError: it is not ``SEED_BYTES`` long.
    """
    if len(seed) != SEED_BYTES:
        raise SigningKeyError(f"a signing key has {SEED_BYTES} bytes, not {len(seed)}")
    private = Ed25519PrivateKey.from_private_bytes(seed)
    return SigningKey(private, private.public_key().public_bytes_raw())


def load_or_make(path: Path) -> tuple[SigningKey, bool]:
    """The key in a file that only its owner may read; a file that is not there is made. Says whether it was.

    Raises:
        SigningKeyError: the file is open to others, damaged, or cannot be read or made.
    """
    try:
        made = _make(path)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            opened, seed = _is_open_to_others(fd), os.read(fd, SEED_BYTES + 1)
        finally:
            os.close(fd)
    except OSError as error:
        raise SigningKeyError(f"cannot use the signing key {path}: {error.strerror}") from error
    if opened:
        raise SigningKeyError(f"the signing key {path} is open to other users; close it with: chmod 600 '{path}'")
    try:
        return key_of(seed), made
    except SigningKeyError as error:
        raise SigningKeyError(f"{path} holds no signing key: {error}") from error


def verifies(public: bytes, signature: bytes, data: bytes) -> bool:
    """Whether the signature over the data was made with the private key that belongs to the public one."""
    if len(public) != PUBLIC_BYTES or len(signature) != SIGNATURE_BYTES:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def _is_open_to_others(fd: int) -> bool:
    """Whether others than the owner may use the file. A credential of systemd has a list of users instead, and then the
    group's bits are what that list may at most give (acl(5))."""
    mode = os.fstat(fd).st_mode
    if not mode & 0o040 or mode & 0o037:
        return bool(mode & 0o077)
    try:
        os.getxattr(fd, "system.posix_acl_access")
    except OSError:
        return True
    return False


def _make(path: Path) -> bool:
    """Make the file with a fresh seed, unless it is there."""
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
        # A link fails where a rename would replace what somebody else has made meanwhile.
        os.link(draft, path)
    except FileExistsError:
        return False
    finally:
        draft.unlink(missing_ok=True)
    return True
