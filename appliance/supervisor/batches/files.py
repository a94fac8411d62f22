"""Files of tenants in the book: uploads by pieces with an index of their lines, and results as files. Blocks."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from appliance.common.audit.entry import entry
from appliance.common.batches.messages import (
    Accepted,
    BeginUpload,
    EndUpload,
    FileBytes,
    FileDelete,
    FileFound,
    FileList,
    FileQuery,
    FileRead,
    FilesFound,
    UploadBegun,
)
from appliance.common.batches.values import (
    FILE_KEEP_S,
    LEAST_KEEP_S,
    MAX_FILE_BYTES,
    MAX_FILES,
    MAX_LINE_BYTES,
    MAX_LINES,
    MAX_NAME_CHARS,
    OPEN,
    OUTPUT_PURPOSE,
    PIECE_BYTES,
    PURPOSE,
    PURPOSES,
    StoredFile,
)
from appliance.common.errors import ControlError
from appliance.supervisor.batches.book import StoreBook, StoreRefusedError, new_id

MAX_UPLOADS = 64
"""Uploads at a time: what the gateway takes."""

MAX_LISTED = 1_000
"""Files of one answer: all that a tenant may upload."""

_COLUMNS = "id, purpose, name, size, created, expires, tenant"


@dataclass(slots=True)
class _Upload:
    """A file of which more comes."""

    tenant: str
    most: int
    principal: str
    indexed: bool
    """Whether a batch may read it, so that its lines are found, and bounded."""
    size: int = 0
    parts: int = 0
    line: int = 1
    """Number of the line that the next byte belongs to."""
    start: int = 0
    """Offset of its first byte."""
    blank: bool = True
    ended: bool = False
    """Whether a piece came that is no whole one, behind which none may follow."""
    lines: int = 0
    """Lines that are not blank."""
    found: list[tuple[int, int, int]] = field(default_factory=list)
    """Number, offset and bytes of lines that the last piece ended."""

    def read(self, data: bytes) -> None:
        """Find the ends of lines in the next bytes.

        Raises:
            StoreRefusedError: a line is too long, or there are too many.
        """
        at = 0
        while self.indexed and at < len(data):
            end = data.find(b"\n", at)
            stop = len(data) if end < 0 else end
            self.blank = self.blank and not data[at:stop].strip()
            if self.size + stop - self.start > MAX_LINE_BYTES:
                raise StoreRefusedError("line_too_long", self.line)
            if end >= 0:
                self.end_line(self.size + stop)
            at = stop + 1
        self.size += len(data)

    def end_line(self, stop: int) -> None:
        """Note the line that ends before an offset.

        Raises:
            StoreRefusedError: there are too many.
        """
        if not self.blank:
            self.lines += 1
            if self.lines > MAX_LINES:
                raise StoreRefusedError("too_many_lines", MAX_LINES)
            self.found.append((self.line, self.start, stop - self.start))
        self.line, self.start, self.blank = self.line + 1, stop + 1, True


class StoredFiles:
    """Files in one book; ``most`` are the bytes that all tenants together may keep."""

    def __init__(self, book: StoreBook, most: int) -> None:
        self._book = book
        self._most = most
        self._uploads: dict[str, _Upload] = {}
        self._cached: tuple[str, int, bytes] = "", 0, b""
        """The part that was opened last, in clear: lines are read in their order."""

    def begin(self, call: BeginUpload) -> UploadBegun:
        """Begin a file.

        Raises:
            StoreRefusedError: its tenant has too many.
            ControlError: no gateway sends that.
        """
        if len(call.name) > MAX_NAME_CHARS:
            raise ControlError("an upload that no gateway begins")
        if len(self._uploads) >= MAX_UPLOADS:
            raise StoreRefusedError("failing")
        book, tenant, name = self._book, call.tenant, new_id("file-")
        with book.change() as connection:
            found = connection.execute(
                "SELECT COUNT(*) FROM files WHERE tenant = ? AND purpose <> ?", (tenant, OUTPUT_PURPOSE)
            ).fetchone()
            if found[0] >= MAX_FILES:
                raise StoreRefusedError("too_many_files", MAX_FILES)
            kek, sealed = book.kek(tenant), book.seal(tenant, "name", name, 0, call.name.encode())
            now = book.now
            row = (name, tenant, kek, PURPOSE, "", 0, sealed, 0, 0, 0, now, now + FILE_KEEP_S)
            connection.execute(f"INSERT INTO files VALUES (NULL{', ?' * len(row)})", row)  # noqa: S608 - marks alone
        self._uploads[name] = _Upload(tenant, call.most, call.principal, bool(call.lines))
        return UploadBegun(name)

    def piece(self, file: str, data: bytes) -> Accepted:
        """Take the next bytes of a file; a file that is refused is gone.

        Raises:
            StoreRefusedError: file or store are full, or disk or keyring fail.
            ControlError: a piece follows one that was not whole.
        """
        upload, book = self._upload(file), self._book
        if upload.ended or not data or len(data) > PIECE_BYTES:
            raise ControlError("a piece of a file of another size than pieces have")
        upload.ended = len(data) < PIECE_BYTES
        try:
            if upload.size + len(data) > MAX_FILE_BYTES:
                raise StoreRefusedError("file_too_large", MAX_FILE_BYTES)
            upload.read(data)
            with book.change() as connection:
                if book.used(connection, upload.tenant) + len(data) > upload.most:
                    raise StoreRefusedError("tenant_full", upload.most)
                if book.used_in_all(connection) + len(data) > self._most:
                    raise StoreRefusedError("appliance_full")
                sealed = book.seal(upload.tenant, "file", file, upload.parts, data)
                connection.execute("INSERT INTO parts VALUES (?, ?, ?)", (file, upload.parts, sealed))
                self._index(connection, file, upload)
                connection.execute(
                    "UPDATE files SET size = ?, parts = ? WHERE id = ?", (upload.size, upload.parts + 1, file)
                )
                book.note_used(connection, upload.tenant, len(data))
        except StoreRefusedError:
            self.drop(file)
            raise
        upload.parts += 1
        return Accepted()

    def end(self, call: EndUpload) -> FileFound:
        """Take a file as whole.

        Raises:
            StoreRefusedError: disk or keyring fail.
            ControlError: it would be kept for a time, or for a purpose, that no gateway says.
        """
        file, keep_s = call.file, call.keep_s or FILE_KEEP_S
        if not LEAST_KEEP_S <= keep_s <= FILE_KEEP_S:
            raise ControlError("a file is not kept for this time")
        upload, book = self._upload(file), self._book
        if call.purpose not in PURPOSES or (call.purpose == PURPOSE and not upload.indexed):
            raise ControlError("a file is not kept for this purpose")
        try:
            if upload.indexed and upload.start < upload.size:
                upload.end_line(upload.size)
            with book.change() as connection:
                self._index(connection, file, upload)
                connection.execute(
                    "UPDATE files SET whole = 1, purpose = ?, expires = created + ? WHERE id = ?",
                    (call.purpose, keep_s, file),
                )
                self._audit(connection, "created", upload.tenant, upload.principal, file, upload.size)
                found = _found(connection, upload.tenant, file)
                if found is None:
                    raise StoreRefusedError("unknown")
                answer = self._told(found)
        except StoreRefusedError:
            self.drop(file)
            raise
        del self._uploads[file]
        return FileFound(answer)

    def drop(self, file: str) -> Accepted:
        """Forget an upload."""
        upload = self._uploads.pop(file, None)
        if upload is not None:
            with self._book.change() as connection:
                self.remove(connection, file)
        return Accepted()

    def drop_uploads(self) -> None:
        """Forget all uploads, also those of an earlier run."""
        self._uploads.clear()
        with self._book.change() as connection:
            for (file,) in connection.execute("SELECT id FROM files WHERE whole = 0").fetchall():
                self.remove(connection, file)

    def find(self, call: FileQuery) -> FileFound:
        """Return a file's facts.

        Raises:
            StoreRefusedError: there is none of this tenant.
        """
        with self._book.look() as connection:
            return FileFound(self._told(_known(connection, call.tenant, call.file)))

    def page(self, call: FileList) -> FilesFound:
        """Return a page of a tenant's files.

        Raises:
            StoreRefusedError: there is no file to begin behind.
        """
        limit = max(1, min(call.limit, MAX_LISTED))
        order, beyond = ("ASC", ">") if call.ascending else ("DESC", "<")
        clauses, values = ["tenant = ?", "whole = 1"], [call.tenant]
        if call.purpose:
            clauses.append("purpose = ?")
            values.append(call.purpose)
        with self._book.look() as connection:
            if call.after:
                if _found(connection, call.tenant, call.after) is None:
                    raise StoreRefusedError("unknown_after")
                clauses.append(f"seq {beyond} (SELECT seq FROM files WHERE id = ?)")  # noqa: S608 - a constant
                values.append(call.after)
            rows = connection.execute(
                f"SELECT {_COLUMNS} FROM files WHERE {' AND '.join(clauses)} ORDER BY seq {order} LIMIT {limit + 1}",  # noqa: S608 - constants
                values,
            ).fetchall()
            return FilesFound([self._told(row) for row in rows[:limit]], int(len(rows) > limit))

    def read(self, call: FileRead) -> tuple[FileBytes, bytes]:
        """Return the next bytes of a file.

        Raises:
            StoreRefusedError: there is none of this tenant, or it does not open.
        """
        with self._book.look() as connection:
            _known(connection, call.tenant, call.file)
            purpose, batch, ok, parts = connection.execute(
                "SELECT purpose, batch, ok, parts FROM files WHERE id = ?", (call.file,)
            ).fetchone()
            if purpose == OUTPUT_PURPOSE:
                return self._read_results(connection, call.tenant, batch, ok, call.after)
            if call.after >= parts:
                return FileBytes(parts, 1), b""
            data = self._part(connection, call.tenant, call.file, call.after)
            return FileBytes(call.after + 1, int(call.after + 1 >= parts)), data

    def _read_results(
        self, connection: sqlite3.Connection, tenant: str, batch: str, ok: int, after: int
    ) -> tuple[FileBytes, bytes]:
        rows = connection.execute(
            "SELECT line, data FROM results WHERE batch = ? AND ok = ? AND line > ? ORDER BY line", (batch, ok, after)
        )
        texts: list[bytes] = []
        size = 0
        for line, sealed in rows:
            if size >= PIECE_BYTES:
                return FileBytes(after, 0), b"".join(texts)
            text = self._book.unseal(tenant, "result", batch, line, sealed)
            texts.append(text)
            size, after = size + len(text), line
        return FileBytes(after, 1), b"".join(texts)

    def delete(self, call: FileDelete) -> Accepted:
        """Delete a file.

        Raises:
            StoreRefusedError: there is none of this tenant, or a batch needs it.
        """
        with self._book.change() as connection:
            row = _known(connection, call.tenant, call.file)
            if _needed(connection, call.file):
                raise StoreRefusedError("in_use")
            self.remove(connection, call.file)
            self._audit(connection, "deleted", call.tenant, call.principal, call.file, row[3])
        return Accepted()

    def expire(self, most: int) -> int:
        """Remove at most so many files whose time is over; returns how many there were."""
        now = self._book.now
        with self._book.change() as connection:
            rows = connection.execute(
                "SELECT id, tenant, size FROM files WHERE whole = 1 AND expires <= ? LIMIT ?", (now, most)
            ).fetchall()
            gone = [row for row in rows if not _needed(connection, row[0])]
            for file, tenant, size in gone:
                self.remove(connection, file)
                self._audit(connection, "expired", tenant, "", file, size)
        return len(gone)

    def remove(self, connection: sqlite3.Connection, file: str) -> None:
        """Remove a file and its content from the book."""
        row = connection.execute("SELECT tenant, purpose, batch, ok, size FROM files WHERE id = ?", (file,)).fetchone()
        if row is None:
            return
        tenant, purpose, batch, ok, size = row
        if purpose == OUTPUT_PURPOSE:
            connection.execute("DELETE FROM results WHERE batch = ? AND ok = ?", (batch, ok))
        for table in ("parts", "lines"):
            connection.execute(f"DELETE FROM {table} WHERE file = ?", (file,))  # noqa: S608 - a constant
        connection.execute("DELETE FROM files WHERE id = ?", (file,))
        self._book.note_used(connection, tenant, -size)
        if self._cached[0] == file:
            self.forget_opened()

    def forget_opened(self) -> None:
        """Drop the part that was opened last: its file may not be read any further."""
        self._cached = "", 0, b""

    def text(self, connection: sqlite3.Connection, tenant: str, file: str, start: int, size: int) -> bytes:
        """Return bytes of an uploaded file."""
        first, last = start // PIECE_BYTES, max(start, start + size - 1) // PIECE_BYTES
        data = b"".join(self._part(connection, tenant, file, number) for number in range(first, last + 1))
        return data[start - first * PIECE_BYTES :][:size]

    def make_results(self, connection: sqlite3.Connection, tenant: str, batch: str, keep_s: int, *, ok: int) -> str:
        """Make a file of the results of a batch, good or bad ones, and keep it for so many seconds; returns its id,
        empty where there are none."""
        count, size = connection.execute(
            "SELECT COUNT(*), COALESCE(SUM(size), 0) FROM results WHERE batch = ? AND ok = ?", (batch, ok)
        ).fetchone()
        if not count:
            return ""
        book, file = self._book, new_id("file-")
        kek, now = book.kek(tenant), book.now
        name = book.seal(tenant, "name", file, 0, f"{batch}_{'output' if ok else 'error'}.jsonl".encode())
        row = (file, tenant, kek, OUTPUT_PURPOSE, batch, ok, name, size, 0, 1, now, now + keep_s)
        connection.execute(f"INSERT INTO files VALUES (NULL{', ?' * len(row)})", row)  # noqa: S608 - marks alone
        return file

    def _part(self, connection: sqlite3.Connection, tenant: str, file: str, number: int) -> bytes:
        if self._cached[:2] == (file, number):
            return self._cached[2]
        row = connection.execute("SELECT data FROM parts WHERE file = ? AND number = ?", (file, number)).fetchone()
        if row is None:
            raise StoreRefusedError("failing")
        data = self._book.unseal(tenant, "file", file, number, row[0])
        self._cached = file, number, data
        return data

    def _index(self, connection: sqlite3.Connection, file: str, upload: _Upload) -> None:
        connection.executemany("INSERT INTO lines VALUES (?, ?, ?, ?)", [(file, *one) for one in upload.found])
        upload.found.clear()

    def _told(self, row: Sequence[Any]) -> StoredFile:
        name, purpose, sealed, size, created, expires, tenant = row
        text = self._book.unseal(tenant, "name", name, 0, sealed).decode()
        return StoredFile(name, purpose, text, size, created, expires)

    def _upload(self, file: str) -> _Upload:
        upload = self._uploads.get(file)
        if upload is None:
            raise StoreRefusedError("unknown")
        return upload

    def _audit(
        self, connection: sqlite3.Connection, event: str, tenant: str, principal: str, file: str, size: int
    ) -> None:
        one = entry("file", event=event, tenant=tenant, principal=principal, file=file, bytes=size)
        self._book.note_entry(connection, f"{file} {event}", one)


def _found(connection: sqlite3.Connection, tenant: str, file: str) -> Sequence[Any] | None:
    row: Sequence[Any] | None = connection.execute(
        f"SELECT {_COLUMNS} FROM files WHERE id = ? AND tenant = ? AND whole = 1",  # noqa: S608 - constants
        (file, tenant),
    ).fetchone()
    return row


def _known(connection: sqlite3.Connection, tenant: str, file: str) -> Sequence[Any]:
    row = _found(connection, tenant, file)
    if row is None:
        raise StoreRefusedError("unknown")
    return row


def _needed(connection: sqlite3.Connection, file: str) -> bool:
    """Whether a batch that is not over reads a file."""
    marks = ", ".join("?" * len(OPEN))
    return (
        connection.execute(
            f"SELECT 1 FROM batches WHERE input_file = ? AND status IN ({marks}) LIMIT 1",  # noqa: S608 - marks alone
            (file, *OPEN),
        ).fetchone()
        is not None
    )
