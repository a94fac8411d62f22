"""Backups of ``/etc/athanor`` from before a migration, one for each version of the state; for root alone.

They hold the pepper and the key table: who restores one gets back API keys that were withdrawn since, and loses those
that were made since. Other folders than that of policies are left out, and left alone by a restore: a keyring may be
one, and a tenant's key that was destroyed must not come back.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from appliance.common.errors import ConfigError, os_errors_as
from appliance.common.version import VERSION
from isolation.host.atomic_file import sync_folder, write_whole

FILES = Path("etc/athanor")
"""Folder that is backed up, below the root."""

FOLDERS = (".", "policy.d")
"""Folders with the files, below ``FILES``."""

BACKUPS = Path("var/lib/athanor/backups")

INDEX = "index.json"
"""File in each backup with the version that made it, and the path, mode and owners of every file; a file's copy is
named by its number."""

MAX_TOTAL_BYTES = 64 << 20
"""Most bytes of a backup: configuration, policy and keys are small. A folder with more is reported."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """A file as it was."""

    path: str
    mode: int
    uid: int
    gid: int


def take(root: Path, number: int) -> None:
    """Back up the files of state version ``number``, in place of an older backup of it; whole or not at all.

    Raises:
        ConfigError: there is too much of it, or it cannot be written.
    """
    place, draft = _place(root, number), root / BACKUPS / f".draft-{number}"
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
        write_whole(draft / INDEX, json.dumps({"written_by": VERSION, "files": kept}).encode())
        shutil.rmtree(place, ignore_errors=True)
        draft.rename(place)
        sync_folder(place.parent)


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
    names = (path.name.removeprefix("schema-") for path in (root / BACKUPS).glob("schema-*"))
    return tuple(sorted(int(name) for name in names if name.isascii() and name.isdigit()))


def writer(root: Path, number: int) -> str:
    """Program version that made a backup: the newer one, before it migrated."""
    return f"a version before {_read(root, number)['written_by']}"


def _index(root: Path, number: int) -> tuple[_Kept, ...]:
    kept = tuple(_Kept(*one) for one in _read(root, number)["files"])
    assert all(not Path(one.path).is_absolute() and ".." not in Path(one.path).parts for one in kept), "we wrote it"
    return kept


def _read(root: Path, number: int) -> dict[str, list[tuple[str, int, int, int]]]:
    try:
        values: dict[str, list[tuple[str, int, int, int]]] = json.loads((_place(root, number) / INDEX).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"the backup {_place(root, number)} cannot be used: {error}") from error
    return values


def _place(root: Path, number: int) -> Path:
    return root / BACKUPS / f"schema-{number}"


def _files(root: Path) -> Iterator[Path]:
    """Regular files of the folder and of ``FOLDERS``, sorted; links are not followed."""
    for folder in FOLDERS:
        place = root / FILES / folder
        for path in sorted(place.iterdir()) if place.is_dir() and not place.is_symlink() else ():
            if stat.S_ISREG(path.lstat().st_mode):
                yield path
