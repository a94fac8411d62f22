"""The only user of ``subprocess``: ``run`` waits for a program, ``spawn`` starts one.

Both set standard input to /dev/null, start from a minimal environment, pass only the given descriptors, put a
copy-pasteable command line into every error, and end the child on any error. Both record which children are theirs, so
that the reaper of orphans (``isolation.host.reaper``) never takes their exit status.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from isolation.errors import ProcessError

MINIMAL_ENVIRONMENT: Mapping[str, str] = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
}
"""Environment of a host program: a search path and a locale; none of our own variables, which may hold secrets."""

_END_GRACE_S = 2.0
"""Seconds between SIGTERM and SIGKILL for a spawned program."""

_children_lock = threading.Lock()
_owned: set[int] = set()


@dataclass(frozen=True, slots=True)
class Completed:
    """Result of a program that has ended."""

    argv: tuple[str, ...]
    returncode: int
    """Exit status; minus the signal when one ended it."""
    stdout: str
    stderr: str


def run(
    argv: Sequence[str],
    *,
    timeout_s: float,
    check: bool = True,
    env: Mapping[str, str] = MINIMAL_ENVIRONMENT,
    cwd: Path | None = None,
    stdio: int | None = None,
    cpus: Collection[int] = (),
) -> Completed:
    """Run a program to completion.

    Args:
        argv: program and arguments; never a shell command line.
        timeout_s: seconds after which it is killed.
        check: raise when its status is not zero.
        env: the whole environment.
        cwd: working directory; that of this process when None.
        stdio: descriptor for both outputs, inherited by processes that the program leaves running; captured when None.
        cpus: processors that it and what it leaves running are pinned to; see ``start``.

    Raises:
        ProcessError: it could not be started, timed out, or (with ``check``) failed.
    """
    child = start(argv, env=env, cwd=cwd, stdio=subprocess.PIPE if stdio is None else stdio, cpus=cpus)._process
    try:
        out, err = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise ProcessError(argv, None, problem=f"took longer than {timeout_s:g} s") from error
    finally:
        _end(child, grace_s=0)
    # Both are None when the outputs were not captured; typeshed does not model that.
    stdout, stderr = ((part or b"").decode(errors="replace") for part in (out, err))
    done = Completed(tuple(argv), child.returncode, stdout, stderr)
    if check and done.returncode != 0:
        raise ProcessError(argv, done.returncode, done.stderr)
    return done


class Child:
    """A running child program; made by ``spawn``."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        """Return its process id, which is valid until ``poll`` has returned a status."""
        return self._process.pid

    def poll(self) -> int | None:
        """Return its exit status (minus the signal), or None while it runs."""
        status = self._process.poll()
        if status is not None:
            _disown(self._process.pid)
        return status

    def wait(self, timeout_s: float) -> int | None:
        """Return its exit status, or None when it is still running after ``timeout_s`` seconds."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        return self.poll()

    def kill(self) -> None:
        """End it and do not wait: a process that hangs in a driver ends when the driver lets it. Idempotent."""
        self._process.kill()

    def end(self, grace_s: float = _END_GRACE_S) -> None:
        """End it: SIGTERM, then SIGKILL after ``grace_s`` seconds; 0 means SIGKILL at once. Idempotent."""
        _end(self._process, grace_s=grace_s)


def start(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] = MINIMAL_ENVIRONMENT,
    cwd: Path | None = None,
    stdio: int | None = None,
    own_group: bool = False,
    descriptors: Sequence[int] = (),
    cpus: Collection[int] = (),
) -> Child:
    """Start a program whose end the caller handles; prefer ``spawn``.

    Args:
        argv: program and arguments.
        env: the whole environment.
        cwd: working directory; that of this process when None.
        stdio: descriptor for both outputs; /dev/null when None.
        own_group: make it the leader of a new session, so that it and its children can be ended together.
        descriptors: further descriptors that it inherits, under the same numbers.
        cpus: processors that it and its descendants are pinned to; all of this thread's when empty, or when this thread
            may use none of them any more.

    Raises:
        ProcessError: it could not be started.
    """
    target = subprocess.DEVNULL if stdio is None else stdio
    with _children_lock:
        try:
            with _pinned(cpus):
                child = subprocess.Popen(
                    list(argv),
                    stdin=subprocess.DEVNULL,
                    stdout=target,
                    stderr=target,
                    env=dict(env),
                    cwd=cwd,
                    start_new_session=own_group,
                    pass_fds=tuple(descriptors),
                )
        except OSError as error:
            raise ProcessError(argv, None, problem=f"could not be started ({error.strerror})") from error
        _owned.add(child.pid)
    return Child(child)


@contextmanager
def spawn(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] = MINIMAL_ENVIRONMENT,
    cwd: Path | None = None,
    stdio: int | None = None,
) -> Iterator[Child]:
    """Run a program for the duration of a ``with`` block, which ends it however the block ends."""
    child = start(argv, env=env, cwd=cwd, stdio=stdio)
    try:
        yield child
    finally:
        child.end()


@contextmanager
def owned_children() -> Iterator[frozenset[int]]:
    """Yield the children whose exit status belongs to this module; no child starts while the block runs."""
    with _children_lock:
        yield frozenset(_owned)


@contextmanager
def _pinned(cpus: Collection[int]) -> Iterator[None]:
    """Pin the calling thread while the block runs: a child inherits this with the fork, before its first thread."""
    before = os.sched_getaffinity(0)
    usable = before.intersection(cpus)
    if not usable:
        yield
        return
    os.sched_setaffinity(0, usable)
    try:
        yield
    finally:
        # Refused only when all these processors were taken away meanwhile; the kernel has then chosen others.
        with suppress(OSError):
            os.sched_setaffinity(0, before)


def _end(child: subprocess.Popen[bytes], *, grace_s: float) -> None:
    try:
        if child.poll() is None and grace_s > 0:
            child.terminate()
            with suppress(subprocess.TimeoutExpired):
                child.wait(grace_s)
        if child.poll() is None:
            child.kill()
            child.wait()
    finally:
        for stream in (child.stdout, child.stderr):
            if stream is not None:
                stream.close()
        _disown(child.pid)


def _disown(pid: int) -> None:
    with _children_lock:
        _owned.discard(pid)
