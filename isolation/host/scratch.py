"""Scratch folder of one command: all its temporary files, and a lock that shows whether the command still lives.

::

    TMP/ath.XXXXXXXX/            0711
    TMP/ath.XXXXXXXX/owner.lock  locked by the command's processes; the kernel releases it with the last of them
    TMP/ath.XXXXXXXX/outside     one JSON object a line: what belongs to the command and lies elsewhere

``sweep`` removes the folders of commands that are provably dead: it takes their lock. It follows no symbolic link and
touches nothing of another user.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from isolation.host.leftovers import Things, end_processes, group_parents, remove

PREFIX = "ath."
"""First letters of a scratch folder's name: short, because sockets lie below it (108 bytes, unix(7))."""

LOCK = "owner.lock"
OUTSIDE = "outside"

_UNLOCKED_S = 60.0
"""Age in seconds from which an empty folder without a lock is a leftover: its command ended between two calls."""

_MAX_OUTSIDE_BYTES = 1 << 16
"""Bytes of a list of what lies elsewhere; a command writes a few hundred."""

Kind = Literal["run directory", "file", "queue", "segment"]


@dataclass(frozen=True, slots=True)
class Outside:
    """One thing outside of the scratch folder."""

    kind: Kind
    name: str
    """Absolute path of a run directory or file, name of a message queue, key of a System V segment."""


@dataclass(frozen=True, slots=True)
class Scratch:
    """A scratch folder whose lock this process holds."""

    path: Path
    lock_fd: int

    @classmethod
    def make(cls) -> Scratch:
        """Make a folder in the directory for temporary files and lock it.

        Raises:
            OSError: the folder cannot be made.
        """
        path = Path(tempfile.mkdtemp(prefix=PREFIX)).resolve()
        # Sandboxes run as another user and have files below it.
        path.chmod(0o711)
        draft = path / f".{LOCK}"
        lock_fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock_fd, fcntl.LOCK_EX)
        # Under its name only once it is locked: a sweep never meets a free lock of a living command.
        draft.rename(path / LOCK)
        return cls(path, lock_fd)

    def note(self, outside: Outside) -> None:
        """Write down what belongs to this command and lies elsewhere, before it is made.

        Raises:
            OSError: the list cannot be written.
        """
        note(self.path, outside)


def note(folder: Path, outside: Outside) -> None:
    """Append to the list of what lies elsewhere, in a scratch folder or in a folder directly below one.

    Raises:
        OSError: the list cannot be written.
    """
    fd = os.open(folder / OUTSIDE, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, json.dumps(asdict(outside)).encode() + b"\n")
    finally:
        os.close(fd)


def sweep(directory: Path) -> list[str]:
    """Remove the scratch folders of dead commands in ``directory`` with their processes; return the folders."""
    swept = []
    for path in sorted(directory.resolve().glob(f"{PREFIX}*")):
        lock_fd = _claimed(path)
        if lock_fd is None:
            continue
        try:
            things = things_of(path)
            groups = group_parents(things)
            end_processes(things, groups)
            if not remove(things, groups):
                swept.append(str(path))
        finally:
            os.close(lock_fd)
    return swept


def _claimed(path: Path) -> int | None:
    """Lock a folder whose command is dead; None for a living command's folder and for anything else."""
    try:
        folder_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        folder = os.fstat(folder_fd)
        if folder.st_uid != os.geteuid() or folder.st_mode & 0o022:
            return None
        try:
            lock_fd = os.open(LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder_fd)
        except OSError:
            _remove_unlocked(path, folder_fd, folder)
            return None
        if _locked(lock_fd) and _is_still(path, folder):
            return lock_fd
        os.close(lock_fd)
        return None
    finally:
        os.close(folder_fd)


def _locked(lock_fd: int) -> bool:
    lock = os.fstat(lock_fd)
    if not stat.S_ISREG(lock.st_mode) or lock.st_uid != os.geteuid():
        return False
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_still(path: Path, folder: os.stat_result) -> bool:
    """Return whether the path still leads to the opened folder."""
    try:
        return os.path.samestat(path.lstat(), folder)
    except OSError:
        return False


def _remove_unlocked(path: Path, folder_fd: int, folder: os.stat_result) -> None:
    """Remove the empty folder of a command that was killed before it had locked it."""
    if time.time() - folder.st_mtime > _UNLOCKED_S:
        with contextlib.suppress(OSError):
            os.unlink(f".{LOCK}", dir_fd=folder_fd)
        with contextlib.suppress(OSError):
            path.rmdir()


def things_of(scratch: Path) -> Things:
    """Collect what belongs to a command, from its folder and its lists."""
    outside = [entry for path in (scratch / OUTSIDE, *scratch.glob(f"*/{OUTSIDE}")) for entry in _listed(path)]
    by_kind = {kind: tuple(dict.fromkeys(one.name for one in outside if one.kind == kind)) for kind in get_args(Kind)}
    return Things(
        scratch,
        run_directories=tuple(map(Path, by_kind["run directory"])),
        files=tuple(map(Path, by_kind["file"])),
        queues=by_kind["queue"],
        segments=tuple(int(key) for key in by_kind["segment"]),
    )


def _listed(path: Path) -> list[Outside]:
    """Read a list; a line that was cut by the end of its writer is skipped."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return []
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            return []
        lines = file.read(_MAX_OUTSIDE_BYTES).splitlines()
    found = []
    for line in lines:
        with contextlib.suppress(ValueError, TypeError):
            entry = Outside(**json.loads(line))
            if entry.kind in get_args(Kind) and isinstance(entry.name, str):
                found.append(entry)
    return found
