"""Subreaper: adopts orphaned processes and decides who reads which exit status.

``runsc create`` exits and leaves the sandbox, its gofer and later its stubs to the nearest *subreaper*, this process.
It reads the sandbox's status itself (no ``runsc wait`` beside each sandbox); the others must be reaped, because ``runsc
delete`` waits seconds to minutes for a zombie gofer (measured: 5 s and 120 s instead of 12 ms).
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
from isolation.host.process import owned_children

_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


class Claim:
    """A child whose exit status a caller has claimed: its pidfd and, after its end, its status."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self.pidfd = pidfd
        self._status: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Return the exit status (minus the signal), or None while it runs."""
        with self._lock:
            if self._status is None and self.pidfd >= 0:
                result = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG)
                if result is not None:
                    exited = result.si_code == os.CLD_EXITED
                    self._status = result.si_status if exited else -result.si_status
            return self._status

    def wait(self, timeout_s: float) -> int | None:
        """Wait for its end; None when it is still running after ``timeout_s`` seconds."""
        if self.pidfd >= 0 and self._status is None:
            poller = select.poll()
            poller.register(self.pidfd, select.POLLIN)
            poller.poll(timeout_s * 1_000)
        return self.poll()

    def close(self) -> None:
        """Close the pidfd; the status stays available. Idempotent."""
        with self._lock:
            if self.pidfd >= 0:
                os.close(self.pidfd)
                self.pidfd = -1


class Reaper:
    """Makes this process a subreaper and classifies its children: claimed, ``isolation.host.process``'s, orphans.

    Thread-safe. One for each process.

    Raises:
        IsolationError: the kernel refuses (older than 3.4).
    """

    def __init__(self) -> None:
        become_subreaper()
        self._lock = threading.RLock()
        self._claimed: dict[int, Claim] = {}
        self._adopting: list[frozenset[int]] = []
        """Orphans that were there when each of the ``adopting`` blocks began that run now."""

    @contextmanager
    def adopting(self) -> Iterator[frozenset[int]]:
        """Reap none of the orphans that come while the block runs, between a child's birth and its ``claim``; yields
        those that are there. Blocks of several threads may run at the same time: both sandboxes of a model are made
        beside each other."""
        with self._lock:
            before = self.orphans()
            self._adopting.append(before)
        try:
            yield before
        finally:
            with self._lock:
                self._adopting.remove(before)

    def claim(self, pid: int) -> Claim:
        """Claim a child's exit status. Call within ``adopting``, or an early end is lost.

        Raises:
            ProcessLookupError: no such process.
        """
        with self._lock:
            claim = Claim(pid, os.pidfd_open(pid))
            self._claimed[pid] = claim
            return claim

    def release(self, claim: Claim) -> None:
        """Release a claim; a process that has not been reaped becomes an orphan."""
        with self._lock:
            claim.close()
            if self._claimed.get(claim.pid) is claim:
                del self._claimed[claim.pid]

    def orphans(self) -> frozenset[int]:
        """Return children that are unclaimed and not started by ``isolation.host.process``, dead or alive."""
        with self._lock, owned_children() as owned:
            return frozenset(children() - owned - self._claimed.keys())

    def reap_orphans(self) -> int:
        """Reap every orphan that has ended, but for those that ``adopting`` protects; return their number."""
        count = 0
        with self._lock, owned_children() as owned:
            for pid in (children() - owned - self._claimed.keys()).intersection(*self._adopting):
                try:
                    count += os.waitpid(pid, os.WNOHANG)[0] == pid
                except ChildProcessError:
                    continue
        return count


def become_subreaper() -> None:
    """Make this process the parent of every orphan below it (prctl(2), PR_SET_CHILD_SUBREAPER); kept over exec.

    Raises:
        IsolationError: the kernel refuses (older than 3.4).
    """
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise IsolationError(f"cannot become the parent of orphaned processes: {reason}")


def children(pid: int | None = None) -> set[int]:
    """Return the direct children of a process (of this one when None), zombies included; empty when it is gone.

    They are read from ``/proc/PID/task/*/children``, which needs no permission on the children themselves. On kernels
    built without that file, ``/proc`` is scanned.
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
    """Return all processes below ``pid``, excluding itself."""
    found: set[int] = set()
    front = [pid]
    while front:
        new = children(front.pop()) - found
        found |= new
        front.extend(new)
    return found


def command_line(pid: int) -> tuple[str, ...]:
    """Return the argv of a process; empty when it is gone, a zombie or hidden."""
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
            # The command may contain spaces and parentheses; the parent is the second field after the last one.
            match = re.match(r".*\) \S (\d+) ", stat, re.DOTALL)
            if match and int(match[1]) == parent:
                found.add(int(entry))
    return found
