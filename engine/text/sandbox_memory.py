"""Memory use of the sandbox, as seen by the program inside.

gVisor's ``/proc/meminfo`` counts the memory of the whole sandbox, including forked processes' copies of shared pages,
but does not show the limit on the host; the configuration carries it. Outside gVisor the file describes the machine and
is not used.
"""

from __future__ import annotations

import os
import re

from engine.errors import ConfigurationError

_LINES = re.compile(rb"MemTotal: +(\d+) kB\nMemFree: +(\d+) kB\n")
_READ_BYTES = 4_096


class SandboxMemory:
    """Detects scarce memory; each check costs a millisecond.

    Args:
        limit_bytes: the sandbox's limit; 0 when unknown, and memory then never counts as scarce.
        room_bytes: bytes that must stay free.

    Raises:
        ConfigurationError: memory use is not available.
    """

    def __init__(self, limit_bytes: int, room_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._room_bytes = room_bytes
        self._fd = -1
        if limit_bytes:
            # Kept open: gVisor keeps memory for each process that looked at /proc, and a locked-down program opens
            # nothing.
            self._fd = os.open("/proc/meminfo", os.O_RDONLY | os.O_CLOEXEC)
            self.used_bytes()

    @property
    def file(self) -> int | None:
        """Return the open file; None when the limit is unknown."""
        return self._fd if self._fd >= 0 else None

    def used_bytes(self) -> int:
        """Return the bytes that the sandbox uses now."""
        found = _LINES.match(os.pread(self._fd, _READ_BYTES, 0))
        if found is None:
            raise ConfigurationError("/proc/meminfo does not say what the sandbox uses")
        return (int(found[1]) - int(found[2])) << 10

    def scarce(self) -> bool:
        """Return whether less than the required room is free."""
        return self._fd >= 0 and self.used_bytes() + self._room_bytes > self._limit_bytes
