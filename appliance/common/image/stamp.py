"""That an image was read whole in this boot of the machine, so that a start need not read it again.

A stamp is a digest over identity, size, mode and times of all files as the kernel has them. Who changes a file, or what
its mode is, changes its ctime, which no call can set; a disk that rots or is written past the file system does not, so
a stamp ends with the boot. It lies in the supervisor's run directory, where nobody else writes.
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from appliance.common.errors import reason_of
from isolation.errors import ImageError
from isolation.host.atomic_file import write_whole

NAME = "image.verified"
"""File of the stamp in the run directory."""

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

SETTLED_NS = 2_000_000_000
"""A file changed less than this ago may change again within the same tick of the clock that its ctime shows; a stamp
over such a file is not kept."""


def fingerprint(image: Path, digest: str) -> str | None:
    """The stamp of an image as it is now; None while any of it is too fresh to tell.

    Raises:
        ImageError: it cannot be looked at.
    """
    summary = hashlib.sha256(f"athanor image stamp 1\n{digest}\n{_boot_id()}\n{image}\n".encode())
    newest = 0
    try:
        for path, found in _walk(os.fspath(image)):
            facts = (
                found.st_dev,
                found.st_ino,
                found.st_mode,
                found.st_uid,
                found.st_gid,
                found.st_size,
                found.st_mtime_ns,
                found.st_ctime_ns,
            )
            summary.update(f"{facts} {path}\n".encode("utf-8", "surrogateescape"))
            newest = max(newest, found.st_ctime_ns)
    except OSError as error:
        place = Path(error.filename or image)
        raise ImageError(f"cannot read {place}: {reason_of(error)}", place) from error
    return summary.hexdigest() if newest < time.time_ns() - SETTLED_NS else None


def is_stamped(run_dir: Path, stamp: str | None) -> bool:
    """Whether this very stamp was left by an earlier start."""
    try:
        fd = os.open(run_dir / NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        own = found.st_uid == os.geteuid() and stat.S_ISREG(found.st_mode) and not found.st_mode & 0o022
        return stamp is not None and own and file.read(128) == stamp.encode()


def leave(run_dir: Path, stamp: str | None) -> None:
    """Leave a stamp for the next start; where it cannot be left, that start reads everything again."""
    if stamp is None:
        return
    try:
        write_whole(run_dir / NAME, stamp.encode())
    except OSError:
        return


def _walk(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(folder) as listing:
        entries = sorted(listing, key=lambda entry: entry.name)
    for entry in entries:
        yield entry.path, entry.stat(follow_symlinks=False)
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(entry.path)


def _boot_id() -> str:
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        # Without it no stamp of an earlier boot may count.
        return os.urandom(16).hex()
