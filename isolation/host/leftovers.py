"""What a killed command leaves on a machine, and its removal: processes, cgroups, mounts, folders, kernel objects."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import shutil
import signal
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from isolation.errors import IsolationError
from isolation.host.cgroup import remove_group, write_freezer
from isolation.host.cgroup_tree import parse_mountinfo
from isolation.host.reaper import command_line
from isolation.host.rundir import parent_group

LAUNCHER_LOCK = "launcher.lock"
"""Lock that a living appliance holds in its run directory."""

_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8
_IPC_RMID = 0
MQ_UNLINK = 241 if os.uname().machine == "x86_64" else 181
"""Number of mq_unlink(2), which the C library has in a library of its own."""

_PROGRAMS = ("python", "runsc")
"""First letters of what a command starts: a pager that shows a file of a scratch folder is left alone."""

_MAX_GROUP_DEPTH = 5
_MAX_RUN_DEPTH = 4
"""Levels below a hierarchy's root, and below a scratch folder, in which groups and run directories are looked for."""

_END_S = 5.0
_REMOVE_S = 3.0
_POLL_S = 0.05

_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Things:
    """What belongs to one command."""

    folder: Path
    """Its scratch folder."""
    run_directories: tuple[Path, ...] = ()
    """Run directories of its appliances that lie elsewhere."""
    files: tuple[Path, ...] = ()
    queues: tuple[str, ...] = ()
    """Names of POSIX message queues."""
    segments: tuple[int, ...] = ()
    """Keys of System V segments."""


def end_processes(things: Things, groups: Iterable[Path]) -> None:
    """Kill the programs of a dead command that name one of its folders, or work in one, and wait for their ends."""
    folders = (things.folder, *filter(_is_free, things.run_directories))
    pidfds = []
    try:
        for pid in _programs_in(folders):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                pidfd = os.pidfd_open(pid)
                pidfds.append(pidfd)
                # Once more, now that the descriptor holds it: the number may be another process's by now.
                if _is_in(pid, folders):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        thaw(groups)
        _await_ends(pidfds)
    finally:
        for pidfd in pidfds:
            os.close(pidfd)


def thaw(groups: Iterable[Path]) -> None:
    """Thaw the sandboxes below these cgroups: a frozen process of cgroup v1 does not end when it is killed."""
    for parent in groups:
        for group in _groups_in(parent):
            write_freezer(group, frozen=False)


def remove(things: Things, groups: Iterable[Path]) -> list[str]:
    """Remove what belongs to a command without processes; return what remains.

    Args:
        things: what belongs to it.
        groups: cgroups above its sandboxes, from ``group_parents``.
    """
    for parent in groups:
        with contextlib.suppress(OSError, IsolationError):
            for group in _groups_in(parent):
                remove_group(group)
            parent.rmdir()
    for point in _mounts_below(things.folder):
        _LIBC.umount2(os.fsencode(point), _MNT_DETACH | _UMOUNT_NOFOLLOW)
    for path in things.files:
        _unlink(path)
    for queue in things.queues:
        _LIBC.syscall(ctypes.c_long(MQ_UNLINK), queue.encode())
    for key in things.segments:
        segment = _LIBC.shmget(key, 0, 0)
        if segment >= 0:
            _LIBC.shmctl(segment, _IPC_RMID, None)
    for path in things.run_directories:
        _remove_run_directory(path)
    return _remove_folder(things.folder)


def _programs_in(folders: tuple[Path, ...]) -> list[int]:
    pids = (int(entry) for entry in os.listdir("/proc") if entry.isdigit())
    return [pid for pid in pids if pid != os.getpid() and _is_in(pid, folders)]


def _is_in(pid: int, folders: tuple[Path, ...]) -> bool:
    """Return whether a process is a program of ours that names a folder in its command, or works in one."""
    argv = command_line(pid)
    if not argv or not Path(argv[0]).name.startswith(_PROGRAMS):
        return False
    try:
        works_in = os.readlink(f"/proc/{pid}/cwd")
    except OSError:
        works_in = ""
    return any(names(word, folder) for word in (*argv, works_in) for folder in folders)


def names(word: str, folder: Path) -> bool:
    """Return whether a word of a command names a folder or what is in it; ``--root=PATH`` is one. Pure."""
    path = word.partition("=")[2] if word.startswith("--") else word
    return path == str(folder) or path.startswith(f"{folder}/")


def _await_ends(pidfds: Iterable[int]) -> None:
    deadline = time.monotonic() + _END_S
    for pidfd in pidfds:
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        poller.poll(max(0.0, deadline - time.monotonic()) * 1_000)


def group_parents(things: Things) -> list[Path]:
    """Find the cgroups above all sandboxes of a command, in every hierarchy."""
    labels = {parent_group(path) for path in _sandbox_directories(things)}
    if not labels:
        return []
    found: list[Path] = []
    for _, point in parse_mountinfo(Path("/proc/self/mountinfo").read_text()).values():
        for depth in range(_MAX_GROUP_DEPTH):
            found += (path for label in labels for path in point.glob("/".join(["*"] * depth + [label])))
    return list(dict.fromkeys(found))


def _groups_in(parent: Path) -> list[Path]:
    try:
        return [path for path in parent.iterdir() if path.is_dir()]
    except OSError:
        return []


def _sandbox_directories(things: Things) -> list[Path]:
    """Find the run directories of sandboxes (``isolation.host.rundir``) that belong to a command."""
    found = []
    for top in (things.folder, *filter(_is_free, things.run_directories)):
        for depth in range(1, _MAX_RUN_DEPTH + 1):
            found += [path.parent for path in top.glob("/".join(["*"] * depth + ["bundles"])) if not path.is_symlink()]
    return found


def _mounts_below(folder: Path) -> list[str]:
    """List the mount points at and below a folder, the deepest first."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    points = [line.split()[4].encode().decode("unicode_escape") for line in lines]
    return sorted((point for point in points if names(point, folder)), key=len, reverse=True)


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        if path.lstat().st_uid == os.geteuid() and stat.S_ISREG(path.lstat().st_mode):
            path.unlink()


def _is_free(run_directory: Path) -> bool:
    """Return whether a run directory is this user's and no living appliance holds it."""
    with _held(run_directory) as free:
        return free


@contextlib.contextmanager
def _held(run_directory: Path) -> Iterator[bool]:
    """Hold a run directory's lock while the block runs; yields False where that is not ours to take."""
    lock_fd = -1
    try:
        status = run_directory.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            yield False
            return
        lock_fd = os.open(run_directory / LAUNCHER_LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_CREAT, 0o600)
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        yield False
    else:
        yield True
    finally:
        if lock_fd >= 0:
            os.close(lock_fd)


def _remove_run_directory(path: Path) -> None:
    with _held(path) as free:
        if free:
            shutil.rmtree(path, ignore_errors=True)


def _remove_folder(folder: Path) -> list[str]:
    """Remove a folder; what a process that is ending still writes is removed in the next turn."""
    deadline = time.monotonic() + _REMOVE_S
    while True:
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.lexists(folder):
            return []
        if time.monotonic() > deadline:
            return [str(folder)]
        time.sleep(_POLL_S)
