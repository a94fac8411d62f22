"""A bell between two processes: a pipe in which only the arrival of a byte means something.

Pipes because they cross gVisor's border both ways, wake a poll and end with the process that holds
the other end (end of file). Futexes and, in older releases, eventfds do not cross.

Both ends are non-blocking and close-on-exec. A full pipe is as good as a rung bell.
"""

from __future__ import annotations

import os
import select
import threading
from math import ceil

from isolation.ipc.errors import PeerGoneError

_RING = b"\0"

_DRAIN_BYTES = 4096
"""More than an honest peer ever leaves: one byte each time its peer fell asleep. What a dishonest
one leaves beyond costs another wake-up and nothing else."""


def create_pipe() -> tuple[int, int]:
    """Read end and write end of a new bell, owned by the caller."""
    return os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)


def adopt(fd: int) -> None:
    """Give a received end the same two flags; they do not all survive the way into a sandbox."""
    os.set_blocking(fd, False)
    os.set_inheritable(fd, False)


class BellWriter:
    """The end that rings. It does not own the descriptor."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def ring(self) -> None:
        """Wake the peer.

        Raises:
            PeerGoneError: nobody holds the other end.
        """
        try:
            os.write(self.fd, _RING)
        except BlockingIOError:
            pass  # The pipe is full of rings not yet read.
        except BrokenPipeError as error:
            raise PeerGoneError("the peer's process has ended") from error


class BellReader:
    """The end that is read. It does not own the descriptor."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)

    def wait(self, timeout_s: float, also: int | None = None) -> bool:
        """Whether the bell rang or its other end was closed within this time, or the descriptor ``also`` did so."""
        poll = self._poll
        if also is not None:
            poll = select.poll()
            poll.register(self.fd, select.POLLIN)
            poll.register(also, select.POLLIN)
        return bool(poll.poll(ceil(timeout_s * 1000)))

    def drain(self) -> bool:
        """Take all rings off; False when the other end is closed and nothing is left."""
        try:
            return os.read(self.fd, _DRAIN_BYTES) != b""
        except BlockingIOError:
            return True


class ThreadBell:
    """A bell between two threads of a process, for one that sleeps at a channel. It owns its descriptors."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends = create_pipe()
        self._closed = False

    def fileno(self) -> int:
        """Return the descriptor that is readable after ``ring``."""
        return self._ends[0]

    def ring(self) -> None:
        """Wake the thread that sleeps; without effect after ``close``."""
        with self._lock:
            if not self._closed:
                BellWriter(self._ends[1]).ring()

    def drain(self) -> None:
        """Take all rings off."""
        BellReader(self._ends[0]).drain()

    def close(self) -> None:
        """Close both ends, once the thread does not sleep any more. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for end in self._ends:
                    os.close(end)
