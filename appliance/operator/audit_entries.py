"""Entries of the audit log on disk, chosen by kind, tenant, model and time. Verifies nothing. Blocks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from appliance.common.audit import files
from appliance.common.audit.entry import Entry, EntryError, from_line
from appliance.common.audit.names import shown_by
from appliance.common.errors import ConfigError, os_errors_as
from appliance.common.figures import counted

_SIZE = re.compile(r"0|[1-9][0-9]{0,17}")

FOREVER_MS = 1 << 62
"""A time behind every entry."""


@dataclass(frozen=True, slots=True)
class LoggedEntry:
    """One entry with its number and its time in milliseconds of the Unix epoch."""

    number: int
    time_ms: int
    entry: Entry

    def values(self) -> dict[str, str | int]:
        """Return the entry as one mapping, as the log has it."""
        return {"n": self.number, "t": self.time_ms, "kind": self.entry.kind, **self.entry.fields}


@dataclass(frozen=True, slots=True)
class EntryFilter:
    """Entries that are read; empty sequences leave nothing out."""

    since_ms: int = 0
    until_ms: int = FOREVER_MS
    """End, which is left out."""
    kinds: Sequence[str] = ()
    tenants: Sequence[str] = ()
    """An entry about no tenant is of none of these."""
    models: Sequence[str] = ()

    def takes(self, one: LoggedEntry) -> bool:
        """Return whether the entry is among them."""
        fields = one.entry.fields
        return (
            self.since_ms <= one.time_ms < self.until_ms
            and (not self.kinds or one.entry.kind in self.kinds)
            and (not self.tenants or fields.get("tenant") in self.tenants)
            and (not self.models or fields.get("model") in self.models)
        )


Shown = Callable[[Entry], Entry]
"""Puts names in place of pseudonyms, as far as there are keys."""


def newest(directory: Path, chosen: EntryFilter, most: int, names: Path | None = None) -> list[LoggedEntry]:
    """Return the newest entries, the oldest of them first. Reading ends with the segment whose first entry is older
    than ``since_ms``: entries of a clock that was set back lie behind it. ``names`` is the folder of the log whose keys
    resolve pseudonyms, where that is another.

    Raises:
        ConfigError: the folder cannot be read, or a segment is damaged.
    """
    found: list[LoggedEntry] = []
    shown = shown_by(names or directory)
    for path in reversed(_paths(directory)):
        entries = _entries(path, shown)
        for one in reversed(entries):
            if chosen.takes(one):
                found.append(one)
            if len(found) == most:
                return found[::-1]
        if entries and entries[0].time_ms < chosen.since_ms:
            break
    return found[::-1]


def log_name(directory: Path) -> str:
    """Return the log's name; empty where there is no segment.

    Raises:
        ConfigError: the folder cannot be read, or the newest segment is damaged.
    """
    paths = _paths(directory)
    return _segment(paths[-1]).name if paths else ""


def in_order(
    directory: Path, first: int = 0, names: Path | None = None, signed_of: str | None = None
) -> Iterator[LoggedEntry]:
    """Read entries with the number ``first`` and higher in the order of the log, a segment at a time. ``names`` is as
    for ``newest``. With ``signed_of``, the name of a log, only entries that a checkpoint covers (what is behind the
    last one may be taken back, and its numbers be given to other entries), all of them of that log.

    Raises:
        ConfigError: the folder cannot be read, a segment is damaged or of another log, or the log ends before
            ``first``.
    """
    paths, shown = _paths(directory), shown_by(names or directory)
    # A log that was never written has no segment yet.
    ends: list[int | None] = [*(int(path.stem) for path in paths[1:]), None]
    for path, following in zip(paths, ends, strict=False):
        if following is not None and following <= first:
            continue
        segment = _segment(path)
        lines = segment.lines
        if signed_of is not None:
            if segment.name != signed_of:
                raise ConfigError(f"{path} is of the log {segment.name}, and not of {signed_of}")
            if following is None:
                if segment.start + len(lines) < first:
                    size = counted(segment.start + len(lines), "entry", "entries")
                    raise ConfigError(
                        f"the audit log in {directory} has {size}, and not the {first} before the position: "
                        "it was cut, or put back from an older copy"
                    )
                lines = lines[: max(0, _signed_size(segment) - segment.start)]
        yield from (one for line in lines if (one := _read(line, path, shown)).number >= first)


def _signed_size(segment: files.Segment) -> int:
    """Return the size of the log that the segment's last checkpoint covers, not verified; 0 where there is none. A copy
    without the file of checkpoints, which a writer makes first, is taken as a whole."""
    if not segment.path.with_suffix(files.CHECKPOINT_SUFFIX).exists():
        return segment.start + len(segment.lines)
    size = segment.checkpoints[-1].split("\n")[1] if segment.checkpoints else ""
    return int(size) if _SIZE.fullmatch(size) else 0


def _paths(directory: Path) -> list[Path]:
    with os_errors_as(f"cannot read the audit log in {directory}"):
        return files.segment_paths(directory)


def _entries(path: Path, shown: Shown) -> list[LoggedEntry]:
    return [_read(line, path, shown) for line in _segment(path).lines]


def _segment(path: Path) -> files.Segment:
    with os_errors_as(f"cannot read the audit log in {path.parent}"):
        try:
            return files.read_segment(path)
        except files.LogFormatError as error:
            raise ConfigError(str(error)) from error


def _read(line: bytes, path: Path, shown: Shown) -> LoggedEntry:
    try:
        number, time_ms, one = from_line(line)
    except EntryError:
        message = f"{path} holds a line that is no entry of an audit log; athanor audit verify tells more"
        raise ConfigError(message) from None
    return LoggedEntry(number, time_ms, shown(one))
