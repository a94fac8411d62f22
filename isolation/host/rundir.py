"""Run directory of one supervisor: bundles, runsc's state and a lock; and the clean-up after a killed supervisor.

::

    RUN_DIR/lock          held while the supervisor runs
    RUN_DIR/bundles/NAME  one for each sandbox
    RUN_DIR/runsc/        runsc's own state and control sockets
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import select
import shutil
import signal
import time
from pathlib import Path

from isolation.errors import IsolationError
from isolation.gvisor.runsc import sandbox_of
from isolation.host.reaper import command_line

_END_TIMEOUT_S = 20.0
_PRIVATE = 0o700


def parent_group(root: Path) -> str:
    """Return the name of the cgroup above all sandboxes whose supervisor has this run directory. Pure."""
    return f"athanor-{hashlib.sha256(os.fsencode(root)).hexdigest()[:12]}"


class RunDirectory:
    """An opened and locked run directory; made by ``open``."""

    def __init__(self, root: Path, lock_fd: int) -> None:
        self.root = root
        self.bundles = root / "bundles"
        self.state = root / "runsc"
        self._lock_fd = lock_fd

    @classmethod
    def open(cls, root: Path) -> RunDirectory:
        """Create the directory (0700) if absent and take its lock.

        Raises:
            IsolationError: it belongs to another user, or another supervisor holds it.
        """
        root = root.absolute()
        root.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
        if root.stat().st_uid != os.geteuid():
            raise IsolationError(f"run directory {root} belongs to another user")
        lock_fd = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(lock_fd)
            raise IsolationError(
                f"run directory {root} is in use by another supervisor", hint="stop it, or choose another directory"
            ) from error
        directory = cls(root, lock_fd)
        for path in (root, directory.bundles, directory.state):
            path.mkdir(mode=_PRIVATE, exist_ok=True)
            path.chmod(_PRIVATE)
        return directory

    @property
    def label(self) -> str:
        """Return the name of this supervisor's parent cgroup; it differs between run directories on one machine."""
        return parent_group(self.root)

    def end_stale_processes(self) -> tuple[str, ...]:
        """Kill every sandbox and gofer that was started with this state directory; return the sandboxes' names.

        ``runsc delete`` cannot be used here: it waits for processes whose new parent may never reap them.

        Raises:
            IsolationError: a process does not end.
        """
        names: set[str] = set()
        pidfds: list[int] = []
        try:
            for pid, argv in _runsc_processes(f"--root={self.state}"):
                try:
                    pidfd = os.pidfd_open(pid)
                except ProcessLookupError:
                    continue
                pidfds.append(pidfd)
                # Checked again now that the pidfd pins it: the number may have been reused for another process.
                if command_line(pid) == argv:
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                    if "boot" in argv:
                        names.add(sandbox_of(argv[-1]))
            _await_ends(pidfds)
        finally:
            for pidfd in pidfds:
                os.close(pidfd)
        return tuple(sorted(names))

    def wipe(self) -> tuple[str, ...]:
        """Remove all bundles and runsc's state; return the bundles' names. Call only when no sandbox is alive."""
        names = tuple(sorted(path.name for path in self.bundles.iterdir()))
        for directory in (self.bundles, self.state):
            shutil.rmtree(directory)
            directory.mkdir(mode=_PRIVATE)
        return names

    def close(self) -> None:
        """Release the lock. Idempotent."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def _runsc_processes(root_flag: str) -> list[tuple[int, tuple[str, ...]]]:
    """Find sandboxes (``boot``) and gofers by their command lines, which name the state directory."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            argv = command_line(int(entry))
            if root_flag in argv and ("boot" in argv or "gofer" in argv):
                found.append((int(entry), argv))
    return found


def _await_ends(pidfds: list[int]) -> None:
    """Wait for processes to end: a pidfd is readable once its process has ended, reaped or not."""
    deadline = time.monotonic() + _END_TIMEOUT_S
    for pidfd in pidfds:
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        if not poller.poll(max(0.0, deadline - time.monotonic()) * 1_000):
            raise IsolationError("a sandbox of an earlier supervisor does not end after SIGKILL")
