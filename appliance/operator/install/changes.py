"""What an installation would change below a root, and changing it: every file at once or not at all."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from appliance.common.errors import os_errors_as
from appliance.operator.install.rendering import InstalledFile, body, is_untouched
from isolation.host.atomic_file import write_whole

MODE = 0o644
"""Mode of units: everybody may read them, and nothing in them is secret."""


class Kind(StrEnum):
    """What happens to a file."""

    SAME = "same"
    NEW = "new"
    CHANGED = "changed"
    EDITED = "edited"
    """Changed by hand: the edits would be lost."""
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class Change:
    """One file, before and after."""

    path: Path
    kind: Kind
    before: str = ""
    after: str = ""

    def diff(self) -> str:
        """Unified diff; empty where nothing changes."""
        lines = difflib.unified_diff(
            body(self.before).splitlines(keepends=True),
            body(self.after).splitlines(keepends=True),
            str(self.path) if self.before else "/dev/null",
            str(self.path) if self.after else "/dev/null",
            n=1,
        )
        return "".join(lines)


def find_changes(root: Path, files: Iterable[InstalledFile]) -> tuple[Change, ...]:
    """What installing would do.

    Raises:
        ConfigError: a file that is there cannot be read.
    """
    changes = []
    for file in files:
        path, before = root / file.path, _read(root / file.path)
        if before is None:
            changes.append(Change(path, Kind.NEW, "", file.content))
        elif before == file.content:
            changes.append(Change(path, Kind.SAME, before, before))
        else:
            kind = Kind.CHANGED if is_untouched(before) else Kind.EDITED
            changes.append(Change(path, kind, before, file.content))
    return tuple(changes)


def find_removals(root: Path, files: Iterable[InstalledFile]) -> tuple[Change, ...]:
    """What uninstalling would do to files that are there.

    Raises:
        ConfigError: one cannot be read.
    """
    found = [(root / file.path, _read(root / file.path)) for file in files]
    return tuple(
        Change(path, Kind.REMOVED if is_untouched(text) else Kind.EDITED, text, "")
        for path, text in found
        if text is not None
    )


def apply(changes: Iterable[Change]) -> None:
    """Make the changes; run it again after an error, it goes on where it was.

    Raises:
        ConfigError: a file cannot be written or removed.
    """
    for change in changes:
        with os_errors_as(f"cannot change {change.path}"):
            if change.kind is Kind.SAME:
                continue
            if not change.after:
                change.path.unlink(missing_ok=True)
            else:
                change.path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
                write_whole(change.path, change.after.encode(), MODE)


def _read(path: Path) -> str | None:
    with os_errors_as(f"cannot read {path}"), contextlib.suppress(FileNotFoundError):
        return path.read_text(errors="replace")
    return None
