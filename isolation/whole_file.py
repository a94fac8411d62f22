"""Files that are there whole or not at all: written beside their name, brought to the medium, then renamed over it."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

PRIVATE = 0o600
"""Mode of a file that only its owner reads."""


def write_whole(path: Path, data: bytes, mode: int = PRIVATE) -> None:
    """Write a file so that nobody sees half of it; it is on the medium when this returns.

    Raises:
        OSError: it cannot be written; what was there before is still there.
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
    """Bring names that were made, changed or removed in a folder to the medium."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
