"""How much address space this process has: one file of /proc, opened once and kept.

A process that is locked down opens nothing any more, and gVisor keeps 115 KiB for each that looked at its own /proc.
"""

from __future__ import annotations

import os

_STATM = "/proc/self/statm"
_READ_BYTES = 256
"""A line of seven numbers; a larger buffer would count itself."""

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class OwnSize:
    """Of the process that makes it: behind a fork it still speaks of the parent.

    Raises:
        OSError: there is no /proc.
    """

    def __init__(self) -> None:
        self.file = os.open(_STATM, os.O_RDONLY | os.O_CLOEXEC)

    def bytes(self) -> int:
        """Address space now (RLIMIT_AS counts the same)."""
        return int(os.pread(self.file, _READ_BYTES, 0).split()[0]) * _PAGE_BYTES
