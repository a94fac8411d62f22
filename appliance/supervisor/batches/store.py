"""The store of files, batches and responses: calls of the gateway carried out in the book. Blocks; may be called from
any thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from appliance.common.batches.messages import (
    Accepted,
    BatchCancel,
    BatchChecked,
    BatchEnd,
    BatchList,
    BatchQuery,
    BeginBatch,
    BeginUpload,
    DropUpload,
    EndUpload,
    FileDelete,
    FileList,
    FileQuery,
    FileRead,
    ForgetTenants,
    LineQuery,
    LineResult,
    OpenBatches,
    ResponseDelete,
    ResponseKeep,
    ResponseRead,
    StoreAnswer,
    StoreFrame,
    StoreRefused,
    UploadPiece,
)
from appliance.common.batches.values import FILE_KEEP_S
from appliance.common.errors import ControlError
from appliance.supervisor.batches.book import StoreBook, StoreRefusedError, open_book
from appliance.supervisor.batches.files import StoredFiles
from appliance.supervisor.batches.lines import StoredBatches
from appliance.supervisor.batches.responses import StoredResponses
from isolation.keys.errors import KeyringError
from isolation.keys.keyring import Keyring

REMOVED_AT_ONCE = 8
"""Files, batches or responses that are removed in one transaction, so that no call waits for long."""


class BatchStore:
    """Files, batches and responses of all tenants."""

    def __init__(self, book: StoreBook, most: int) -> None:
        """Forget uploads that an earlier run began, and what was sealed under keys that are gone. ``most`` are the
        bytes that all tenants together may keep."""
        self.book, self._most = book, most
        self._files = StoredFiles(book, most)
        self._batches = StoredBatches(book, self._files)
        self._responses = StoredResponses(book, most)
        self._lock = threading.Lock()
        """Held for each call, so that the gateway's calls and the operator's orders do not meet in the middle."""
        self._files.drop_uploads()
        self.forgotten = self._forget_unreadable()
        """Files, batches and responses whose keys were found destroyed."""
        files, batches = self._files, self._batches
        self._does: dict[type, Callable[[Any], StoreAnswer]] = {
            BeginUpload: files.begin,
            EndUpload: files.end,
            DropUpload: lambda call: files.drop(call.file),
            FileQuery: files.find,
            FileList: files.page,
            FileDelete: files.delete,
            BeginBatch: batches.begin,
            BatchQuery: batches.find,
            BatchList: batches.page,
            BatchCancel: batches.cancel,
            OpenBatches: lambda _call: batches.open(),
            BatchChecked: batches.checked,
            BatchEnd: batches.end,
            ForgetTenants: self._forget_tenants,
            ResponseDelete: self._responses.delete,
        }

    def answer(self, frames: Sequence[StoreFrame]) -> list[StoreFrame]:
        """Carry out calls in their order; results of lines that follow each other are taken together.

        Raises:
            ControlError: one is none that a gateway sends.
        """
        answers: list[StoreFrame] = []
        results: list[StoreFrame] = []
        with self._lock:
            for frame in frames:
                if isinstance(frame.message, LineResult):
                    results.append(frame)
                    continue
                answers += self._take(results)
                results = []
                answers.append(self._answer(frame))
            return answers + self._take(results)

    def _take(self, frames: list[StoreFrame]) -> list[StoreFrame]:
        if not frames:
            return []
        answer: StoreAnswer = Accepted()
        try:
            pairs = [(one.message, one.payload) for one in frames if isinstance(one.message, LineResult)]
            self._batches.take(pairs)
        except StoreRefusedError as error:
            answer = StoreRefused(error.reason, error.number)
        return [StoreFrame(one.call, answer) for one in frames]

    def _answer(self, frame: StoreFrame) -> StoreFrame:
        call, message = frame.call, frame.message
        try:
            if isinstance(message, UploadPiece):
                return StoreFrame(call, self._files.piece(message.file, frame.payload))
            if isinstance(message, FileRead):
                return StoreFrame(call, *self._files.read(message))
            if isinstance(message, LineQuery):
                return StoreFrame(call, *self._batches.lines(message))
            if isinstance(message, ResponseKeep):
                return StoreFrame(call, self._responses.keep(message, frame.payload))
            if isinstance(message, ResponseRead):
                return StoreFrame(call, *self._responses.read(message))
            does = self._does.get(type(message))
            if does is None:
                raise ControlError(f"{type(message).__name__} is not for the supervisor")
            return StoreFrame(call, does(message))
        except StoreRefusedError as error:
            return StoreFrame(call, StoreRefused(error.reason, error.number))

    def gateway_left(self) -> None:
        """Forget uploads that nobody goes on with.

        Raises:
            StoreRefusedError: the disk fails; the next start forgets them.
        """
        with self._lock:
            self._files.drop_uploads()

    def tidy(self) -> bool:
        """Remove some files, batches and responses whose time is over, and drop what is open in clear; returns whether
        there may be more to remove.

        Raises:
            StoreRefusedError: the disk fails.
        """
        with self._lock:
            gone = self._files.expire(REMOVED_AT_ONCE)
            gone += self._batches.expire(self.book.now - FILE_KEEP_S, REMOVED_AT_ONCE)
            gone += self._responses.expire(REMOVED_AT_ONCE)
            self._files.forget_opened()
            self.book.give_back()
        return gone >= REMOVED_AT_ONCE

    def forget(self, tenant: str) -> int:
        """Remove all files, batches and responses of a tenant; returns how many there were.

        Raises:
            StoreRefusedError: the disk fails.
        """
        with self._lock:
            return self._forget(tenant)

    def shred(self, tenant: str) -> int:
        """Destroy a tenant's key, and remove what it sealed; returns how many objects there were.

        Raises:
            KeyringError: the medium refuses; what is left is unreadable.
        """
        with self._lock:
            self.book.shred(tenant)
            try:
                count = self._forget(tenant)
                self.book.overwrite()
            except StoreRefusedError as error:
                raise KeyringError(f"the key of {tenant} is destroyed; files that it sealed are left") from error
            return count

    def figures(self) -> dict[str, int]:
        """Return what is kept, by name.

        Raises:
            StoreRefusedError: the disk fails.
        """
        with self._lock, self.book.look() as connection:
            (files,) = connection.execute("SELECT COUNT(*) FROM files WHERE whole = 1").fetchone()
            open_batches, left, oldest = connection.execute(
                "SELECT COUNT(*), COALESCE(SUM(total - completed - failed), 0), MIN(created) FROM batches "
                "WHERE over_at = 0"
            ).fetchone()
            (responses,) = connection.execute("SELECT COUNT(*) FROM responses").fetchone()
            used = self.book.used_in_all(connection)
        return {
            "files": files,
            "bytes": used,
            "open_batches": open_batches,
            "waiting_lines": left,
            "responses": responses,
            "oldest_s": 0 if oldest is None else max(0, self.book.now - oldest),
            "max_bytes": self._most,
        }

    def close(self) -> None:
        """Close the book."""
        with self._lock:
            self.book.close()

    def _forget_tenants(self, call: ForgetTenants) -> Accepted:
        for tenant in call.tenants:
            self._forget(tenant)
        return Accepted()

    def _forget(self, tenant: str) -> int:
        return self._remove("WHERE tenant = ?", (tenant,))

    def _forget_unreadable(self) -> int:
        """Remove what was sealed under keys that are gone: destroyed while no supervisor ran, or renewed."""
        count = 0
        with self.book.look() as connection:
            keks = connection.execute(
                "SELECT tenant, kek FROM files UNION SELECT tenant, kek FROM batches "
                "UNION SELECT tenant, kek FROM responses"
            ).fetchall()
        for tenant, kek in keks:
            if not self.book.holds(tenant, kek):
                count += self._remove("WHERE tenant = ? AND kek = ?", (tenant, kek))
        if count:
            self.book.overwrite()
        return count

    def _remove(self, where: str, values: tuple[Any, ...]) -> int:
        """Remove what a clause finds in each table; a batch goes before its files, which go with it."""
        count = 0
        kinds = {"batches": self._batches.remove, "files": self._files.remove, "responses": self._responses.remove}
        with self.book.change() as connection:
            for table, remove in kinds.items():
                found = connection.execute(f"SELECT id FROM {table} {where}", values).fetchall()  # noqa: S608 - constants
                for (one,) in found:
                    remove(connection, one)
                count += len(found)
        return count


def open_store(folder: Path, keyring: Keyring, most: int, clock: Callable[[], float] = time.time) -> BatchStore:
    """Open the store of a folder.

    Raises:
        StoreError: it cannot be used.
    """
    return BatchStore(open_book(folder, keyring, clock), most)
