"""Puts the texts of a policy in place of those that are there, whole or not at all. Blocks."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from appliance.common.errors import os_errors_as
from isolation.host.atomic_file import sync_folder, write_whole

NEW_MODE = 0o640
"""Mode of a file that was not there: the service's group reads it."""

ASIDE = ".aside"
"""Ending that keeps a drop-in which the policy shall not have: files with it are not read."""


@dataclass(frozen=True, slots=True)
class _Before:
    """A file as it was; no data: it was not there."""

    path: Path
    data: bytes | None


class Placement:
    """One replacement of a policy's files. ``undo`` puts back what was there."""

    def __init__(self, folder: Path, files: Mapping[str, str], gone: list[str]) -> None:
        """
        Args:
            folder: of the configured policy.
            files: texts by name below it.
            gone: names of drop-ins that the policy shall not have; they are kept under another name.
        """
        self._folder = folder
        self._files = files
        self._gone = gone
        self._before: list[_Before] = []

    def put(self) -> None:
        """Write all files, with the modes and owners of those that they replace.

        Raises:
            ConfigError: a file cannot be written; everything is as it was, as far as the disk takes that.
        """
        try:
            with os_errors_as(f"cannot write the policy in {self._folder}"):
                for name, text in self._files.items():
                    self._write(self._folder / name, text.encode())
                for name in self._gone:
                    path = self._folder / name
                    self._write(path.with_name(path.name + ASIDE), path.read_bytes())
                    self._remove(path)
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Put back what was there.

        Raises:
            ConfigError: a file cannot be written.
        """
        with os_errors_as(f"cannot put the policy in {self._folder} back"):
            for one in reversed(self._before):
                if one.data == _bytes(one.path):
                    continue  # it was not changed: a full disk would not even take what is there
                if one.data is None:
                    one.path.unlink(missing_ok=True)
                else:
                    _replace(one.path, one.data)
        self._before = []

    def _write(self, path: Path, data: bytes) -> None:
        self._before.append(_Before(path, _bytes(path)))
        path.parent.mkdir(mode=0o750, exist_ok=True)
        _replace(path, data)

    def _remove(self, path: Path) -> None:
        self._before.append(_Before(path, _bytes(path)))
        path.unlink()
        sync_folder(path.parent)


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def _replace(path: Path, data: bytes) -> None:
    """Write a file atomically; it keeps its mode and owner, or has those of its folder's service."""
    like = path.stat() if path.exists() else None
    mode = stat.S_IMODE(like.st_mode) if like is not None else NEW_MODE
    owner = like if like is not None else path.parent.stat()
    write_whole(path, data, mode)
    if os.geteuid() == 0:
        os.chown(path, owner.st_uid, owner.st_gid)
