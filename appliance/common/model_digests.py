"""Whether a model's files are those that they should be: digests of files, remembered between starts, and the check.

A file is hashed whole, by the host, which does not interpret it. To hash hundreds of gigabytes at every start would
take minutes, so a file that is the same by device, inode, size and both times as when it was hashed is not read again.
What that trusts: that the kernel stamps a file's change time at every change, and that nobody but root can set that
time (by the clock, or below the file system). The times of content, which anybody can set, are not enough. And the
remembered digests are believed only in a file that nobody but the supervisor's user and root may write.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from appliance.common.errors import ModelDigestError
from isolation.host.atomic_file import write_whole

log = structlog.get_logger()

READ_BYTES = 8 << 20
"""Bytes read at a time while hashing."""

MAX_CACHE_BYTES = 16 << 20
"""Most bytes of the file of remembered digests: 64 models with 1,024 files of 200 bytes each."""

VERSION = 1

Identity = tuple[int, int, int, int, int]
"""Device, inode, size in bytes, and the times of content and of change in nanoseconds."""


@dataclass(frozen=True, slots=True)
class HashedFile:
    """A file as it was when it was hashed."""

    path: Path
    digest: bytes
    """SHA-256."""
    identity: Identity


@dataclass(slots=True)
class DigestCache:
    """Digests of files by identity. Without a path nothing is remembered between runs."""

    path: Path | None = None
    num_read: int = 0
    """Files whose content was read."""
    on_read: Callable[[int], None] | None = None
    """Told the number of bytes after each piece of content that was read."""
    _known: dict[Identity, bytes] = field(default_factory=dict)
    _used: dict[Identity, bytes] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path | None) -> DigestCache:
        """What an earlier run left; empty where there is nothing, or nothing to be trusted."""
        cache = cls(path)
        if path is not None:
            try:
                cache._known = _read(path)
            except FileNotFoundError:
                pass
            except (OSError, ValueError, TypeError) as error:
                log.warning("remembered digests of models are not used", file=str(path), problem=str(error))
        return cache

    def hash(self, path: Path) -> HashedFile:
        """The digest of a file, from its content or from memory.

        Raises:
            OSError: it cannot be read.
            ModelDigestError: it changes while it is read.
        """
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            before = identity_of(os.fstat(fd))
            digest = self._known.get(before) or self._used.get(before)
            if digest is None:
                digest = _hash(fd, self.on_read)
                self.num_read += 1
                if identity_of(os.fstat(fd)) != before:
                    raise ModelDigestError(f"{path} changes while it is read; wait until it is whole, then start again")
        finally:
            os.close(fd)
        self._used[before] = digest
        return HashedFile(path, digest, before)

    def remember(self, files: Iterable[HashedFile]) -> None:
        """Keep digests of files that were hashed before, so that ``save`` writes them too."""
        self._used.update((one.identity, one.digest) for one in files)

    def save(self) -> None:
        """Write what this run used, for the next run; a failure costs that run time and nothing else."""
        if self.path is None or self._used == self._known:
            return
        rows = [[*identity, digest.hex()] for identity, digest in self._used.items()]
        try:
            write_whole(self.path, json.dumps({"version": VERSION, "files": rows}).encode(), mode=0o600)
        except OSError as error:
            log.warning("digests of models are not remembered", file=str(self.path), problem=str(error))


def identity_of(status: os.stat_result) -> Identity:
    """What tells a file and its content from any other, as far as its status can."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _read(path: Path) -> dict[Identity, bytes]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
            raise ValueError("somebody else may write to it")
        values = json.loads(file.read(MAX_CACHE_BYTES))
    if not isinstance(values, dict) or values.get("version") != VERSION:
        raise ValueError("it is of another release")
    known: dict[Identity, bytes] = {}
    for device, inode, size, content_ns, change_ns, digest in values["files"]:
        known[int(device), int(inode), int(size), int(content_ns), int(change_ns)] = bytes.fromhex(digest)
    if any(len(digest) != hashlib.sha256().digest_size for digest in known.values()):
        raise ValueError("a digest has another length")
    return known


def _hash(fd: int, on_read: Callable[[int], None] | None) -> bytes:
    digest = hashlib.sha256()
    while chunk := os.read(fd, READ_BYTES):
        digest.update(chunk)
        if on_read is not None:
            on_read(len(chunk))
    return digest.digest()
