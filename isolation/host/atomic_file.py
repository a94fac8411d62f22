"""Atomic file writes: written under a temporary name, flushed to disk, then renamed."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

PRIVATE = 0o600
"""Mode of a file that only its owner may read."""


def write_whole(path: Path, data: bytes, mode: int = PRIVATE) -> None:
    """Write a file atomically; it is on disk when this returns.

    Raises:
        OSError: it cannot be written; the previous file is unchanged.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(fd, mode)
            os.fsync(fd)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush created, changed and removed names in a folder to disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
