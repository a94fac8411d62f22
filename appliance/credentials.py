"""The credential files on disk: the key table and the pepper, private to the service's user."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from appliance.api.keys import PEPPER_BYTES, KeyTable, parse_records
from appliance.errors import ConfigError


def read_key_table(table: Path, pepper: Path) -> KeyTable:
    """Read both files.

    Raises:
        ConfigError: one is unreadable, malformed, or open to other users.
    """
    secret = _read_private(pepper)
    if len(secret) < PEPPER_BYTES:
        raise ConfigError(f"{pepper} has {len(secret)} bytes; a pepper needs {PEPPER_BYTES} random ones")
    return KeyTable(secret, parse_records(_read_private(table).decode("utf-8", "replace")))


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner may read: beside it, then renamed over it, so that nobody sees half of it."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(fd)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def new_pepper() -> bytes:
    """A fresh pepper."""
    return secrets.token_bytes(PEPPER_BYTES)


def _read_private(path: Path) -> bytes:
    try:
        mode = path.stat().st_mode
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    if mode & 0o007:
        raise ConfigError(f"{path} is open to every user of this machine; close it with: chmod o= '{path}'")
    return data
