"""Private files: bounded reads, and destruction by overwriting.

Overwriting in place reaches the old bytes on file systems that write in place (ext4, xfs). Copy-on-write file systems,
snapshots and the spare blocks of flash may retain them; the root key, which lies elsewhere, protects against those.

"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from isolation.host.atomic_file import sync_folder
from isolation.keys.errors import KeyringError

OTHERS = 0o077
"""Permission bits of everybody but the owner."""

_WIPE_CHUNK = 1 << 20
"""Bytes overwritten by one call."""


def read_private(path: Path, limit: int, others: int = OTHERS) -> bytes:
    """Read at most ``limit`` bytes of a file that only its owner may read.

    ``others``: permission bits that it must not have.

    Raises:
        FileNotFoundError: it does not exist.
        KeyringError: it is no regular file, larger, or accessible to others.
        OSError: it cannot be read.
    """
    # A link, or an endless pipe, could stand in its place.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if status.st_mode & 0o170000 != 0o100000 or status.st_size > limit:
            raise KeyringError(f"{path} is no plain file of at most {limit} bytes")
        if status.st_mode & others:
            raise KeyringError(f"{path} is open to others", hint=f"close it with: chmod 0600 '{path}'")
        return file.read(limit)


def destroy(path: Path) -> bool:
    """Overwrite a file with random bytes, flush them to disk, then remove it; False when it does not exist.

    Raises:
        OSError: it cannot be overwritten or removed.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        overwrite(fd)
    finally:
        os.close(fd)
    with suppress(FileNotFoundError):
        path.unlink()
    sync_folder(path.parent)
    return True


def overwrite(fd: int) -> None:
    """Overwrite an open file with random bytes and flush them to disk."""
    left = os.fstat(fd).st_size
    os.lseek(fd, 0, os.SEEK_SET)
    while left > 0:
        left -= os.write(fd, os.urandom(min(left, _WIPE_CHUNK)))
    os.fsync(fd)
