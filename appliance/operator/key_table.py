"""Changes of the key table's file: made under a lock, written in one step, whatever their number. Blocks."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import stat
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

from appliance.common.credentials import new_pepper, read_key_records, read_key_table
from appliance.common.errors import ConfigError
from appliance.common.keys import KeyRecord, digest_of_key, issue, serialise_records
from appliance.common.scopes import Scope

ID_SUFFIX_BYTES = 2
"""Random bytes that tell two keys of one tenant apart."""

TENANT_CHARACTERS = 58
"""Most characters of the tenant's name in the id of its key; an id has at most 63."""

SUFFIX_TRIES = 100
"""Ids that are drawn for a key before it is refused: one tenant then has thousands of keys."""


@dataclass(frozen=True, slots=True)
class KeyFiles:
    """Files of a key table."""

    credentials: Path
    pepper: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedKey:
    """A key that shall be made."""

    tenant: str
    id: str = ""
    """Empty: the tenant's name and four digits."""
    expires: datetime | None = None
    scopes: frozenset[Scope] | None = None
    key: str = ""
    """The whole key, where it was made elsewhere; empty: a fresh one."""


@dataclass(frozen=True, slots=True)
class Created:
    """A key that now is in the table."""

    tenant: str
    id: str
    key: str
    """The whole key; empty where it was made elsewhere."""

    @property
    def credential(self) -> str:
        """How the policy names it."""
        return f"key:{self.id}"


@dataclass(slots=True)
class Table:
    """A key table that is being changed."""

    records: dict[str, KeyRecord]
    pepper: bytes = field(repr=False)
    digest: str = ""
    """SHA-256 of the file that was written, in hex."""

    def add(self, wanted: WantedKey, now: datetime) -> Created:
        """Add a key.

        Raises:
            ConfigError: its id is taken or unusable, or it is no key.
        """
        key_id = wanted.id or free_id(wanted.tenant, self.records)
        if key_id in self.records:
            raise ConfigError(f"there is a key {key_id} already; choose another --id")
        if wanted.key:
            plain, digest = "", digest_of_key(key_id, wanted.key, self.pepper)
        else:
            plain, digest = issue(key_id, self.pepper)
        self.records[key_id] = KeyRecord(digest, now, wanted.expires, scopes=wanted.scopes, tenant=wanted.tenant)
        return Created(wanted.tenant, key_id, plain)

    def rotate(
        self, key_id: str, now: datetime, overlap: timedelta, expires: datetime | None, *, replace: bool = False
    ) -> Created:
        """Give a key a second secret; the first holds for ``overlap``. With ``replace``, a secret that an earlier
        rotation left ends at once.

        Raises:
            ConfigError: there is no such key, it does not hold, or it has two secrets already.
        """
        record = self.records.get(key_id)
        if record is None:
            raise ConfigError(f"there is no key {key_id}; `athanor key list` shows those there are")
        if not record.holds(now):
            state = "revoked" if record.revoked else "expired"
            raise ConfigError(f"the key {key_id} is {state}; make another one: athanor key create TENANT")
        if record.previous is not None and now < record.previous.expires and not replace:
            raise ConfigError(
                f"the key {key_id} has two secrets until {record.previous.expires:%Y-%m-%d %H:%M} UTC; "
                f"--replace ends the older one now"
            )
        plain, digest = issue(key_id, self.pepper)
        self.records[key_id] = record.rotated(digest, now, now + overlap, expires)
        return Created(record.tenant, key_id, plain)

    def revoke(self, key_ids: Iterable[str], tenant: str = "") -> list[str]:
        """Revoke keys, and all of a tenant; returns those that were not revoked before.

        Raises:
            ConfigError: one is unknown; none is revoked then.
        """
        wanted = list(dict.fromkeys(key_ids))
        if unknown := [key_id for key_id in wanted if key_id not in self.records]:
            raise ConfigError(f"there is no key {unknown[0]}; `athanor key list` shows those there are")
        if tenant:
            wanted += [key_id for key_id, record in self.records.items() if record.tenant == tenant]
        revoked = [key_id for key_id in dict.fromkeys(wanted) if not self.records[key_id].revoked]
        self.records.update((key_id, self.records[key_id].revoke()) for key_id in revoked)
        return revoked

    def drop(self, key_id: str) -> None:
        """Take out a key that was made and never shown: its id is free again."""
        self.records.pop(key_id, None)


def free_id(tenant: str, taken: Container[str]) -> str:
    """Return an id for a key of a tenant: its name and four digits.

    Raises:
        ConfigError: none is found that is not taken.
    """
    for _ in range(SUFFIX_TRIES):
        key_id = f"{tenant[:TENANT_CHARACTERS]}-{secrets.token_hex(ID_SUFFIX_BYTES)}"
        if key_id not in taken:
            return key_id
    raise ConfigError(f"the tenant {tenant} has so many keys that no id is found for another one; choose an --id")


@contextlib.contextmanager
def changing(files: KeyFiles, *, make: bool = False) -> Iterator[Table]:
    """Read a table, with its lock held, and write it when the block ends without an error. With ``make``, table and
    pepper are made where neither is there.

    Raises:
        ConfigError: a file is missing, malformed or open to others.
        OSError: a file cannot be read or written.
    """
    folder = files.credentials.parent
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}; run `athanor demo` first, or make it")
    with _alone(folder):
        if make and not files.credentials.exists():
            if files.pepper.exists():
                raise ConfigError(f"there is a pepper at {files.pepper} but no key table at {files.credentials}")
            table = Table({}, new_pepper())
            _replace(files.pepper, table.pepper, group_reads=False)
        else:
            read = read_key_table(files.credentials, files.pepper)
            table = Table(dict(read.records), read.pepper)
        yield table
        _write(files.credentials, table)


@contextlib.contextmanager
def revoking(credentials: Path) -> Iterator[Table]:
    """Read a table without its pepper, with its lock held, and write it when the block ends without an error.

    Raises:
        ConfigError, OSError: as ``changing``.
    """
    if not credentials.parent.is_dir():
        raise ConfigError(f"there is no folder {credentials.parent}")
    with _alone(credentials.parent):
        table = Table(read_key_records(credentials), b"")
        yield table
        _write(credentials, table)


def _write(path: Path, table: Table) -> None:
    data = serialise_records(table.records).encode()
    _replace(path, data, group_reads=True)
    table.digest = hashlib.sha256(data).hexdigest()


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, so that two commands at once do not lose each other's key."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _replace(path: Path, data: bytes, *, group_reads: bool) -> None:
    """Write a private file that belongs to whom the old one, or else the folder, belongs to: the
    operator may be root, the service that reads it is not. With ``group_reads`` a group that may
    read the folder may read the file, as the units' gateway does."""
    from isolation.host.atomic_file import write_whole

    old = path if path.exists() else path.parent
    owner = old.stat()
    write_whole(path, data)
    if (owner.st_uid, owner.st_gid) != (os.geteuid(), os.getegid()):
        os.chown(path, owner.st_uid, owner.st_gid)
    if group_reads and owner.st_mode & stat.S_IRGRP:
        path.chmod(0o640)
