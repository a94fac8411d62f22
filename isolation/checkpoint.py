"""Saved sandboxes on disk: a folder each, named by all that it depends on, whole or not there, checked before use.

::

    STORE/KEY/         checkpoint.img, pages.img, pages_meta.img as runsc wrote them
    STORE/KEY/account  sizes and SHA-256 of these, and how long a start without them took
    STORE/.draft-X     being written, locked by who writes it
    STORE/.trash-X     on its way out

Several supervisors may share a store: names say what is inside, folders come and go by renames, and who finds one gone
starts without. The folder is its owner's alone; digests guard against damage, not against somebody who may write there.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import shutil
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from isolation.errors import CheckpointError
from isolation.spec import SandboxSpec
from isolation.whole_file import sync_folder, write_whole

ACCOUNT = "account"
"""Name of the account in a checkpoint's folder."""

MAX_KEPT = 32
"""Checkpoints of one store; those used longest ago go first. Two a model."""

MAX_BYTES = 8 << 30
"""Of all checkpoints together: an engine's has 150 MB before it has a model, a text worker's 15 MB."""

LEAST_FREE_BYTES = 1 << 30
"""Of the disk: with less free nothing is saved, so that a state directory is never filled by what only saves time."""

MAX_ACCOUNT_BYTES = 64 << 10
_FORMAT = 1
_PRIVATE = 0o700
_DRAFT, _TRASH = ".draft-", ".trash-"
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One saved sandbox."""

    folder: Path
    files: tuple[tuple[str, int, str], ...]
    """Name, bytes and SHA-256 in hex of each file."""
    cold_s: float
    """Seconds from start to ready without it, when it was made."""

    @property
    def key(self) -> str:
        """What it depends on, as a digest."""
        return self.folder.name

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(size for _, size, _ in self.files)

    def verify(self) -> None:
        """Read all of it and compare; 0.7 s a gigabyte.

        Raises:
            CheckpointError: it is damaged or gone.
        """
        for name, size, digest in self.files:
            try:
                with (self.folder / name).open("rb") as file:
                    # The size first: a file that was cut need not be read.
                    whole = os.fstat(file.fileno()).st_size == size
                    whole = whole and hashlib.file_digest(file, "sha256").hexdigest() == digest
            except OSError as error:
                raise CheckpointError(f"checkpoint {self.key[:12]} cannot be read: {error.strerror}") from error
            if not whole:
                raise CheckpointError(f"checkpoint {self.key[:12]} is damaged: {name} is not what was written")


class CheckpointStore:
    """A directory of checkpoints; made by ``open_store``. Thread-safe: all it knows is in names."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find(self, key: str) -> Checkpoint | None:
        """What is there for this key, not yet verified; None where there is nothing, or nothing that is an account."""
        folder = self.root / key
        try:
            with (folder / ACCOUNT).open("rb") as file:
                found = _read_account(folder, file.read(MAX_ACCOUNT_BYTES + 1))
            os.utime(folder)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError):
            self.drop(key)
            return None
        return found

    @contextmanager
    def draft(self) -> Iterator[Path]:
        """An empty folder to save into; gone after the block unless it was kept.

        Raises:
            CheckpointError: the disk has too little room.
            OSError: it cannot be made.
        """
        free = shutil.disk_usage(self.root).free
        if free < LEAST_FREE_BYTES:
            raise CheckpointError(f"{free >> 20} MiB are free on the disk of {self.root}; nothing is saved below 1 GiB")
        path = self.root / (_DRAFT + secrets.token_hex(8))
        path.mkdir(mode=_PRIVATE)
        held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(held, fcntl.LOCK_EX)
            yield path
        finally:
            os.close(held)
            shutil.rmtree(path, ignore_errors=True)

    def keep(self, draft: Path, key: str, cold_s: float) -> Checkpoint:
        """Make what was saved into the draft the checkpoint of this key, and make room for it.

        Raises:
            CheckpointError: it is too large, or empty.
            OSError: it cannot be brought to the disk; nothing of it is used then.
        """
        files = tuple(_seal(path) for path in sorted(draft.iterdir()))
        made = Checkpoint(self.root / key, files, cold_s)
        if not 0 < made.size <= MAX_BYTES:
            raise CheckpointError(f"a checkpoint of {made.size} bytes is not kept")
        account = {"format": _FORMAT, "key": key, "cold_s": cold_s, "files": files}
        write_whole(draft / ACCOUNT, json.dumps(account).encode())
        self._make_room(made.size)
        try:
            os.rename(draft, made.folder)
        except OSError:
            if not made.folder.is_dir():
                raise
            # Somebody else was quicker; what depends on the same is the same.
        sync_folder(self.root)
        return made

    def drop(self, key: str) -> None:
        """Remove a checkpoint. Idempotent."""
        trash = self.root / (_TRASH + secrets.token_hex(8))
        with suppress(OSError):
            os.rename(self.root / key, trash)
        shutil.rmtree(trash, ignore_errors=True)

    def clear(self) -> None:
        """Remove what writers left that were killed."""
        for path in self.root.iterdir():
            if path.name.startswith(_TRASH) or (path.name.startswith(_DRAFT) and not _is_held(path)):
                shutil.rmtree(path, ignore_errors=True)

    def _make_room(self, size: int) -> None:
        """Remove those used longest ago until one more of this size fits; folders that are no checkpoints are
        somebody else's."""
        kept = []
        for path in self.root.iterdir():
            with suppress(OSError):
                if not path.name.startswith(".") and (path / ACCOUNT).is_file():
                    used = path.stat().st_mtime_ns
                    kept.append((used, path.name, sum(file.stat().st_size for file in path.iterdir())))
        kept.sort()
        while kept and (len(kept) >= MAX_KEPT or sum(one for _, _, one in kept) + size > MAX_BYTES):
            self.drop(kept.pop(0)[1])


def open_store(root: Path) -> CheckpointStore:
    """Open the store in this directory, made if need be, and clear up after killed writers.

    Raises:
        CheckpointError: it belongs to somebody else, or others may enter it.
        OSError: it cannot be made or read.
    """
    root.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
    found = root.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & _OTHERS:
        raise CheckpointError(
            f"{root} is not a private directory of the supervisor's user, and whoever may write there chooses what "
            "sandboxes run",
            hint=f"chown it to that user and chmod 700 {root}",
        )
    store = CheckpointStore(root)
    store.clear()
    return store


def contents(spec: SandboxSpec) -> str:
    """SHA-256 over the names, sizes, times and inodes of every file that a sandbox sees, in hex: it changes with each
    change that ``make`` would see. What is masked is left out, and byte code, which follows its source; 20,000 files
    take 60 ms.

    Raises:
        OSError: a file is gone.
    """
    digest = hashlib.sha256()
    for mount in spec.all_mounts():
        source = os.fspath(mount.source)
        inside = mount.target + "/"
        skipped = {source + mask[len(mount.target) :] for mask in spec.rootfs.masks if mask.startswith(inside)}
        for line in sorted(_stamps(source, skipped)):
            digest.update(f"{mount.target} {line}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _stamps(source: str, skipped: Collection[str]) -> Iterator[str]:
    """A line a file, of a file or of all below a folder."""
    if not os.path.isdir(source):
        yield _stamp(source, os.stat(source))
        return
    with os.scandir(source) as listing:
        for entry in listing:
            if not entry.is_dir(follow_symlinks=False):
                yield _stamp(entry.path, entry.stat(follow_symlinks=False))
            elif entry.path not in skipped and entry.name != "__pycache__":
                yield from _stamps(entry.path, skipped)


def _stamp(path: str, one: os.stat_result) -> str:
    return f"{path} {one.st_mode} {one.st_size} {one.st_mtime_ns} {one.st_ino}"


def _seal(path: Path) -> tuple[str, int, str]:
    """Bring a file to the disk; its line of the account."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
        return path.name, os.fstat(file.fileno()).st_size, digest


def _read_account(folder: Path, data: bytes) -> Checkpoint:
    """Raises: ValueError, KeyError, TypeError: it is none."""
    account = json.loads(data)
    if account["format"] != _FORMAT or account["key"] != folder.name:
        raise ValueError("an account of something else")
    files = tuple((str(name), int(size), str(digest)) for name, size, digest in account["files"])
    if any("/" in name for name, _, _ in files):
        raise ValueError("a name that leaves the folder")
    return Checkpoint(folder, files, float(account["cold_s"]))


def _is_held(path: Path) -> bool:
    """Whether a living writer holds this draft."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(fd)
