"""Requests and denials in the audit log, as the replay of a policy takes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from appliance.common.audit import files
from appliance.common.audit.entry import Entry, EntryError, from_line
from appliance.common.errors import ConfigError, os_errors_as
from policy.replay import AllowedEntry, DeniedEntry

MS = 1_000
"""Milliseconds in a second."""


@dataclass(slots=True)
class LoggedRequests:
    """Entries of a span of time, in the order of the log."""

    entries: list[AllowedEntry | DeniedEntry] = field(default_factory=list)
    lost: int = 0
    """Entries that were lost for want of room."""

    def add(self, time_ms: int, entry: Entry) -> None:
        """Add an entry, if it is about a request."""
        values = entry.fields
        if entry.kind == "request":
            self.entries.append(
                AllowedEntry(
                    time_s=time_ms / MS,
                    tenant=str(values["tenant"]),
                    credential=str(values["principal"]),
                    model=str(values["model"]),
                    operation=str(values["operation"]),
                    policy=str(values["policy"]),
                    input_tokens=int(values["input_tokens"]),
                    output_tokens=int(values["output_tokens"]),
                )
            )
        elif entry.kind == "denied":
            self.entries.append(
                DeniedEntry(
                    tenant=str(values["tenant"]),
                    credential=str(values["principal"]),
                    model=str(values["model"]),
                    rule=str(values["rule"]),
                    count=int(values["count"]),
                )
            )
        elif entry.kind == "gap":
            self.lost += int(values["dropped"])


def read_requests(directory: Path, since_ms: int) -> LoggedRequests:
    """Read the entries from a moment on. Verifies nothing.

    Raises:
        ConfigError: the folder cannot be read, or holds no audit log.
    """
    found = LoggedRequests()
    for lines in _segments(directory, since_ms):
        for line in lines:
            try:
                _, time_ms, one = from_line(line)
            except EntryError:
                raise ConfigError(f"{directory} holds a line that is no entry of an audit log") from None
            if time_ms >= since_ms:
                found.add(time_ms, one)
    return found


def _segments(directory: Path, since_ms: int) -> list[list[bytes]]:
    """Lines of the segments that may hold an entry from ``since_ms`` on, the oldest first."""
    kept: list[list[bytes]] = []
    with os_errors_as(f"cannot read the audit log in {directory}"):
        paths = files.segment_paths(directory)
        for path in reversed(paths):
            try:
                lines = files.read_segment(path).lines
            except files.LogFormatError as error:
                raise ConfigError(str(error)) from error
            kept.append(lines)
            if lines and _time(lines[0]) < since_ms:
                break
    return kept[::-1]


def _time(line: bytes) -> int:
    """Time of a line; 0 for what is no entry, which the caller reports."""
    try:
        return from_line(line)[1]
    except EntryError:
        return 0
