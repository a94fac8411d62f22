"""API keys in force and the files that they come from, which are looked at when they change and twice a second.

A key that is made, rotated or revoked is so in force without a reload. Files that cannot be used change nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass
from pathlib import Path

import structlog

from appliance.common.credentials import read_key_table
from appliance.common.errors import ConfigError
from appliance.common.figures import counted
from appliance.common.keys import KeyTable

LOOK_S = 0.5
"""Seconds between two looks at the files, where their folders tell of no change
(``appliance.gateway.front.folder_bell``); credentials that expire are found by these looks."""

log = structlog.get_logger()

Stamp = tuple[tuple[int, int, int] | None, ...]
"""What tells one content of the files from the next: time, inode and size of each; None of one that is not there."""


@dataclass(frozen=True, slots=True)
class KeyRead:
    """A key table as it was read."""

    table: KeyTable
    credentials: Path
    pepper: Path
    stamp: Stamp
    turn: int
    """Number of the reading: a later one has the later files."""


class KeyFile:
    """The key table in force."""

    def __init__(self, credentials: Path, pepper: Path) -> None:
        self._read = KeyRead(KeyTable(b"", {}), credentials, pepper, (), 0)
        self._turns = itertools.count(1)
        self._seen: Stamp = ()
        self.problem = ""
        """Why the files as they are now are not in force; empty where they are."""
        self.since = time.monotonic()
        """When the table came into force."""

    @property
    def path(self) -> Path:
        """File of the table in force."""
        return self._read.credentials

    @property
    def folders(self) -> set[Path]:
        """Folders in which a change may change the table in force."""
        return {self._read.credentials.parent, self._read.pepper.parent}

    @property
    def keys(self) -> KeyTable:
        """API keys in force."""
        return self._read.table

    def read(self, credentials: Path, pepper: Path) -> KeyRead:
        """Read a key table; blocks.

        Raises:
            ConfigError: it cannot be used; the message has file and line.
        """
        turn, stamp = next(self._turns), stamp_of(credentials, pepper)
        return KeyRead(read_key_table(credentials, pepper), credentials, pepper, stamp, turn)

    def adopt(self, found: KeyRead) -> None:
        """Put a table in force, unless the same files were read again since."""
        before = self._read
        same_files = (found.credentials, found.pepper) == (before.credentials, before.pepper)
        if same_files and found.turn < before.turn:
            return
        self._read, self._seen, self.problem, self.since = found, found.stamp, "", time.monotonic()

    async def look(self) -> bool:
        """Put the table in force where its files have changed; returns whether another one is in force now."""
        files = self._read.credentials, self._read.pepper
        stamp = stamp_of(*files)
        if stamp == self._seen:
            return False
        self._seen, began = stamp, time.monotonic()
        try:
            found = await asyncio.to_thread(self.read, *files)
        except ConfigError as error:
            self.problem = error.message
            log.error("the key table cannot be used; the keys in force stay so", problem=error.message)
            return False
        self.adopt(found)
        took_ms = round((time.monotonic() - began) * 1_000)
        log.info(
            "API keys read again",
            keys=counted(len(self.keys.records), "key"),
            digest=self.keys.digest[:12],
            took_ms=took_ms,
        )
        return True


def stamp_of(*files: Path) -> Stamp:
    """What tells the content of these files from the next."""
    found: list[tuple[int, int, int] | None] = []
    for file in files:
        try:
            status = file.stat()
        except OSError:
            found.append(None)
        else:
            found.append((status.st_mtime_ns, status.st_ino, status.st_size))
    return tuple(found)
