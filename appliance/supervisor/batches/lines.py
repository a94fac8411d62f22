"""Batches of tenants in the book: made of a file, line by line given a result, and ended. Blocks.

A line has a result or has none. Its result comes with the entry that charges it, in one transaction; a second result
of a line changes nothing. So a line may be run again after a crash, and is answered and charged once.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from appliance.common.audit.entry import Entry, EntryError, entry, from_wire
from appliance.common.batches.messages import (
    Accepted,
    BatchCancel,
    BatchChecked,
    BatchEnd,
    BatchesFound,
    BatchFound,
    BatchList,
    BatchQuery,
    BeginBatch,
    LineQuery,
    LineResult,
    LinesFound,
)
from appliance.common.batches.values import (
    CANCELLED,
    CANCELLING,
    COMPLETED,
    ENDPOINTS,
    EXPIRED,
    FAILED,
    FILE_KEEP_S,
    IN_PROGRESS,
    LEAST_KEEP_S,
    MAX_BATCHES,
    MAX_LINES_GIVEN,
    MAX_OPEN_BATCHES,
    MAX_OPEN_IN_ALL,
    MAX_PROBLEMS,
    MAX_PROMPTS,
    MAX_RESULT_BYTES,
    OPEN,
    PIECE_BYTES,
    PURPOSE,
    VALIDATING,
    WINDOWS,
    LineProblem,
    StoredBatch,
    line_request,
)
from appliance.common.errors import ControlError
from appliance.supervisor.batches.book import StoreBook, StoreRefusedError, new_id
from appliance.supervisor.batches.files import StoredFiles

MAX_LISTED = 100
"""Batches of one answer."""

KEY_BYTES = 16
"""Bytes of the digest of a key under which a tenant makes one batch."""

_COLUMNS = (
    *("id", "tenant", "credential", "endpoint", "input_file", "status", "created", "expires", "output_file"),
    *("error_file", "in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at"),
    *("cancelled_at", "total", "completed", "failed"),
)
"""Columns that are fields of ``StoredBatch``, in their order."""

_SELECT = f"SELECT {', '.join(_COLUMNS)}, notes FROM batches"  # noqa: S608 - a constant
_OPEN = ", ".join(f"'{status}'" for status in OPEN)

_MOMENTS = {COMPLETED: "completed_at", EXPIRED: "expired_at", CANCELLED: "cancelled_at", FAILED: "failed_at"}
"""State of a batch that is over -> column of the time at which it was."""


class StoredBatches:
    """Batches in one book."""

    def __init__(self, book: StoreBook, files: StoredFiles) -> None:
        self._book = book
        self._files = files

    def begin(self, call: BeginBatch) -> BatchFound:
        """Make a batch of a file, or return the one that the tenant has made with the same key.

        Raises:
            StoreRefusedError: there is no such upload of the tenant, it has too many batches, or it has made another
                one with this key.
            ControlError: no gateway sends that.
        """
        keeps = call.output_keep_s == 0 or LEAST_KEEP_S <= call.output_keep_s <= FILE_KEEP_S
        if call.endpoint not in ENDPOINTS or call.window_s not in WINDOWS.values() or not keeps:
            raise ControlError("a batch that no gateway makes")
        book, tenant = self._book, call.tenant
        with book.change() as connection:
            if call.key and (made := _made_with_key(connection, call)) is not None:
                return BatchFound(_same(self._told(made), call))
            row = connection.execute(
                "SELECT 1 FROM files WHERE id = ? AND tenant = ? AND whole = 1 AND purpose = ?",
                (call.file, tenant, PURPOSE),
            ).fetchone()
            if row is None:
                raise StoreRefusedError("unknown")
            self._check_room(connection, tenant)
            (total,) = connection.execute("SELECT COUNT(*) FROM lines WHERE file = ?", (call.file,)).fetchone()
            batch, now = new_id("batch_"), book.now
            connection.execute(
                "INSERT INTO batches (id, tenant, kek, credential, endpoint, input_file, status, created, expires, "
                "total, notes) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(batch, tenant, book.kek(tenant), call.principal, call.endpoint, call.file, VALIDATING, now),
                    *(now + call.window_s, total, self._notes(tenant, batch, call.metadata, [], call.output_keep_s)),
                ),
            )
            if call.key:
                connection.execute("INSERT OR REPLACE INTO batch_keys VALUES (?, ?)", (_key_of(call), batch))
            self._audit(connection, "created", batch, tenant, call.principal)
            return BatchFound(self._told(_row(connection, batch)))

    def find(self, call: BatchQuery) -> BatchFound:
        """Return a batch.

        Raises:
            StoreRefusedError: there is none of this tenant.
        """
        with self._book.look() as connection:
            return BatchFound(self._told(_row(connection, call.batch, call.tenant)))

    def page(self, call: BatchList) -> BatchesFound:
        """Return a page of a tenant's batches.

        Raises:
            StoreRefusedError: there is no batch to begin behind.
        """
        limit = max(1, min(call.limit, MAX_LISTED))
        with self._book.look() as connection:
            values: list[str | int] = [call.tenant]
            clause = "tenant = ?"
            if call.after:
                try:
                    _row(connection, call.after, call.tenant)
                except StoreRefusedError:
                    raise StoreRefusedError("unknown_after") from None
                clause += " AND seq < (SELECT seq FROM batches WHERE id = ?)"
                values.append(call.after)
            rows = connection.execute(
                f"{_SELECT} WHERE {clause} ORDER BY seq DESC LIMIT {limit + 1}", values
            ).fetchall()
            return BatchesFound([self._told(row) for row in rows[:limit]], int(len(rows) > limit))

    def open(self) -> BatchesFound:
        """Return the batches of all tenants that are not over, the oldest first, without metadata and problems."""
        with self._book.look() as connection:
            rows = connection.execute(f"{_SELECT} WHERE status IN ({_OPEN}) ORDER BY seq").fetchall()
            return BatchesFound([_plain(row) for row in rows], 0)

    def cancel(self, call: BatchCancel) -> BatchFound:
        """Cancel a batch: no line of it begins any more.

        Raises:
            StoreRefusedError: there is none of this tenant, or it is over.
        """
        with self._book.change() as connection:
            status = self._told(_row(connection, call.batch, call.tenant)).status
            if status not in OPEN:
                raise StoreRefusedError("over")
            if status != CANCELLING:
                connection.execute(
                    "UPDATE batches SET status = ?, cancelling_at = ? WHERE id = ?",
                    (CANCELLING, self._book.now, call.batch),
                )
                self._audit(connection, "cancelled", call.batch, call.tenant, call.principal)
            return BatchFound(self._told(_row(connection, call.batch)))

    def checked(self, call: BatchChecked) -> BatchFound:
        """Take what reading a batch's file found: its lines may run, or it has failed.

        Raises:
            StoreRefusedError: there is no such batch.
            ControlError: more problems than are told.
        """
        if len(call.problems) > MAX_PROBLEMS:
            raise ControlError("too many problems of one file")
        with self._book.change() as connection:
            one = self._told(_row(connection, call.batch))
            if one.status != VALIDATING:
                return BatchFound(one)
            if call.problems:
                notes = self._notes(one.tenant, one.id, one.metadata, call.problems, one.output_keep_s)
                connection.execute("UPDATE batches SET notes = ? WHERE id = ?", (notes, one.id))
                self._end(connection, one, FAILED)
            else:
                connection.execute(
                    "UPDATE batches SET status = ?, in_progress_at = ? WHERE id = ?",
                    (IN_PROGRESS, self._book.now, one.id),
                )
            return BatchFound(self._told(_row(connection, call.batch)))

    def lines(self, call: LineQuery) -> tuple[LinesFound, bytes]:
        """Return lines that have no result, behind one.

        Raises:
            StoreRefusedError: there is no such batch, or its file does not open.
        """
        most = max(1, min(call.count, MAX_LINES_GIVEN))
        with self._book.look() as connection:
            one = _plain(_row(connection, call.batch))
            rows = connection.execute(
                "SELECT number, start, size FROM lines WHERE file = ? AND number > ? AND NOT EXISTS (SELECT 1 FROM "
                "results WHERE batch = ? AND line = number) ORDER BY number LIMIT ?",
                (one.input_file, call.after, one.id, most + 1),
            ).fetchall()
            texts: list[bytes] = []
            taken = 0
            for _, start, size in rows[:most]:
                if taken and taken + size > PIECE_BYTES:
                    break
                texts.append(self._files.text(connection, one.tenant, one.input_file, start, size))
                taken += size
            given = rows[: len(texts)]
            stored = self._book.used(connection, one.tenant)
        numbers, sizes = [row[0] for row in given], [row[2] for row in given]
        return LinesFound(numbers, sizes, int(len(given) == len(rows)), stored), b"".join(texts)

    def take(self, results: Sequence[tuple[LineResult, bytes]]) -> None:
        """Take results of lines, all in one transaction. Those of batches that are gone or over, and second ones of a
        line, change nothing.

        Raises:
            StoreRefusedError: disk or keyring fail; none is taken.
            ControlError: no gateway sends one of them; none is taken.
        """
        with self._book.change() as connection:
            for call, data in results:
                row = connection.execute(
                    f"SELECT tenant, input_file FROM batches WHERE id = ? AND status IN ({_OPEN})",  # noqa: S608
                    (call.batch,),
                ).fetchone()
                if row is not None:
                    self._take(connection, row[0], row[1], call, data)
            for batch in dict.fromkeys(call.batch for call, _ in results):
                self._end_if_done(connection, batch)

    def _take(self, connection: sqlite3.Connection, tenant: str, file: str, call: LineResult, data: bytes) -> None:
        known = connection.execute("SELECT 1 FROM lines WHERE file = ? AND number = ?", (file, call.line)).fetchone()
        if known is None or len(data) > MAX_RESULT_BYTES:
            raise ControlError("a result of no line, or a longer one than there are")
        charges = _charges(call, tenant)
        sealed = self._book.seal(tenant, "result", call.batch, call.line, data)
        done = connection.execute(
            "INSERT OR IGNORE INTO results VALUES (?, ?, ?, ?, ?)",
            (call.batch, call.line, int(call.ok != 0), len(data), sealed),
        ).rowcount
        if not done:
            return
        for charge in charges:
            self._book.note_entry(connection, str(charge.fields["request"]), charge)
        self._book.note_used(connection, tenant, len(data))
        column = "completed" if call.ok else "failed"
        connection.execute(f"UPDATE batches SET {column} = {column} + 1 WHERE id = ?", (call.batch,))  # noqa: S608

    def end(self, call: BatchEnd) -> Accepted:
        """End a batch whose window is over, once its last line has a result, or a cancelled one of which nothing runs.

        Raises:
            StoreRefusedError: there is no such batch.
            ControlError: no gateway sends that.
        """
        if call.why not in (EXPIRED, CANCELLED):
            raise ControlError("a batch does not end like that")
        with self._book.change() as connection:
            one = self._told(_row(connection, call.batch))
            if call.why == CANCELLED and one.status == CANCELLING:
                self._end(connection, one, CANCELLED)
            elif call.why == EXPIRED and one.status in (IN_PROGRESS, VALIDATING):
                connection.execute("UPDATE batches SET ending = ? WHERE id = ?", (EXPIRED, one.id))
                self._end_if_done(connection, one.id)
        return Accepted()

    def remove(self, connection: sqlite3.Connection, batch: str) -> None:
        """Remove a batch and the files of its results."""
        for (file,) in connection.execute("SELECT id FROM files WHERE batch = ?", (batch,)).fetchall():
            self._files.remove(connection, file)
        row = connection.execute("SELECT tenant FROM batches WHERE id = ?", (batch,)).fetchone()
        (left,) = connection.execute("SELECT COALESCE(SUM(size), 0) FROM results WHERE batch = ?", (batch,)).fetchone()
        if row is not None and left:
            self._book.note_used(connection, row[0], -left)
        connection.execute("DELETE FROM results WHERE batch = ?", (batch,))
        connection.execute("DELETE FROM batch_keys WHERE batch = ?", (batch,))
        connection.execute("DELETE FROM batches WHERE id = ?", (batch,))

    def expire(self, before: int, most: int) -> int:
        """Remove at most so many batches that were over before a time; returns how many there were."""
        with self._book.change() as connection:
            rows = connection.execute(
                "SELECT id FROM batches WHERE over_at > 0 AND over_at <= ? LIMIT ?", (before, most)
            ).fetchall()
            for (batch,) in rows:
                self.remove(connection, batch)
        return len(rows)

    def _check_room(self, connection: sqlite3.Connection, tenant: str) -> None:
        """Check that a tenant may have one more batch.

        Raises:
            StoreRefusedError: it may not.
        """
        mine, mine_open = connection.execute(
            f"SELECT COUNT(*), COALESCE(SUM(status IN ({_OPEN})), 0) FROM batches WHERE tenant = ?",  # noqa: S608
            (tenant,),
        ).fetchone()
        (in_all,) = connection.execute(f"SELECT COUNT(*) FROM batches WHERE status IN ({_OPEN})").fetchone()  # noqa: S608
        if mine_open >= MAX_OPEN_BATCHES or mine >= MAX_BATCHES:
            raise StoreRefusedError("too_many_batches", MAX_OPEN_BATCHES if mine < MAX_BATCHES else MAX_BATCHES)
        if in_all >= MAX_OPEN_IN_ALL:
            raise StoreRefusedError("appliance_full")

    def _end_if_done(self, connection: sqlite3.Connection, batch: str) -> None:
        row = connection.execute(
            "SELECT ending FROM batches WHERE id = ? AND status = ? AND completed + failed >= total",
            (batch, IN_PROGRESS),
        ).fetchone()
        if row is not None:
            self._end(connection, self._told(_row(connection, batch)), row[0] or COMPLETED)

    def _end(self, connection: sqlite3.Connection, one: StoredBatch, status: str) -> None:
        """End a batch: its results become files."""
        now, keep_s = self._book.now, one.output_keep_s or FILE_KEEP_S
        output, errors = (self._files.make_results(connection, one.tenant, one.id, keep_s, ok=ok) for ok in (1, 0))
        moment = _MOMENTS[status]
        connection.execute(
            f"UPDATE batches SET status = ?, {moment} = ?, over_at = ?, finalizing_at = ?, output_file = ?, "  # noqa: S608 - constants
            "error_file = ? WHERE id = ?",
            (status, now, now, 0 if status == FAILED else now, output, errors, one.id),
        )
        self._audit(connection, status, one.id, one.tenant, "")

    def _notes(
        self, tenant: str, batch: str, metadata: dict[str, str], problems: list[LineProblem], keep_s: int
    ) -> bytes:
        told = {"metadata": metadata, "problems": [asdict(one) for one in problems], "output_keep_s": keep_s}
        return self._book.seal(tenant, "notes", batch, 0, json.dumps(told).encode())

    def _told(self, row: Sequence[Any]) -> StoredBatch:
        one = _plain(row)
        notes = json.loads(self._book.unseal(one.tenant, "notes", one.id, 0, row[len(_COLUMNS)]))
        one.metadata.update(notes["metadata"])
        one.problems.extend(LineProblem(**problem) for problem in notes["problems"])
        return replace(one, output_keep_s=notes.get("output_keep_s", 0))  # Batches of earlier versions have none.

    def _audit(self, connection: sqlite3.Connection, event: str, batch: str, tenant: str, principal: str) -> None:
        row = connection.execute(
            "SELECT endpoint, total, completed, failed FROM batches WHERE id = ?", (batch,)
        ).fetchone()
        one = entry(
            "batch",
            event=event,
            tenant=tenant,
            principal=principal,
            batch=batch,
            endpoint=row[0],
            lines=row[1],
            completed=row[2],
            failed=row[3],
        )
        # A batch is cancelled twice: when it is asked for, and when the last line has ended.
        self._book.note_entry(connection, f"{batch} {event} {bool(principal)}", one)


def _key_of(call: BeginBatch) -> bytes:
    """Digest of a tenant and its key: the book has neither in the clear beside the other's."""
    return hashlib.blake2b(f"{call.tenant}\0{call.key}".encode(), digest_size=KEY_BYTES).digest()


def _made_with_key(connection: sqlite3.Connection, call: BeginBatch) -> Sequence[Any] | None:
    """Return the batch that the tenant has made with the key of a call; None where it has made none. A release before
    keys removes batches and leaves their keys, which mean nothing any more."""
    query = f"{_SELECT} WHERE id = (SELECT batch FROM batch_keys WHERE key = ?)"  # noqa: S608 - a constant
    found: Sequence[Any] | None = connection.execute(query, (_key_of(call),)).fetchone()
    return found


def _same(one: StoredBatch, call: BeginBatch) -> StoredBatch:
    """Return a batch that is the one that is asked for.

    Raises:
        StoreRefusedError: its file, endpoint, window, metadata or time of results are others.
    """
    asked = (call.file, call.endpoint, call.window_s, call.metadata, call.output_keep_s)
    if asked != (one.input_file, one.endpoint, one.expires - one.created, one.metadata, one.output_keep_s):
        raise StoreRefusedError("other_batch")
    return one


def _plain(row: Sequence[Any]) -> StoredBatch:
    """Return a batch without what is sealed of it."""
    return StoredBatch(**dict(zip(_COLUMNS, row, strict=False)))


def _row(connection: sqlite3.Connection, batch: str, tenant: str | None = None) -> Sequence[Any]:
    """Return a batch's row, of any tenant where none is named.

    Raises:
        StoreRefusedError: there is none.
    """
    row: Sequence[Any] | None = connection.execute(f"{_SELECT} WHERE id = ?", (batch,)).fetchone()
    if row is None or (tenant is not None and row[1] != tenant):
        raise StoreRefusedError("unknown")
    return row


def _charges(call: LineResult, tenant: str) -> list[Entry]:
    """Return the entries that charge a line.

    Raises:
        ControlError: one is of another request, or there are two of one.
    """
    if len(call.entries) > MAX_PROMPTS:
        raise ControlError("a line with more entries than prompts")
    expected = {line_request(call.batch, call.line, prompt) for prompt in range(MAX_PROMPTS)}
    found = []
    for text in call.entries:
        try:
            one = from_wire(text)
        except EntryError as error:
            raise ControlError(str(error)) from error
        fields = one.fields
        owned = (fields.get("tenant"), fields.get("batch")) == (tenant, call.batch)
        if one.kind != "request" or not owned or fields["request"] not in expected:
            raise ControlError("the entry of a line is not the line's")
        expected.discard(str(fields["request"]))
        found.append(one)
    return found
