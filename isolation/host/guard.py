"""Guard of a command: everything that the command starts ends when the command ends, also when it is killed.

The command that a user starts becomes three processes::

    command   waits, passes signals on, ends as the worker ended
      guard   adopts every orphan below it (PR_SET_CHILD_SUBREAPER), watches the pipe of the command and the worker
        worker   does the work; all programs that the work starts are below it

The kernel keeps every descendant below the guard, also those in sessions of their own, so nothing is listed and nothing
can be forgotten. When the command or the worker has ended, the guard asks what is left to end, kills it after
``GRACE_S`` seconds, and removes the command's scratch folder (``isolation.host.scratch``). When the guard is killed,
the command does the same in its place. When all are killed, the next command sweeps.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

from isolation.host.leftovers import group_parents, remove, thaw
from isolation.host.process import MINIMAL_ENVIRONMENT
from isolation.host.reaper import become_subreaper, children, descendants
from isolation.host.scratch import Scratch, things_of

GRACE_S = 5.0
"""Seconds in which what a dead command started may end by itself: an appliance ends its sandboxes in one or two."""

KILL_S = 20.0
"""Seconds after which a killed process that does not end is given up: the kernel frees some GiB in 1.6 s, longer under
load."""

_POLL_S = 0.05
_PR_SET_PDEATHSIG = 1
_SI_KERNEL = 0x80
"""``si_code`` of what the terminal sends: it reaches the worker by itself (sigaction(2))."""

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_WAITED = frozenset({*_PASSED_ON, signal.SIGCHLD})
_IGNORED = (*_PASSED_ON, signal.SIGPIPE, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
"""Signals that the guard ignores: it ends after all others, and a terminal that stops the command does not stop it."""

_ROOT = Path(__file__).resolve().parents[2]


def guarded(scratch: Scratch, *, temporary: bool) -> None:
    """Continue as the worker of a guarded command; the calling process waits for it and never returns.

    Call it in a process of one thread, before anything is started. SIGTERM then ends the worker by ``SystemExit``, so
    that context managers do their work.

    Args:
        scratch: folder that is removed at the end.
        temporary: make the worker's temporary files in that folder.

    Raises:
        IsolationError: the kernel cannot make a process the parent of orphans.
        OSError: no process can be made.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    become_subreaper()
    life_read, life_write = os.pipe()
    told_read, told_write = os.pipe()
    # Until the worker can handle them: a signal that comes meanwhile is not lost.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED)
    guard = os.fork()
    if guard == 0:
        os.close(life_write)
        os.close(told_read)
        _fork_worker(scratch, life_read, told_write)
        os.close(life_read)
        _become_worker(scratch, told_write, temporary)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    os.close(life_read)
    os.close(told_write)
    _wait(guard, told_read, scratch)


def _fork_worker(scratch: Scratch, life: int, told: int) -> None:
    """Return in the worker; go on as the guard's program in its parent, which keeps the worker as its child."""
    become_subreaper()
    worker = os.fork()
    if worker == 0:
        return
    try:
        os.close(told)
        for fd in (life, scratch.lock_fd):
            os.set_inheritable(fd, True)
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        # A command line of its own: what ends the command by its name does not end its guard.
        argv = (sys.executable, "-P", "-m", "isolation.host.guard", str(life), str(worker), str(scratch.path))
        os.execve(sys.executable, argv, {**MINIMAL_ENVIRONMENT, "PYTHONPATH": str(_ROOT)})  # noqa: S606 - no shell
    except OSError as error:
        os.write(2, f"athanor: no guard could be started: {error}\n".encode())
    finally:
        # A forked process must never return into the command's code; the command ends what it started.
        os.kill(os.getpid(), signal.SIGKILL)


def _become_worker(scratch: Scratch, told: int, temporary: bool) -> None:
    guard = os.getppid()
    # The guard has one thread, so its end is the end of the thread that the kernel watches.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    os.write(told, str(os.getpid()).encode())
    os.close(told)
    signal.signal(signal.SIGTERM, _end)
    if temporary:
        os.environ["TMPDIR"] = tempfile.tempdir = str(scratch.path)
    if os.getppid() != guard:
        os.kill(os.getpid(), signal.SIGTERM)


def _end(number: int, _frame: FrameType | None) -> NoReturn:
    """End the worker once: a second SIGTERM does not interrupt what the first one began."""
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)


def _wait(guard: int, told: int, scratch: Scratch) -> NoReturn:
    """Pass signals on to the worker until the guard has ended, then end as the worker ended."""
    worker = _pidfd(os.read(told, 32))
    os.close(told)
    status = None
    while status is None:
        caught = signal.sigwaitinfo(_WAITED)
        if caught.si_signo == signal.SIGCHLD:
            status = _reap().get(guard)
        elif worker is not None and caught.si_code != _SI_KERNEL:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(worker, caught.si_signo)
    if os.WIFSIGNALED(status):
        clean(scratch.path)
    os._exit(_code(status))


def _pidfd(told: bytes) -> int | None:
    with contextlib.suppress(ProcessLookupError, ValueError):
        return os.pidfd_open(int(told))
    return None


def _code(status: int) -> int:
    """Return the exit code of a wait status: 128 and the signal's number for a killed process. Pure."""
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def clean(folder: Path) -> None:
    """End all descendants of this process, a subreaper, and remove what belongs to a scratch folder."""
    things = things_of(folder)
    # Looked for before anything ends: what ends may remove the folders that name the groups.
    groups = group_parents(things)
    left = end_descendants(lambda: thaw(groups))
    remains = remove(things, dict.fromkeys((*groups, *group_parents(things))))
    for what in (*(f"process {pid}" for pid in left), *remains):
        os.write(2, f"athanor: {what} could not be removed; the next selftest, bench or demo tries again\n".encode())


def end_descendants(thaw_all: Callable[[], None] = lambda: None) -> list[int]:
    """Ask all descendants of this process to end, kill them after ``GRACE_S`` seconds; return those that remain.

    Args:
        thaw_all: called after each round of SIGKILL, which frozen processes do not receive.
    """
    asked: set[int] = set()
    grace = time.monotonic() + GRACE_S
    while (left := _left()) and time.monotonic() < grace:
        for pid in children() - asked:
            asked.add(pid)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGTERM)
        time.sleep(_POLL_S)
    deadline = time.monotonic() + KILL_S
    while left and time.monotonic() < deadline:
        _kill(left)
        thaw_all()
        time.sleep(_POLL_S)
        left = _left()
    return sorted(left)


def _left() -> set[int]:
    _reap()
    return descendants(os.getpid())


def _kill(pids: set[int]) -> None:
    """SIGKILL to these processes, if they still are descendants once a descriptor holds them."""
    pidfds = {}
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            pidfds[pid] = os.pidfd_open(pid)
    still = descendants(os.getpid())
    for pid, pidfd in pidfds.items():
        if pid in still:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)


def _reap() -> dict[int, int]:
    """Reap all children that have ended; return their wait statuses."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = found[1]
    return ended


def main(argv: list[str]) -> int:
    """Run the guard: ``LIFE WORKER FOLDER``; gives the worker's exit code.

    LIFE is the read end of a pipe that closes with the command, WORKER a child, FOLDER the scratch folder, whose lock
    is inherited.
    """
    life, worker, folder = int(argv[0]), int(argv[1]), Path(argv[2])
    status = _watch(life, worker)
    clean(folder)
    return 0 if status is None else _code(status)


def _watch(life: int, worker: int) -> int | None:
    """Reap orphans until the worker has ended or the command's pipe has closed; return the worker's wait status."""
    woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    poller = select.poll()
    poller.register(life, select.POLLIN)
    poller.register(woken, select.POLLIN)
    while True:
        ended = _reap()
        if worker in ended:
            return ended[worker]
        ready = dict(poller.poll())
        if life in ready:
            return None
        with contextlib.suppress(BlockingIOError):
            os.read(woken, 4_096)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
