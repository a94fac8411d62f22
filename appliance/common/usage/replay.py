"""Entries of the audit log that the usage book does not have yet. Blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from appliance.common.audit import files
from appliance.common.audit.entry import Entry, EntryError, from_line
from appliance.common.audit.names import shown_by
from appliance.common.usage.book import UsageBook

NO_ENTRY = (0, Entry("", {}))
"""In place of a line that is no entry: it has a number, and counts nothing."""


@dataclass(slots=True)
class LogReplay:
    """What a replay has counted."""

    entries: int = 0
    unreadable: list[str] = field(default_factory=list)
    """Segments that could not be read, or have lines that are none: what is missing of them is not counted."""


def replay(book: UsageBook, folder: Path, log: str) -> LogReplay:
    """Count what the log has and the book has not.

    Tenants are counted by their names, and one whose key of pseudonyms was destroyed by its pseudonym.

    Segments that were moved away before the book had them are missing from it: their statements are with the archive.
    What cannot be read is told and passed over, since nothing behind it would ever be counted otherwise.

    Raises:
        OSError: a segment cannot be read now.
        UsageAccessError: the book cannot be read or written.
    """
    done, shown = LogReplay(), shown_by(folder)
    paths = files.segment_paths(folder)
    starts = [int(path.stem) for path in paths]
    for number, path in enumerate(paths):
        position = book.position(log)
        if number + 1 < len(paths) and starts[number + 1] <= position:
            continue
        try:
            segment = files.read_segment(path)
        except files.LogFormatError as error:
            done.unreadable.append(str(error))
            if number + 1 < len(paths):
                book.apply(log, starts[number + 1], [])
            continue
        if segment.name != log:
            continue
        skipped = max(0, position - segment.start)
        batch = [_entry(line, shown) for line in segment.lines[skipped:]]
        if NO_ENTRY in batch:
            done.unreadable.append(f"{path.name} has lines that are no entries")
        if batch:
            book.apply(log, segment.start + skipped, batch)
            done.entries += len(batch)
    return done


def _entry(line: bytes, shown: Callable[[Entry], Entry]) -> tuple[int, Entry]:
    try:
        _, time_ms, one = from_line(line)
    except EntryError:
        return NO_ENTRY
    return time_ms, shown(one)
