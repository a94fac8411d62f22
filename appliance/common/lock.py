"""One appliance a directory: a lock that the kernel gives back when its holder ends, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from appliance.common.errors import StartError


@contextlib.contextmanager
def exclusive(path: Path, what: str) -> Iterator[None]:
    """Hold the lock file ``path`` (made if need be, never removed) while the block runs.

    Raises:
        StartError: another process holds it; ``what`` names the directory for the message.
        OSError: the file cannot be made.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StartError(f"another athanor is using {what}; stop it, or choose another directory") from None
        yield
    finally:
        os.close(fd)
