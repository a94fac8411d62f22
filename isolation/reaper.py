"""The supervisor as the parent of orphans: whose exit status is whose.

``runsc create`` ends and leaves the sandbox, its gofer and later its stubs to the nearest *subreaper*. We are that
one. The sandbox's status is ours to read (no ``runsc wait`` beside each sandbox); the others must be reaped, because
``runsc delete`` waits seconds to minutes for a gofer that is a zombie (measured: 5 s and 120 s instead of 12 ms).
"""

from __future__ import annotations

import ctypes
import os
import re
import select
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from isolation.errors import IsolationError
from isolation.process import owned_children

_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


class Claim:
    """One child whose exit status somebody wants: its pidfd and, after its end, its status."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self.pidfd = pidfd
        self._status: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Exit status, minus the signal when one ended it, or None while it runs."""
        with self._lock:
            if self._status is None and self.pidfd >= 0:
                result = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG)
                if result is not None:
                    exited = result.si_code == os.CLD_EXITED
                    self._status = result.si_status if exited else -result.si_status
            return self._status

    def wait(self, timeout_s: float) -> int | None:
        """Wait for its end; None when it still runs after ``timeout_s`` seconds."""
        if self.pidfd >= 0 and self._status is None:
            poller = select.poll()
            poller.register(self.pidfd, select.POLLIN)
            poller.poll(timeout_s * 1_000)
        return self.poll()

    def close(self) -> None:
        """Close the pidfd; the status stays known. Idempotent."""
        with self._lock:
            if self.pidfd >= 0:
                os.close(self.pidfd)
                self.pidfd = -1


class Reaper:
    """Makes this process a subreaper and divides its children: claimed, ``isolation.process``'s, orphans.

    Thread-safe. One for a process.

    Raises:
        IsolationError: the kernel refuses (older than 3.4).
    """

    def __init__(self) -> None:
        if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            reason = os.strerror(ctypes.get_errno())
            raise IsolationError(f"cannot become the parent of orphaned processes: {reason}")
        self._lock = threading.RLock()
        self._claimed: dict[int, Claim] = {}

    @contextmanager
    def adopting(self) -> Iterator[None]:
        """While the block runs no orphan is reaped: for the time between a child's birth and its ``claim``."""
        with self._lock:
            yield

    def claim(self, pid: int) -> Claim:
        """Reserve a child's exit status. Call within ``adopting``, else an early end is lost.

        Raises:
            ProcessLookupError: no such process.
        """
        with self._lock:
            claim = Claim(pid, os.pidfd_open(pid))
            self._claimed[pid] = claim
            return claim

    def release(self, claim: Claim) -> None:
        """Give a claim up; the process is reaped as an orphan when it is not yet."""
        with self._lock:
            claim.close()
            if self._claimed.get(claim.pid) is claim:
                del self._claimed[claim.pid]

    def orphans(self) -> frozenset[int]:
        """Children that nobody claimed and ``isolation.process`` did not start, dead or alive."""
        with self._lock, owned_children() as owned:
            return frozenset(children() - owned - self._claimed.keys())

    def reap_orphans(self) -> int:
        """Collect every orphan that has ended; give how many there were."""
        count = 0
        with self._lock, owned_children() as owned:
            for pid in children() - owned - self._claimed.keys():
                try:
                    count += os.waitpid(pid, os.WNOHANG)[0] == pid
                except ChildProcessError:
                    continue
        return count


def children(pid: int | None = None) -> set[int]:
    """Direct children of a process (of this one when None), zombies included; empty when it is gone.

    Read from ``/proc/PID/task/*/children``, which needs no right to look into the children themselves. Kernels built
    without that file are served by a walk over ``/proc``.
    """
    parent = os.getpid() if pid is None else pid
    try:
        tasks = os.listdir(f"/proc/{parent}/task")
    except OSError:
        return set()
    found: set[int] = set()
    for task in tasks:
        try:
            found.update(map(int, Path(f"/proc/{parent}/task/{task}/children").read_text().split()))
        except FileNotFoundError:
            if not os.path.exists(f"/proc/{os.getpid()}/task/{os.getpid()}/children"):
                return _children_by_walk(parent)
        except OSError:
            continue
    return found


def descendants(pid: int) -> set[int]:
    """All processes below ``pid``, itself not included."""
    found: set[int] = set()
    front = [pid]
    while front:
        new = children(front.pop()) - found
        found |= new
        front.extend(new)
    return found


def command_line(pid: int) -> tuple[str, ...]:
    """The argv of a process; empty when it is gone, a zombie or hidden from us."""
    try:
        data = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ()
    return tuple(os.fsdecode(part) for part in data.split(b"\0")[:-1])


def _children_by_walk(parent: int) -> set[int]:
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path(f"/proc/{entry}/stat").read_text()
            except OSError:
                continue
            # The command may hold spaces and parentheses; the parent is the second field after the last one.
            match = re.match(r".*\) \S (\d+) ", stat, re.DOTALL)
            if match and int(match[1]) == parent:
                found.add(int(entry))
    return found
