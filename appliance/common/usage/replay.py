"""Entries of the audit log that the usage book does not have yet. Blocks."""

from __future__ import annotations

from pathlib import Path

from appliance.common.audit import files
from appliance.common.audit.entry import Entry, EntryError, from_line
from appliance.common.usage.book import UsageBook


def replay(book: UsageBook, folder: Path, log: str) -> int:
    """Count what the log has and the book has not; returns the number of entries.

    Segments that were moved away before the book had them are missing from it: their statements are with the archive.

    Raises:
        LogFormatError: a segment cannot be read.
        OSError: likewise.
        UsageWriteError: the disk does not take it.
    """
    counted = 0
    paths = files.segment_paths(folder)
    starts = [int(path.stem) for path in paths]
    for number, path in enumerate(paths):
        position = book.position(log)
        if number + 1 < len(paths) and starts[number + 1] <= position:
            continue
        segment = files.read_segment(path)
        if segment.name != log:
            continue
        skipped = max(0, position - segment.start)
        batch = [_entry(path, line) for line in segment.lines[skipped:]]
        if batch:
            book.apply(log, segment.start + skipped, batch)
            counted += len(batch)
    return counted


def _entry(path: Path, line: bytes) -> tuple[int, Entry]:
    try:
        _, time_ms, one = from_line(line)
    except EntryError as error:
        raise files.LogFormatError(f"{path.name} holds a line that is no entry") from error
    return time_ms, one
