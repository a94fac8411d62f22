"""Requests and denials in the audit log, as the replay of a policy takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from appliance.common.audit import files
from appliance.common.audit.entry import Entry, EntryError, Value, from_line
from appliance.common.audit.names import shown_by
from appliance.common.errors import ConfigError, os_errors_as
from appliance.common.usage.periods import period_of
from policy.replay import AllowedEntry, DeniedEntry

MS = 1_000
"""Milliseconds in a second."""


class LoggedRequests:
    """Entries of a span of time, read segment by segment while they are iterated over, in the order of the log.
    Verifies nothing."""

    def __init__(self, directory: Path, since_ms: int) -> None:
        """Find the segments of the log in ``directory`` that may hold an entry from ``since_ms`` on.

        Raises:
            ConfigError: the folder cannot be read, or a segment is damaged.
        """
        self._since_ms = since_ms
        self._shown = shown_by(directory)
        self._paths: list[Path] = []
        self.lost = 0
        """Entries that were lost for want of room, among those read so far."""
        with os_errors_as(f"cannot read the audit log in {directory}"):
            paths = files.segment_paths(directory)
        for path in reversed(paths):
            self._paths.insert(0, path)
            lines = _lines(path)
            if lines and _read(lines[0], path)[0] < since_ms:
                break

    def __iter__(self) -> Iterator[AllowedEntry | DeniedEntry]:
        """Read the entries.

        Raises:
            ConfigError: a segment is damaged, or cannot be read.
        """
        self.lost = 0
        for path in self._paths:
            for line in _lines(path):
                time_ms, one = _read(line, path)
                if time_ms < self._since_ms:
                    continue
                if one.kind == "gap":
                    self.lost += int(one.fields["dropped"])
                elif one.kind in _READERS:
                    yield _READERS[one.kind](time_ms, self._shown(one).fields)


def _allowed(time_ms: int, values: Mapping[str, Value]) -> AllowedEntry:
    period = period_of(time_ms / MS)
    return AllowedEntry(
        time_s=time_ms / MS,
        tenant=str(values["tenant"]),
        credential=str(values["principal"]),
        model=str(values["model"]),
        operation=str(values["operation"]),
        policy=str(values["policy"]),
        input_tokens=int(values["input_tokens"]),
        cached_tokens=int(values["cached_tokens"]),
        output_tokens=int(values["output_tokens"]),
        day=period.day,
        month=period.month,
        alias=str(values["alias"]),
        adapter=str(values["adapter"]),
        batch=bool(values["batch"]),
    )


def _denied(_time_ms: int, values: Mapping[str, Value]) -> DeniedEntry:
    return DeniedEntry(
        tenant=str(values["tenant"]),
        credential=str(values["principal"]),
        model=str(values["model"]),
        rule=str(values["rule"]),
        count=int(values["count"]),
        alias=str(values["alias"]),
    )


_READERS: Mapping[str, Callable[[int, Mapping[str, Value]], AllowedEntry | DeniedEntry]] = {
    "request": _allowed,
    "denied": _denied,
}
"""Kind of entry to what makes of it an entry of the replay."""


def _lines(path: Path) -> list[bytes]:
    """Entries of a segment."""
    with os_errors_as(f"cannot read the audit log in {path.parent}"):
        try:
            return files.read_segment(path).lines
        except files.LogFormatError as error:
            raise ConfigError(str(error)) from error


def _read(line: bytes, path: Path) -> tuple[int, Entry]:
    """Time in milliseconds and entry of a line."""
    try:
        _, time_ms, one = from_line(line)
    except EntryError:
        raise ConfigError(f"{path} holds a line that is no entry of an audit log") from None
    return time_ms, one
