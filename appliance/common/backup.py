"""Backups of ``/etc/athanor`` from before a migration, one for each version of the state; for root alone.

They hold the pepper and the key table: who restores one gets back API keys that were withdrawn since, and loses those
that were made since. Other folders than that of policies are left out, and left alone by a restore: a keyring may be
one, and a tenant's key that was destroyed must not come back.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from appliance.common.errors import ConfigError, os_errors_as
from appliance.common.figures import NS, clock, counted
from appliance.common.version import VERSION
from isolation.host.atomic_file import sync_folder, write_whole

FILES = Path("etc/athanor")
"""Folder that is backed up, below the root."""

FOLDERS = (".", "models.d", "policy.d")
"""Folders with the files, below ``FILES``."""

BACKUPS = Path("var/lib/athanor/backups")

NAME = re.compile(r"form-([0-9]{1,9})-of-.+|schema-([0-9]{1,9})")
"""Names of backups' folders (``folder_name``), and those that older versions gave."""

INDEX = "index.json"
"""File in each backup with the version that made it, the one whose state it is, when it was taken, and the path, mode
and owners of every file; a file's copy is named by its number."""

MAX_TOTAL_BYTES = 64 << 20
"""Most bytes of a backup: configuration, policy and keys are small. A folder with more is reported."""


@dataclass(frozen=True, slots=True)
class Backup:
    """What a backup says of itself."""

    form: int
    name: str
    """Name of its folder."""
    state_of: str
    """Version of the program whose state it is; empty where nothing says it."""
    taken_at: int
    """Unix time at which it was taken; 0 where nothing says it."""
    written_by: str
    """Version of the program that took it: the newer one, before it migrated, or the one that restored another."""
    files: int

    @property
    def about(self) -> str:
        """What it is of and when it was taken, in words."""
        when = f", taken {clock(self.taken_at * NS, UTC, date=True)} UTC" if self.taken_at else ""
        return f"form {self.form}, {version_words(self.state_of)}{when}, {counted(self.files, 'file')}"


def version_words(version: str) -> str:
    """A version of the program in words, also one that nothing says."""
    return f"athanor {version}" if version else "a version of athanor that is not recorded"


@dataclass(frozen=True, slots=True)
class _Kept:
    """A file as it was."""

    path: str
    mode: int
    uid: int
    gid: int


def take(root: Path, number: int, writer: str, *, now: float | None = None) -> Backup:
    """Back up the files of state version ``number``, in place of an older backup of it; whole or not at all.

    Args:
        root: the root of the file system.
        number: form of the state.
        writer: version of the program that wrote the state; empty where nothing says it.
        now: Unix time of the backup; None: the clock's.

    Raises:
        ConfigError: there is too much of it, or it cannot be written.
    """
    taken_at = int(time.time() if now is None else now)
    draft = root / BACKUPS / f".draft-{number}"
    with os_errors_as(f"cannot back up {root / FILES}"):
        draft.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft.parent.chmod(0o700)
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(mode=0o700)
        kept: list[list[str | int]] = []
        total = 0
        for path in _files(root):
            found = path.lstat()
            total += found.st_size
            if total > MAX_TOTAL_BYTES:
                raise ConfigError(f"{root / FILES} has over {MAX_TOTAL_BYTES >> 20} MB; keep large files elsewhere")
            write_whole(draft / str(len(kept)), path.read_bytes())
            name = path.relative_to(root / FILES).as_posix()
            kept.append([name, stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid])
        index = {"written_by": VERSION, "state_of": writer, "taken_at": taken_at, "files": kept}
        write_whole(draft / INDEX, json.dumps(index).encode())
        older = _folders(root).get(number, ())
        place = root / BACKUPS / folder_name(number, writer, taken_at)
        shutil.rmtree(place, ignore_errors=True)
        draft.rename(place)
        for folder in older:
            if folder != place:
                shutil.rmtree(folder, ignore_errors=True)
        sync_folder(place.parent)
    return find(root, number)


def folder_name(number: int, writer: str, taken_at: int) -> str:
    """Name of a backup's folder: what it is of and when it was taken, ``form-1-of-0.1.0-20260102T030405Z``."""
    moment = datetime.fromtimestamp(taken_at, UTC).strftime("%Y%m%dT%H%M%SZ")
    version = "".join(one if one.isascii() and (one.isalnum() or one in ".+~") else "_" for one in writer)
    return f"form-{number}-of-{version or 'unknown'}-{moment}"


def restore(root: Path, number: int) -> None:
    """Restore a backup: its files with modes and owners; files that it does not have are removed.

    Raises:
        ConfigError: there is none, or it cannot be put in place; run it again then.
    """
    place, kept = _place(root, number), _index(root, number)
    with os_errors_as(f"cannot restore {root / FILES}"):
        for at, one in enumerate(kept):
            target = root / FILES / one.path
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o750)
            write_whole(target, (place / str(at)).read_bytes())
            os.chown(target, one.uid, one.gid)
            target.chmod(one.mode)
        wanted = {root / FILES / one.path for one in kept}
        for path in _files(root):
            if path not in wanted:
                path.unlink()


def numbers(root: Path) -> tuple[int, ...]:
    """State versions that have a backup."""
    return tuple(sorted(_folders(root)))


def find(root: Path, number: int) -> Backup:
    """What a backup is of, and when it was taken.

    Raises:
        ConfigError: there is none, or it cannot be used.
    """
    values = _read(root, number)
    return Backup(
        form=number,
        name=_place(root, number).name,
        state_of=str(values.get("state_of") or ""),
        taken_at=int(values.get("taken_at") or 0),
        written_by=str(values["written_by"]),
        files=len(values["files"]),
    )


def _index(root: Path, number: int) -> tuple[_Kept, ...]:
    kept = tuple(_Kept(*one) for one in _read(root, number)["files"])
    assert all(not Path(one.path).is_absolute() and ".." not in Path(one.path).parts for one in kept), "we wrote it"
    return kept


def _read(root: Path, number: int) -> dict[str, Any]:
    place = _place(root, number)
    try:
        values: dict[str, Any] = json.loads((place / INDEX).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"the backup {place} cannot be used: {error}") from error
    return values


def _place(root: Path, number: int) -> Path:
    """The newest backup of a form.

    Raises:
        ConfigError: there is none.
    """
    found = _folders(root).get(number)
    if not found:
        raise ConfigError(f"there is no backup of form {number} in {root / BACKUPS}")
    return found[-1]


def _folders(root: Path) -> dict[int, tuple[Path, ...]]:
    """Form to the folders of its backups, the newest last: several only where taking one was cut off at its end."""
    found: dict[int, tuple[Path, ...]] = {}
    for path in sorted((root / BACKUPS).glob("*")):
        if match := NAME.fullmatch(path.name):
            number = int(match[1] or match[2])
            found[number] = (*found.get(number, ()), path)
    return {number: tuple(sorted(paths, key=_taken)) for number, paths in found.items()}


def _taken(path: Path) -> str:
    """The moment in the name of a backup's folder; an older version's has none."""
    return path.name.rpartition("-")[2] if path.name.startswith("form-") else ""


def _files(root: Path) -> Iterator[Path]:
    """Regular files of the folder and of ``FOLDERS``, sorted; links are not followed."""
    for folder in FOLDERS:
        place = root / FILES / folder
        for path in sorted(place.iterdir()) if place.is_dir() and not place.is_symlink() else ():
            if stat.S_ISREG(path.lstat().st_mode):
                yield path
