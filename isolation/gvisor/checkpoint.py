"""Checkpoints of sandboxes on disk: one folder each, keyed by all dependencies, atomic, verified before use.

::

    STORE/KEY/         checkpoint.img, pages.img, pages_meta.img as written by runsc
    STORE/KEY/account  sizes and SHA-256 of these files, and how long a cold start took
    STORE/KEY/whole    which state of these files was compared with the account since the machine's start
    STORE/.draft-X     being written, locked by its writer
    STORE/.trash-X     being removed

Several supervisors may share a store: keys identify contents, folders appear and disappear by rename, and a supervisor
that finds a checkpoint gone starts cold. Only the owner can access the folder; digests detect damage, not tampering by
the owner. So files that were read and found whole need not be read again while the kernel runs that has them: what is
written to them changes their times of change, which nobody else can set. Damage comes with a disk or a crash, and after
the machine's next start they are read again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import secrets
import shutil
import stat
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from isolation.errors import CheckpointError
from isolation.gvisor.spec import SandboxSpec
from isolation.host.atomic_file import sync_folder, write_whole

ACCOUNT = "account"
"""Name of the account file (sizes and digests) in a checkpoint's folder."""

WHOLE = "whole"
"""Name of the note about files that were found whole."""

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Text that the kernel draws at each start of the machine."""

Stamp = tuple[tuple[int, ...], ...]
"""What tells one state of a checkpoint's files from the next: inode, size, times of content and of change of each."""

MAX_KEPT = 192
"""Largest number of checkpoints in one store: three for each of 64 models, an engine's with its model and without, and
a text worker's, where runsc cannot fill folders at a restore. The least recently used are removed first."""

MAX_BYTES = 8 << 30
"""Bytes that all checkpoints together may have in any case: an engine's has 150 MB before it has a model, a text
worker's 15 MB."""

FREE_SHARE = 0.5
"""Share of the disk's room, free or in checkpoints, that they may have where it is more than ``MAX_BYTES``: models that
take turns in memory wake from theirs, and one that is gone costs a cold start."""

MOST_BYTES = 64 << 30
"""Bytes that they may have in no case without being told so: twenty models of the largest size that is saved with its
weights."""

STALE_S = 7 * 86_400.0
"""Seconds since its last use after which a checkpoint makes room beyond ``MAX_BYTES``: one of an earlier release or
of earlier files is never used again."""

LEAST_FREE_BYTES = 1 << 30
"""Free disk bytes that are left beside what is saved: a cache of start-up time must not fill the state directory."""

MAX_ACCOUNT_BYTES = 64 << 10
_INVALID = (ValueError, KeyError, TypeError, OverflowError, RecursionError)
"""Errors of reading an account that nobody of ours wrote, or that a disk has damaged."""

SETTLED_NS = 2_000_000_000
"""Age from which a directory's time of change tells all that has changed: a change in the same tick of the file
system's clock, which is some milliseconds or a second, would not show in it."""
_FORMAT = 1
_PRIVATE = 0o700
_DRAFT, _TRASH = ".draft-", ".trash-"
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True, slots=True)
class Label:
    """What is told of a checkpoint to people and to its maker. No restore depends on it: the key alone decides."""

    role: str = ""
    """Kind of the sandbox; empty: unknown, of a release that wrote no labels."""
    model: str = ""
    """Model that it was saved with or for; empty: it serves those of all models."""
    maker: str = ""
    """Run directory of the supervisor that made it."""
    made_at: float = 0.0
    """Unix time."""
    made_with: tuple[tuple[str, str], ...] = ()
    """What is the same for all sandboxes of a machine (``Runtime.surroundings``), by name."""

    def is_of(self, maker: Path, roles: Collection[str]) -> bool:
        """Return whether a maker may remove it where none of its sandboxes, of these roles, can use it: it is its own
        or has no label, and one that serves all models of a role is judged by those of that role alone."""
        ours = self.maker in ("", str(maker))
        return ours and (bool(self.model) or not self.role or self.role in roles)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One saved sandbox."""

    folder: Path
    files: tuple[tuple[str, int, str], ...]
    """Name, size in bytes and SHA-256 (hex) of each file."""
    cold_s: float
    """Seconds from start to ready without the checkpoint, measured when it was made."""
    label: Label = Label()

    @property
    def key(self) -> str:
        """Digest of everything that the checkpoint depends on."""
        return self.folder.name

    @property
    def size(self) -> int:
        """Total size in bytes."""
        return sum(size for _, size, _ in self.files)

    def verify(self) -> None:
        """Read all files and compare their digests; takes 0.7 s a gigabyte.

        Raises:
            CheckpointError: it is damaged or missing.
        """
        for name, size, digest in self.files:
            try:
                with (self.folder / name).open("rb") as file:
                    # Compare the size first: a truncated file need not be read.
                    whole = os.fstat(file.fileno()).st_size == size
                    whole = whole and hashlib.file_digest(file, "sha256").hexdigest() == digest
            except OSError as error:
                raise CheckpointError(f"checkpoint {self.key[:12]} cannot be read: {error.strerror}") from error
            if not whole:
                raise CheckpointError(f"checkpoint {self.key[:12]} is damaged: {name} is not what was written")

    def stamp(self) -> Stamp | None:
        """Return the state of its files; None where one is gone."""
        try:
            found = [(self.folder / name).stat() for name, _, _ in self.files]
        except OSError:
            return None
        return tuple((one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns) for one in found)

    def known_whole(self, stamp: Stamp) -> bool:
        """Return whether files in this state were verified since the machine's start, by whatever process."""
        try:
            with (self.folder / WHOLE).open("rb") as file:
                return file.read(MAX_ACCOUNT_BYTES) == _note(stamp)
        except OSError:
            return False

    def note_whole(self, stamp: Stamp) -> None:
        """Note that files in this state, taken before, were verified. Where it cannot be noted they are read again."""
        with suppress(OSError):
            write_whole(self.folder / WHOLE, _note(stamp))


class CheckpointStore:
    """A directory of checkpoints, opened by ``open_store``. Thread-safe: all of its state is in file names."""

    def __init__(self, root: Path, most: int = 0) -> None:
        """``most``: bytes that all of them together may have; 0: by the disk's room (``FREE_SHARE``)."""
        self.root = root
        self._most = most
        self._listed: tuple[int, tuple[Checkpoint, ...]] = (0, ())
        """Last list of ``kept``, replaced as a whole, with the directory's time of change (ns); 0: not to be used."""

    def find(self, key: str) -> Checkpoint | None:
        """Return the checkpoint for a key, not yet verified; None when there is none or its account is invalid."""
        folder = self.root / key
        try:
            with (folder / ACCOUNT).open("rb") as file:
                found = _read_account(folder, file.read(MAX_ACCOUNT_BYTES + 1))
            os.utime(folder)
        except FileNotFoundError:
            return None
        except (OSError, *_INVALID):
            self.drop(key)
            return None
        return found

    def kept(self) -> tuple[Checkpoint, ...]:
        """Return all checkpoints, not verified, without counting that as a use. What has no valid account, or is a
        link, is left out. Where the directory has not changed since, that is the list of the last call: an account is
        written before its folder comes into the directory.

        Raises:
            OSError: the directory cannot be read.
        """
        changed = self.root.stat().st_mtime_ns
        if changed == self._listed[0]:
            return self._listed[1]
        found = []
        for path in self.root.iterdir():
            if path.name.startswith(".") or path.is_symlink():
                continue
            with suppress(OSError, *_INVALID), (path / ACCOUNT).open("rb") as file:
                found.append(_read_account(path, file.read(MAX_ACCOUNT_BYTES + 1)))
        settled = abs(time.time_ns() - changed) > SETTLED_NS
        self._listed = (changed if settled else 0, tuple(found))
        return self._listed[1]

    @contextmanager
    def draft(self, need: int = 0) -> Iterator[Path]:
        """Create an empty folder to save ``need`` bytes into, and evict others to make room for them; it is removed
        after the block unless it was kept.

        Raises:
            CheckpointError: the disk has too little room, also with what would be evicted, or so much is not allowed.
            OSError: it cannot be created.
        """
        self._check_size(need)
        free, least = shutil.disk_usage(self.root).free, LEAST_FREE_BYTES + need
        going = self._evicted_for(need) if need else {}
        if free + sum(going.values()) < least:
            raise CheckpointError(
                f"{free >> 20} MiB are free on the disk of {self.root}; such a checkpoint is not saved below "
                f"{least >> 20} MiB"
            )
        for key in going:
            self.drop(key)
        path = self.root / (_DRAFT + secrets.token_hex(8))
        path.mkdir(mode=_PRIVATE)
        held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(held, fcntl.LOCK_EX)
            yield path
        finally:
            os.close(held)
            shutil.rmtree(path, ignore_errors=True)

    def keep(self, draft: Path, key: str, cold_s: float, label: Label = Label()) -> Checkpoint:
        """Publish a draft as the checkpoint of this key, and evict others to make room for it.

        Raises:
            CheckpointError: it is too large, or empty.
            OSError: it cannot be written to the disk; nothing of it is used then.
        """
        files = tuple(_seal(path) for path in sorted(draft.iterdir()))
        made = Checkpoint(self.root / key, files, cold_s, label)
        self._check_size(made.size)
        if not 0 < made.size <= MAX_BYTES:  # One alone never needs more.
            raise CheckpointError(f"a checkpoint of {made.size} bytes is not kept")
        account = {"format": _FORMAT, "key": key, "cold_s": cold_s, "files": files, "label": asdict(label)}
        write_whole(draft / ACCOUNT, json.dumps(account).encode())
        for evicted in self._evicted_for(made.size):
            self.drop(evicted)
        try:
            os.rename(draft, made.folder)
        except OSError:
            if not made.folder.is_dir():
                raise
            # Another writer was faster; equal keys mean equal contents.
        sync_folder(self.root)
        return made

    def drop(self, key: str) -> None:
        """Remove a checkpoint. Idempotent."""
        trash = self.root / (_TRASH + secrets.token_hex(8))
        with suppress(OSError):
            os.rename(self.root / key, trash)
        shutil.rmtree(trash, ignore_errors=True)

    def clear(self) -> None:
        """Remove drafts left behind by writers that were killed."""
        for path in self.root.iterdir():
            if path.name.startswith(_TRASH) or (path.name.startswith(_DRAFT) and not _is_held(path)):
                shutil.rmtree(path, ignore_errors=True)

    def evict(self) -> None:
        """Remove the least recently used checkpoints until the others are within the bound."""
        for key in self._evicted_for(0):
            self.drop(key)

    def _check_size(self, size: int) -> None:
        if self._most and size > self._most:
            raise CheckpointError(
                f"a checkpoint of {-(-size >> 20)} MiB is not saved, since all in {self.root} together may have "
                f"{self._most >> 20} MiB"
            )

    def bound(self, held: int = 0) -> int:
        """Return the bytes that checkpoints may have now, of which they have ``held``."""
        room = int(FREE_SHARE * (shutil.disk_usage(self.root).free + held))
        return self._most or max(MAX_BYTES, min(room, MOST_BYTES))

    def _evicted_for(self, size: int) -> dict[str, int]:
        """Least recently used checkpoints, with their bytes, that have to go until one of this size fits; other folders
        are left alone."""
        kept = []
        for path in self.root.iterdir():
            with suppress(OSError):
                if not path.name.startswith(".") and (path / ACCOUNT).is_file():
                    used = path.stat().st_mtime_ns
                    kept.append((used, path.name, sum(file.stat().st_size for file in path.iterdir())))
        kept.sort()
        total = sum(one for _, _, one in kept)
        most = self.bound(total)
        stale_ns = time.time_ns() - int(STALE_S * 1e9)
        going: dict[str, int] = {}
        for used, key, bytes_ in kept:
            over = total + size > (min(MAX_BYTES, most) if used < stale_ns else most)
            if not over and len(kept) - len(going) + bool(size) <= MAX_KEPT:
                break
            going[key] = bytes_
            total -= bytes_
        return going


def open_store(root: Path, most: int = 0) -> CheckpointStore:
    """Open the store in a directory, created if absent, and remove the drafts of killed writers. ``most``: bytes that
    all checkpoints together may have; 0: by the disk's room.

    Raises:
        CheckpointError: another user owns it or may access it.
        OSError: it cannot be created or read.
    """
    root.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
    found = root.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & _OTHERS:
        raise CheckpointError(
            f"{root} is not a private directory of the supervisor's user, and whoever may write there chooses what "
            "sandboxes run",
            hint=f"chown it to that user and chmod 700 {root}",
        )
    store = CheckpointStore(root, most)
    store.clear()
    if most:
        # What was saved under a larger bound; without a new checkpoint nothing else would look.
        store.evict()
    return store


class ListedFolders:
    """Lines of folders that were listed once, which are valid as long as no folder below has changed.

    A file that is added, removed or replaced by rename changes its folder; one that is written in place does not, and
    is noticed by a new ``ListedFolders`` alone. A thousand folders are looked at where there are 16,000 files: where
    system calls are dear this is most of the time of a search. Thread-safe: entries are replaced whole.
    """

    def __init__(self) -> None:
        self._listed: dict[tuple[str, frozenset[str]], tuple[list[str], list[str]]] = {}

    def lines(self, source: str, skipped: frozenset[str]) -> list[str]:
        """Return a line for each file at a path or below a folder, sorted.

        Raises:
            OSError: a file is gone.
        """
        if not os.path.isdir(source):
            return list(_stamps(source, skipped, []))
        key = source, skipped
        if (known := self._listed.get(key)) is not None:
            lines, folders = known
            with suppress(OSError):
                if all(_is_as_before(stamp) for stamp in folders):
                    return lines
        folders = []
        lines = sorted(_stamps(source, skipped, folders))
        self._listed[key] = lines, folders
        return lines


def contents(spec: SandboxSpec, listed: ListedFolders | None = None) -> str:
    """Hash the names, sizes, times and inodes of every file that a sandbox sees (SHA-256, hex).

    The digest changes with each change that ``make`` would detect. Masked directories and byte code, which follows its
    source, are left out; 20,000 files take 60 ms. Of folders that ``listed`` knows only the folders are looked at.

    Raises:
        OSError: a file is gone.
    """
    digest = hashlib.sha256()
    for mount in spec.all_mounts():
        source = os.fspath(mount.source)
        inside = mount.target + "/"
        masks = (mask for mask in spec.rootfs.masks if mask.startswith(inside))
        skipped = frozenset(source + mask[len(mount.target) :] for mask in masks)
        for line in (listed or ListedFolders()).lines(source, skipped):
            digest.update(f"{mount.target} {line}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _stamps(source: str, skipped: Collection[str], folders: list[str]) -> Iterator[str]:
    """Yield one line for each file at a path or below a folder; ``folders`` gets one of each folder, taken before it is
    listed."""
    if not os.path.isdir(source):
        yield _stamp(source, os.stat(source))
        return
    folders.append(_stamp(source, os.stat(source)))
    with os.scandir(source) as listing:
        for entry in listing:
            if not entry.is_dir(follow_symlinks=False):
                yield _stamp(entry.path, entry.stat(follow_symlinks=False))
            elif entry.path not in skipped and entry.name != "__pycache__":
                yield from _stamps(entry.path, skipped, folders)


def _is_as_before(stamp: str) -> bool:
    path = stamp.rsplit(" ", 4)[0]
    return _stamp(path, os.stat(path)) == stamp


def _stamp(path: str, one: os.stat_result) -> str:
    return f"{path} {one.st_mode} {one.st_size} {one.st_mtime_ns} {one.st_ino}"


def _note(stamp: Stamp) -> bytes:
    """Return the note about files in a state. Raises: OSError: the kernel does not tell its start."""
    return json.dumps([BOOT_ID.read_text().strip(), stamp]).encode()


def _seal(path: Path) -> tuple[str, int, str]:
    """Flush a file to the disk and return its line of the account."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
        return path.name, os.fstat(file.fileno()).st_size, digest


def _read_account(folder: Path, data: bytes) -> Checkpoint:
    """Parse an account. Raises: ``_INVALID``: it is."""
    account = json.loads(data)
    if account["format"] != _FORMAT or account["key"] != folder.name:
        raise ValueError("an account of something else")
    files = tuple((str(name), int(size), str(digest)) for name, size, digest in account["files"])
    if any("/" in name for name, _, _ in files):
        raise ValueError("a name that leaves the folder")
    return Checkpoint(folder, files, float(account["cold_s"]), _read_label(account.get("label", {})))


def _read_label(label: object) -> Label:
    """Parse a label. Raises: ValueError, TypeError: it is invalid."""
    given = label.get("made_with", ()) if isinstance(label, dict) else None
    if not isinstance(label, dict) or not isinstance(given, list | tuple):
        raise TypeError("a label that is none")
    made_at = float(label.get("made_at", 0.0))
    if not (math.isfinite(made_at) and made_at >= 0):
        raise ValueError("a time that is none")
    role, model, maker = (str(label.get(name, "")) for name in ("role", "model", "maker"))
    return Label(role, model, maker, made_at, tuple((str(name), str(value)) for name, value in given))


def _is_held(path: Path) -> bool:
    """Return whether a living writer holds the lock of this draft."""
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
