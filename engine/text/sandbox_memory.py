"""What the sandbox uses of its memory, as the program inside can see it.

gVisor's ``/proc/meminfo`` counts what the whole sandbox has taken, copies that forked processes made of shared pages
included, and knows nothing of the limit on the host; that comes with the configuration. Outside of gVisor the file
speaks of the machine and is not asked.
"""

from __future__ import annotations

import os
import re

from engine.errors import ConfigurationError

_LINES = re.compile(rb"MemTotal: +(\d+) kB\nMemFree: +(\d+) kB\n")
_READ_BYTES = 4_096


class SandboxMemory:
    """Says when memory gets scarce; costs a millisecond each time it is asked.

    Args:
        limit_bytes: of the sandbox; 0 where nothing is known, and then it never is.
        room_bytes: what has to be free.

    Raises:
        ConfigurationError: memory is not told here.
    """

    def __init__(self, limit_bytes: int, room_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._room_bytes = room_bytes
        self._fd = -1
        if limit_bytes:
            # Kept open: gVisor remembers each process that looked at /proc, and a locked program opens nothing.
            self._fd = os.open("/proc/meminfo", os.O_RDONLY | os.O_CLOEXEC)
            self.used_bytes()

    @property
    def file(self) -> int | None:
        """The open file that is asked; None where nothing is known."""
        return self._fd if self._fd >= 0 else None

    def used_bytes(self) -> int:
        """What the sandbox has taken now."""
        found = _LINES.match(os.pread(self._fd, _READ_BYTES, 0))
        if found is None:
            raise ConfigurationError("/proc/meminfo does not say what the sandbox uses")
        return (int(found[1]) - int(found[2])) << 10

    def scarce(self) -> bool:
        """Whether less than the room is left."""
        return self._fd >= 0 and self.used_bytes() + self._room_bytes > self._limit_bytes
