"""Writer of the audit log: entries in, lines and signed checkpoints on disk. Blocks; one writer for each folder.

A batch is written, forced to disk, and then covered by a checkpoint that is forced to disk too: what ``append`` has
taken survives a crash, and cannot be changed without the signing key. A batch that cannot be written as a whole leaves
the log as it was.

After a crash the log may end in entries that no checkpoint covers yet, or in half a line. The half line is cut off; the
next checkpoint covers the rest, together with an entry that says what happened. A log that contradicts its own last
checkpoint is moved aside, whole, and a new one, with a new name, begins with an entry that says so.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from appliance.common.audit import files
from appliance.common.audit.checkpoint import Checkpoint, CheckpointError, Verifier, read_checkpoint, sign_checkpoint
from appliance.common.audit.entry import Entry, EntryError, entry, from_line, to_line
from appliance.common.audit.merkle import Tree, leaf_hash
from appliance.common.audit.names import NameBook
from appliance.common.errors import AuditError
from appliance.common.figures import counted
from isolation.keys.signing import SigningKey, SigningKeyError, load_or_make

NAME_PREFIX = "athanor.audit/"
NAME_RANDOM_BYTES = 8

SEGMENT_BYTES = 16 << 20
"""Size in bytes at which a segment is closed: some fifty thousand entries, read in half a second at a start."""

SEGMENT_AGE_MS = 86_400_000
"""Age in milliseconds of a segment's first entry at which it is closed: a day, so that what is older than two days can
be moved away, however little is written."""

FOLDER_MODE, FILE_MODE = 0o750, 0o640
"""The service's group may read, and so verify."""


class AuditWriteError(Exception):
    """A batch could not be written; the log is unchanged."""


@dataclass(slots=True)
class _Open:
    """Segment that is being written."""

    log: int
    checkpoints: int
    log_bytes: int
    checkpoint_bytes: int
    first_ms: int | None = None
    """Time of its first entry, in milliseconds of the Unix epoch; None before there is one."""

    def full(self, now_ms: int) -> bool:
        """Return whether an entry of this time begins another segment."""
        old = self.first_ms is not None and now_ms - self.first_ms >= SEGMENT_AGE_MS
        return old or self.log_bytes >= SEGMENT_BYTES


class AuditLog:
    """Open log. ``name`` is its name in checkpoints."""

    def __init__(self, directory: Path, key: SigningKey, lock: int, *, pseudonyms: bool = False) -> None:
        """Use ``open_log``."""
        self._directory = directory
        self._key = key
        self._lock = lock
        self._tree = Tree()
        self._files: _Open | None = None
        self._pseudonyms = pseudonyms
        self.names = NameBook(directory)
        """Keys of the pseudonyms in its entries."""
        self.name = ""
        self.opening: list[Entry] = []
        """Entries about the opening itself; the owner appends them first."""

    @property
    def size(self) -> int:
        """Number of entries."""
        return self._tree.size

    @property
    def verifier(self) -> Verifier:
        """Verifier of its checkpoints."""
        return Verifier(self.name, self._key.public)

    @property
    def directory(self) -> Path:
        """Folder of the log."""
        return self._directory

    def sign(self, make: Callable[[SigningKey], str]) -> str:
        """Make a text that is signed with the log's key; the first line of what ``make`` returns names its kind."""
        return make(self._key)

    def checkpoint(self) -> str:
        """Signed text for what is written."""
        return sign_checkpoint(Checkpoint(self._tree.size, self._tree.root()), self.name, self._key)

    def append(self, batch: list[tuple[int, Entry]]) -> int:
        """Write entries with their times in milliseconds, and a checkpoint over them; returns the number of the first.

        Raises:
            AuditWriteError: the disk does not take them; nothing of the batch is in the log.
        """
        tree = Tree(self._tree.size, self._tree.peaks)
        lines = []
        before = self._tree
        try:
            for time_ms, one in batch:
                line = to_line(self.names.hidden(one) if self._pseudonyms else one, tree.size, time_ms)
                tree.append(leaf_hash(line))
                lines.append(line + b"\n")
            self._undo()  # What an attempt left that could not be undone.
            if self._files is None or (batch and self._files.full(batch[0][0])):
                self._begin_segment()
            self._write(b"".join(lines), tree)
            if batch and self._files is not None and self._files.first_ms is None:
                self._files.first_ms = batch[0][0]
        except OSError as error:
            self._tree = before
            with suppress(OSError):
                self._undo()
            raise AuditWriteError(f"the audit log cannot be written: {error.strerror or error}") from error
        return before.size

    def close(self) -> None:
        """Close the files."""
        if self._files is not None:
            os.close(self._files.log)
            os.close(self._files.checkpoints)
            self._files = None
        os.close(self._lock)

    def recover(self) -> None:
        """Continue where the last writer stopped.

        Raises:
            LogFormatError: what is there contradicts itself.
            CheckpointError: likewise.
            OSError: it cannot be read.
        """
        segment = files.read_segment(files.segment_paths(self._directory)[-1])
        self.name = segment.name
        tree, signed = segment.tree(), None
        if segment.checkpoints:
            signed = read_checkpoint(segment.checkpoints[-1], self.verifier)
        if segment.start and (signed is None or signed.size < segment.start):
            raise files.LogFormatError(f"{segment.path.name}: no checkpoint covers what is before it")
        for line in segment.lines:
            self._compare(tree, signed)
            tree.append(leaf_hash(line))
        self._compare(tree, signed)
        if signed is not None and signed.size > tree.size:
            raise files.LogFormatError(f"{segment.path.name}: entries are missing that a checkpoint covers")
        self._tree = tree
        self._open_files(segment.path)
        assert self._files is not None
        self._files.log_bytes, self._files.checkpoint_bytes = segment.log_bytes, segment.checkpoint_bytes
        self._files.first_ms = _time_of(segment.lines[0]) if segment.lines else None
        self._undo()
        loose = tree.size - (signed.size if signed is not None else 0)
        if loose or segment.torn or segment.torn_checkpoint:
            cut = counted(len(segment.torn), "byte")
            detail = f"{counted(loose, 'entry', 'entries')} without a checkpoint, {cut} of half an entry cut off"
            self.opening.append(entry("log", event="recovered", detail=detail))
        else:
            self.opening.append(entry("log", event="opened", detail="went on"))

    def begin(self) -> None:
        """Begin a log with a new name.

        Raises:
            OSError: it cannot be written.
        """
        self._tree = Tree()
        self._files = None
        self.name = NAME_PREFIX + secrets.token_hex(NAME_RANDOM_BYTES)
        _write_file(self._directory / files.PUBLIC_KEY, self.verifier.line().encode() + b"\n")

    def move_aside(self) -> str:
        """Put a log that contradicts itself into a folder beside the new one; gives the folder's name.

        Raises:
            OSError: it cannot be moved.
        """
        aside = self._directory / f"damaged-{secrets.token_hex(4)}"
        aside.mkdir(mode=FOLDER_MODE)
        for path in (*files.segment_paths(self._directory), self._directory / files.PUBLIC_KEY):
            for one in (path, path.with_suffix(files.CHECKPOINT_SUFFIX)):
                if one.exists():
                    one.rename(aside / one.name)
        return aside.name

    @staticmethod
    def _compare(tree: Tree, signed: Checkpoint | None) -> None:
        if signed is not None and signed.size == tree.size and signed.root != tree.root():
            raise files.LogFormatError("entries are not those that the last checkpoint covers")

    def _begin_segment(self) -> None:
        """Close the segment and begin the next; its first checkpoint signs all that is before it."""
        if self._files is not None:
            os.close(self._files.log)
            os.close(self._files.checkpoints)
            self._files = None
        path = files.segment_path(self._directory, self._tree.size)
        # Of an attempt that failed half-way.
        for one in (path, path.with_suffix(files.CHECKPOINT_SUFFIX)):
            one.unlink(missing_ok=True)
        note = self.checkpoint().encode() if self._tree.size else b""
        _write_file(path.with_suffix(files.CHECKPOINT_SUFFIX), note)
        _write_file(path, files.header(self.name, self._tree))
        self._open_files(path)

    def _open_files(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        beside = path.with_suffix(files.CHECKPOINT_SUFFIX)
        log = os.open(path, flags)
        try:
            checkpoints = os.open(beside, flags | os.O_CREAT, FILE_MODE)
        except OSError:
            os.close(log)
            raise
        self._files = _Open(log, checkpoints, os.fstat(log).st_size, os.fstat(checkpoints).st_size)

    def _write(self, data: bytes, tree: Tree) -> None:
        at = self._files
        assert at is not None
        _write_all(at.log, data)
        os.fdatasync(at.log)
        self._tree = tree
        note = self.checkpoint().encode()
        _write_all(at.checkpoints, note)
        os.fdatasync(at.checkpoints)
        at.log_bytes += len(data)
        at.checkpoint_bytes += len(note)

    def _undo(self) -> None:
        """Cut off what is behind the last whole batch. Shortening a file needs no room on the disk."""
        if self._files is not None:
            os.ftruncate(self._files.log, self._files.log_bytes)
            os.ftruncate(self._files.checkpoints, self._files.checkpoint_bytes)


def open_log(directory: Path, key_file: Path | None = None, *, pseudonyms: bool = False) -> AuditLog:
    """Open the log of a folder, or begin one; a missing ``key_file`` is made. With ``pseudonyms`` what is written from
    now on names no tenant and no credential (``names``).

    Raises:
        AuditError: another process writes there, or folder or key cannot be used.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=FOLDER_MODE)
        key, made = load_or_make(key_file or directory / files.SIGNING_KEY)
        lock = os.open(directory / files.LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    except SigningKeyError as error:
        raise AuditError(str(error)) from error
    except OSError as error:
        raise AuditError(f"cannot use the audit folder {directory}: {error.strerror}") from error
    log = AuditLog(directory, key, lock, pseudonyms=pseudonyms)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _resume(log, directory)
    except BlockingIOError as error:
        log.close()
        raise AuditError(f"another process writes the audit log in {directory}") from error
    except OSError as error:
        log.close()
        raise AuditError(f"cannot use the audit log in {directory}: {error.strerror}") from error
    if made:
        log.opening.append(entry("keys", what="signing key made", count=1))
    return log


def _resume(log: AuditLog, directory: Path) -> None:
    files.drop_headless(directory)
    if not files.segment_paths(directory):
        (directory / files.PUBLIC_KEY).unlink(missing_ok=True)
        log.begin()
        log.opening.append(entry("log", event="opened", detail="begun"))
        return
    try:
        log.recover()
    except (files.LogFormatError, CheckpointError) as error:
        aside = log.move_aside()
        log.begin()
        log.opening.append(entry("log", event="damaged", detail=f"the log before is in {aside}: {error}"))


def _time_of(line: bytes) -> int | None:
    """Return the time of an entry; None of one that this version cannot read, so that its segment counts from now."""
    try:
        return from_line(line)[1]
    except EntryError:
        return None


def _write_file(path: Path, data: bytes) -> None:
    """Make a file and force it and its name to disk; a concurrent reader sees the whole file or none."""
    draft = path.with_name(f".{path.name}.draft")
    draft.unlink(missing_ok=True)
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
    try:
        _write_all(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)
    draft.rename(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _write_all(fd: int, data: bytes) -> None:
    """Write everything, or raise the system's error."""
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]
