"""The book of files, batches and stored responses: one SQLite file that the supervisor alone writes. Blocks.

What tenants sent and got is sealed under their keys (``isolation.keys.kept``), names and metadata included; ids,
sizes, times and states are not. A change is one transaction, forced to disk (WAL, ``synchronous=FULL``): a line's
result, what must be charged for it, and the counts of its batch come together or not at all.
"""

from __future__ import annotations

import json
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from appliance.common.audit.entry import KINDS, Entry
from appliance.common.errors import StoreError
from isolation.keys.errors import KeysError
from isolation.keys.kept import KeptName, KeptSealer
from isolation.keys.keyring import Keyring

NAME = "batches.db"
FOLDER_MODE, FILE_MODE = 0o700, 0o600

SCHEMA = 2
"""Form of the tables; a book of a newer form is refused."""

BUSY_S = 10.0
"""Seconds that a write waits for the lock of a backup."""

ID_BYTES = 16
"""128 random bits of an id: unguessable."""

FREE_PAGES = 4_096
"""Pages given back to the file system at a time, 16 MiB: what was deleted does not stay on the disk for ever, and no
call waits for long."""

TABLES = """
CREATE TABLE IF NOT EXISTS files (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, kek BLOB NOT NULL,
    purpose TEXT NOT NULL, batch TEXT NOT NULL, ok INTEGER NOT NULL, name BLOB NOT NULL, size INTEGER NOT NULL,
    parts INTEGER NOT NULL, whole INTEGER NOT NULL, created INTEGER NOT NULL, expires INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS files_by_tenant ON files (tenant, seq);
CREATE TABLE IF NOT EXISTS parts (
    file TEXT NOT NULL, number INTEGER NOT NULL, data BLOB NOT NULL, PRIMARY KEY (file, number)
);
CREATE TABLE IF NOT EXISTS lines (
    file TEXT NOT NULL, number INTEGER NOT NULL, start INTEGER NOT NULL, size INTEGER NOT NULL,
    PRIMARY KEY (file, number)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS batches (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, kek BLOB NOT NULL,
    credential TEXT NOT NULL, endpoint TEXT NOT NULL, input_file TEXT NOT NULL, output_file TEXT NOT NULL DEFAULT '',
    error_file TEXT NOT NULL DEFAULT '', status TEXT NOT NULL, ending TEXT NOT NULL DEFAULT '',
    created INTEGER NOT NULL, expires INTEGER NOT NULL, in_progress_at INTEGER NOT NULL DEFAULT 0,
    finalizing_at INTEGER NOT NULL DEFAULT 0, completed_at INTEGER NOT NULL DEFAULT 0,
    failed_at INTEGER NOT NULL DEFAULT 0, expired_at INTEGER NOT NULL DEFAULT 0,
    cancelling_at INTEGER NOT NULL DEFAULT 0, cancelled_at INTEGER NOT NULL DEFAULT 0,
    over_at INTEGER NOT NULL DEFAULT 0, total INTEGER NOT NULL, completed INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0, notes BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS batches_by_tenant ON batches (tenant, seq);
CREATE INDEX IF NOT EXISTS batches_by_status ON batches (status);
CREATE TABLE IF NOT EXISTS batch_keys (key BLOB PRIMARY KEY, batch TEXT NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS batch_keys_by_batch ON batch_keys (batch);
CREATE TABLE IF NOT EXISTS results (
    batch TEXT NOT NULL, line INTEGER NOT NULL, ok INTEGER NOT NULL, size INTEGER NOT NULL, data BLOB NOT NULL,
    PRIMARY KEY (batch, line)
);
CREATE TABLE IF NOT EXISTS responses (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, kek BLOB NOT NULL,
    size INTEGER NOT NULL, created INTEGER NOT NULL, expires INTEGER NOT NULL, read_day INTEGER NOT NULL DEFAULT 0,
    data BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS responses_by_tenant ON responses (tenant);
CREATE INDEX IF NOT EXISTS responses_by_end ON responses (expires);
CREATE TABLE IF NOT EXISTS used (tenant TEXT PRIMARY KEY, bytes INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS outbox (key TEXT PRIMARY KEY, time_ms INTEGER NOT NULL, entry TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS logged (log TEXT NOT NULL, next INTEGER NOT NULL);
"""


class StoreRefusedError(Exception):
    """A call is not carried out; ``reason`` is one of ``appliance.common.batches.messages.REFUSALS``."""

    def __init__(self, reason: str, number: int = 0) -> None:
        super().__init__(reason)
        self.reason, self.number = reason, number


class StoreBook:
    """One open book. All methods may be called from any thread; one block of ``change`` or ``look`` runs at a time."""

    def __init__(
        self, connection: sqlite3.Connection, keyring: Keyring, clock: Callable[[], float] = time.time
    ) -> None:
        """Use ``open_book``."""
        self._connection = connection
        self._keyring = keyring
        self._sealer = KeptSealer(keyring)
        self._lock = threading.RLock()
        self._clock = clock

    @property
    def now(self) -> int:
        """Unix time."""
        return int(self._clock())

    @contextmanager
    def look(self) -> Iterator[sqlite3.Connection]:
        """Yield the connection for reading.

        Raises:
            StoreRefusedError: disk or keyring fail.
        """
        with self._lock:
            try:
                yield self._connection
            except (sqlite3.Error, KeysError) as error:
                raise StoreRefusedError("failing") from error

    @contextmanager
    def change(self) -> Iterator[sqlite3.Connection]:
        """Yield the connection for one transaction, which an error undoes.

        Raises:
            StoreRefusedError: disk or keyring fail, or the block's own.
        """
        with self.look() as connection, connection:
            yield connection

    def kek(self, tenant: str) -> bytes:
        """Return the id of the key that seals what a tenant sends; one is drawn where it has none."""
        kek, _ = self._keyring.derive(tenant, b"", b"athanor-kept-id")
        return kek

    def holds(self, tenant: str, kek: bytes) -> bool:
        """Return whether a tenant's key still is the one of this id."""
        try:
            return self._keyring.key_id(tenant) == kek
        except KeysError:
            return False

    def seal(self, tenant: str, kind: str, owner: str, part: int, data: bytes) -> bytes:
        """Seal bytes of a tenant under a name."""
        return self._sealer.seal(KeptName(tenant, kind, owner, part), data)

    def unseal(self, tenant: str, kind: str, owner: str, part: int, sealed: bytes) -> bytes:
        """Open what was sealed under a name."""
        return self._sealer.open(KeptName(tenant, kind, owner, part), sealed)

    def note_used(self, connection: sqlite3.Connection, tenant: str, more: int) -> None:
        """Add to the bytes that a tenant keeps."""
        connection.execute(
            "INSERT INTO used VALUES (?, ?) ON CONFLICT (tenant) DO UPDATE SET bytes = MAX(0, bytes + excluded.bytes)",
            (tenant, more),
        )

    def used(self, connection: sqlite3.Connection, tenant: str) -> int:
        """Return the bytes that a tenant keeps."""
        row = connection.execute("SELECT bytes FROM used WHERE tenant = ?", (tenant,)).fetchone()
        return int(row[0]) if row is not None else 0

    def used_in_all(self, connection: sqlite3.Connection) -> int:
        """Return the bytes that all tenants keep."""
        return int(connection.execute("SELECT COALESCE(SUM(bytes), 0) FROM used").fetchone()[0])

    def note_entry(self, connection: sqlite3.Connection, key: str, entry: Entry) -> None:
        """Leave an entry for the audit log, which is written once under its key (``outbox``)."""
        text = json.dumps({"kind": entry.kind, **entry.fields}, separators=(",", ":"))
        connection.execute("INSERT OR IGNORE INTO outbox VALUES (?, ?, ?)", (key, int(self._clock() * 1_000), text))

    def pending(self, most: int) -> list[tuple[str, int, Entry]]:
        """Return the oldest entries that the log has not been seen to have, with their keys and times."""
        with self.look() as connection:
            rows = connection.execute("SELECT key, time_ms, entry FROM outbox ORDER BY rowid LIMIT ?", (most,))
            return [(key, time_ms, _entry(text)) for key, time_ms, text in rows]

    def note_logged(self, keys: list[str], log: str, size: int) -> None:
        """Forget entries that the log has; nothing that is left stands before its entry number ``size``."""
        with self.change() as connection:
            connection.executemany("DELETE FROM outbox WHERE key = ?", [(key,) for key in keys])
            connection.execute("DELETE FROM logged")
            connection.execute("INSERT INTO logged VALUES (?, ?)", (log, size))

    def logged(self, log: str) -> int:
        """Return the entry number of a log from which on it may have entries that are still left here."""
        with self.look() as connection:
            row = connection.execute("SELECT log, next FROM logged").fetchone()
        return int(row[1]) if row is not None and row[0] == log else 0

    def give_back(self) -> None:
        """Give pages that were freed back to the file system."""
        with self.look() as connection:
            connection.execute(f"PRAGMA incremental_vacuum({FREE_PAGES})").fetchall()

    def overwrite(self) -> None:
        """Take what was removed out of the write-ahead log as well.

        Raises:
            StoreRefusedError: the disk fails.
        """
        with self.look() as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def shred(self, tenant: str) -> bool:
        """Destroy a tenant's key while nothing else uses the book; False when there was none.

        Raises:
            KeysError: the medium refuses.
        """
        with self._lock:
            return self._keyring.shred(tenant)

    def close(self) -> None:
        """Close the book."""
        with self._lock:
            self._connection.close()


def new_id(kind: str) -> str:
    """Draw an id: ``file-`` or ``batch_`` and 32 digits."""
    return kind + secrets.token_hex(ID_BYTES)


def _entry(text: str) -> Entry:
    """Return an entry that was left here; fields that an earlier release did not write are 0 or empty."""
    values: dict[str, Any] = json.loads(text)
    kind = values.pop("kind")
    return Entry(kind, {name: of() for name, of in KINDS.get(kind, {}).items()} | values)


def open_book(folder: Path, keyring: Keyring, clock: Callable[[], float] = time.time) -> StoreBook:
    """Open the book of a folder, or begin one.

    Raises:
        StoreError: the folder cannot be used, or the book is damaged or of a newer version.
    """
    path = folder / NAME
    try:
        folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        folder.chmod(FOLDER_MODE)
        path.touch(FILE_MODE)
        connection = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False)
        try:
            _prepare(connection, path)
        except BaseException:
            connection.close()
            raise
    except OSError as error:
        raise StoreError(f"cannot use the folder of batches {folder}: {error.strerror or error}") from error
    except sqlite3.Error as error:
        raise StoreError(
            f"cannot open the book of files and batches {path}: {error}. If it is damaged, move it away: a new one "
            "begins, without the files and batches of the old one"
        ) from error
    return StoreBook(connection, keyring, clock)


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > SCHEMA:
        raise StoreError(
            f"the book of files and batches {path} has the form {version}, and this version knows {SCHEMA}; install "
            "the newer version again"
        )
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA secure_delete = ON")  # ids and names of what a shred removes are overwritten
    connection.executescript(TABLES)
    connection.execute(f"PRAGMA user_version = {SCHEMA}")
