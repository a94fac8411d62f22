"""Entries of files and batches on their way from the book to the audit log: each is written there once.

An entry stays in the book until the log is known to have it. Before a start goes on, entries that a crash left in the
book are compared with those that the log has since the book last knew its length; so none is written twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

import structlog

from appliance.common.audit import files
from appliance.common.audit.entry import Entry, EntryError, from_line
from appliance.supervisor.batches.book import StoreBook, StoreRefusedError

log = structlog.get_logger()

GROUP = 500
"""Entries written together."""

GATHER_S = 0.5
"""Seconds for which entries gather: each group is forced to disk twice."""

RETRY_S = 5.0
"""Seconds until a log or a book that fails is tried again."""

Write = Callable[[list[tuple[int, Entry]]], Awaitable[int | None]]
"""Writes entries with their times to the log at once; returns its size after that, None where it does not take them."""


class Outbox:
    """Writes the entries of one book into one log; all methods run in one event loop, but for ``reconcile``."""

    def __init__(self, book: StoreBook, log_name: str, write: Write) -> None:
        self._book = book
        self._log_name = log_name
        self._write = write
        self._more = asyncio.Event()
        self._more.set()
        self._turn = asyncio.Lock()

    def reconcile(self, folder: Path, size: int) -> int:
        """Forget entries that the log, of ``size`` entries, has already; returns how many. Blocks.

        Raises:
            StoreRefusedError: the book fails.
            OSError: the log cannot be read.
        """
        if not self._book.pending(1):
            self._book.note_logged([], self._log_name, size)
            return 0
        known = set(_keys(folder, self._log_name, self._book.logged(self._log_name)))
        pending = self._book.pending(-1)
        written = [key for key, _, one in pending if _key(one) in known]
        self._book.note_logged(written, self._log_name, size)
        return len(written)

    def wake(self) -> None:
        """Say that there may be entries."""
        self._more.set()

    async def run(self) -> None:
        """Write entries as they come, until cancelled."""
        while True:
            await self._more.wait()
            await asyncio.sleep(GATHER_S)
            self._more.clear()
            if not await self.flush():
                self._more.set()
                await asyncio.sleep(RETRY_S)

    async def flush(self) -> bool:
        """Write all that wait, once who writes already is done; False where log or book fail."""
        async with self._turn:
            return await self._flush()

    async def _flush(self) -> bool:
        try:
            while group := await asyncio.to_thread(self._book.pending, GROUP):
                size = await self._write([(time_ms, one) for _, time_ms, one in group])
                if size is None:
                    return False
                await asyncio.to_thread(self._book.note_logged, [key for key, _, _ in group], self._log_name, size)
        except StoreRefusedError as error:
            log.error("the book of files and batches fails", problem=str(error.__cause__ or error))
            return False
        return True


def _keys(folder: Path, log_name: str, since: int) -> Iterable[tuple[str, ...]]:
    """Return what identifies the entries of a log from one on, as far as they can be in a book."""
    paths = files.segment_paths(folder)
    for number, path in enumerate(paths):
        if number + 1 < len(paths) and int(paths[number + 1].stem) <= since:
            continue
        try:
            segment = files.read_segment(path)
        except files.LogFormatError:
            continue
        if segment.name != log_name:
            continue
        for line in segment.lines[max(0, since - segment.start) :]:
            try:
                yield _key(from_line(line)[2])
            except EntryError:
                continue


def _key(one: Entry) -> tuple[str, ...]:
    """Return what identifies an entry of a line's request, a file, a batch or a stored response."""
    names = {
        "request": ("request",),
        "file": ("file", "event"),
        "batch": ("batch", "event"),
        "response": ("response", "event"),
    }
    # A batch is cancelled by its tenant or by the appliance; the log may have a pseudonym of the tenant's credential.
    by = ("own",) if one.kind == "batch" and one.fields["principal"] else ()
    return (one.kind, *(str(one.fields[name]) for name in names.get(one.kind, ())), *by)
