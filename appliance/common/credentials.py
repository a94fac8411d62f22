"""The credential files on disk: the key table and the pepper, private to the service's user."""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path

from appliance.common.errors import ConfigError, os_errors_as
from appliance.common.figures import counted
from appliance.common.keys import PEPPER_BYTES, KeyRecord, KeyTable, parse_records


def read_key_table(table: Path, pepper: Path) -> KeyTable:
    """Read both files.

    Raises:
        ConfigError: one is unreadable, malformed, or open to other users.
    """
    secret = _read_private(pepper)
    if len(secret) < PEPPER_BYTES:
        raise ConfigError(f"{pepper} has {counted(len(secret), 'byte')}; a pepper needs {PEPPER_BYTES} random ones")
    data = _read_private(table)
    return KeyTable(secret, _records(table, data), hashlib.sha256(data).hexdigest())


def read_key_records(table: Path) -> dict[str, KeyRecord]:
    """Read the key table alone: what is known of each key, by id.

    Raises:
        ConfigError: it is unreadable, malformed, or open to other users.
    """
    return _records(table, _read_private(table))


def _records(table: Path, data: bytes) -> dict[str, KeyRecord]:
    try:
        return parse_records(data.decode("utf-8", "replace"))
    except ConfigError as error:
        raise ConfigError(f"{table}: {str(error).removeprefix('credentials: ')}") from None


def new_pepper() -> bytes:
    """A fresh pepper."""
    return secrets.token_bytes(PEPPER_BYTES)


def _read_private(path: Path) -> bytes:
    with os_errors_as(f"cannot read {path}"):
        mode, data = path.stat().st_mode, path.read_bytes()
    if mode & 0o007:
        raise ConfigError(f"{path} is open to every user of this machine; close it with: chmod o= '{path}'")
    return data
