"""``UnsafeRuntime``: runs the programs without isolation, for machines where no sandbox can run.

A sandbox is a child process with resource limits, in its own session. It has the host's network and files and the
supervisor's user. The operator must ask for this runtime by name; the supervisor prints a warning.
"""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Callable
from pathlib import Path

from isolation.errors import ProcessError, SandboxError, SandboxStartError, SandboxTimeoutError
from isolation.gvisor.runtime import Ending, Program
from isolation.gvisor.spec import SandboxSpec
from isolation.host.cgroup import CgroupSupport
from isolation.host.process import MINIMAL_ENVIRONMENT, Child, start
from isolation.host.rundir import RunDirectory
from isolation.host.stdio import LineCallback, LogPipe
from isolation.host.usage import processor_seconds, proportional_bytes

_END_TIMEOUT_S = 20.0


class UnsafeRuntime:
    """Boots "sandboxes" that are plain child processes.

    Args:
        run_dir: directory of this supervisor alone; locked for the runtime's lifetime.
    """

    label = "unsafe/none"
    cgroups = CgroupSupport(0, (), "no sandbox")
    fills_folders = False

    def __init__(self, run_dir: Path) -> None:
        self._directory = RunDirectory.open(run_dir)

    def guest_path(self, spec: SandboxSpec, target: str) -> str:
        """Return the host path behind ``target``, using the longest mount above it."""
        return to_host(target, _table(spec))

    def told_memory(self, spec: SandboxSpec) -> int:
        """Return 0: plain processes see the machine's memory."""
        return 0

    @property
    def program_file(self) -> None:
        """Return None."""
        return None

    def program(self) -> Program:
        """Return nothing: no program isolates these processes."""
        return Program("", "", ())

    @property
    def surroundings(self) -> tuple[tuple[str, str], ...]:
        """Return nothing: plain processes are not saved."""
        return ()

    def identity(self, spec: SandboxSpec) -> str:
        """Return an empty identity: plain processes cannot be saved."""
        return ""

    def boot(
        self,
        spec: SandboxSpec,
        on_line: LineCallback | None = None,
        image: Path | None = None,
        hold: Callable[[], None] | None = None,
    ) -> UnsafeSandbox:
        """Start the program with its paths translated to host paths; see ``Runtime.boot``."""
        if image is not None:
            raise SandboxStartError(f"{spec.name} cannot be restored: plain processes are not saved")
        if hold is not None:
            hold()
        record = self._directory.bundles / spec.name
        try:
            record.mkdir(mode=0o700)
        except FileExistsError as error:
            raise SandboxStartError(f"a sandbox named {spec.name} exists already") from error
        log = LogPipe(spec.name, on_line)
        try:
            child = start(
                host_argv(spec), env=host_environment(spec), stdio=log.write_fd, own_group=True, cpus=spec.cpus
            )
        except ProcessError as error:
            log.close()
            record.rmdir()
            raise SandboxStartError(f"sandbox {spec.name} did not come up: {error}") from error
        log.close_write()
        sandbox = UnsafeSandbox(spec.name, child, log, record)
        try:
            (record / "pid").write_text(f"{child.pid} {_start_time(child.pid)}")
            _limit(child.pid, spec)
        except BaseException:
            sandbox.delete()
            raise
        return sandbox

    def cleanup_stale(self) -> tuple[str, ...]:
        """End process groups left by a killed supervisor and remove their records; return their names."""
        for record in self._directory.bundles.iterdir():
            try:
                pid, started = (record / "pid").read_text().split()
            except (OSError, ValueError):
                continue
            # The number may belong to another process by now; its start time tells.
            if _start_time(int(pid)) == started:
                os.killpg(int(pid), signal.SIGKILL)
        return self._directory.wipe()

    def close(self) -> None:
        """Release the run directory."""
        self._directory.close()


class UnsafeSandbox:
    """One child process; see ``isolation.gvisor.runtime.Sandbox`` for the contract."""

    def __init__(self, name: str, child: Child, log: LogPipe, record: Path) -> None:
        self.name = name
        self.pid = child.pid
        self.pidfd = os.pidfd_open(child.pid)
        self._child = child
        self._log = log
        self._record = record
        self._status: int | None = None
        self._lock = threading.RLock()

    @property
    def peer_pids(self) -> frozenset[int]:
        """Return the process itself."""
        return frozenset({self.pid})

    def poll(self) -> int | None:
        """Return the exit status once it has ended, else None."""
        with self._lock:
            if self._status is None:
                self._status = self._child.poll()
            return self._status

    def wait(self, timeout_s: float) -> int | None:
        """Wait for its end; None when it is still running."""
        self._child.wait(timeout_s)
        return self.poll()

    def ending(self) -> Ending | None:
        """Describe how it ended; without a cgroup, an out-of-memory kill looks like any other kill."""
        status = self.poll()
        return None if status is None else Ending(status, out_of_memory=False)

    def settle(self, *, busy: bool = False) -> None:
        """Do nothing: no runtime process exists beside the program."""

    def processor_s(self) -> float:
        """Return the processor seconds of the program and its descendants."""
        return processor_seconds(self.pid) if self.poll() is None else 0.0

    def memory_bytes(self) -> int:
        """Return the memory in bytes of the program and its descendants."""
        return proportional_bytes(self.pid) if self.poll() is None else 0

    def freeze(self) -> bool:
        """Return False: a plain process has no group of its own that could be frozen."""
        return False

    def thaw(self) -> None:
        """Do nothing: it is never frozen."""

    def kill(self) -> None:
        """Send SIGKILL to its process group."""
        with self._lock:
            if self.poll() is None:
                os.killpg(self.pid, signal.SIGKILL)

    def output_tail(self) -> tuple[str, ...]:
        """Return the last lines it printed."""
        return self._log.tail(ended=self.poll() is not None)

    def save(self, folder: Path) -> None:
        """Refuse: plain processes cannot be saved."""
        raise SandboxError(f"{self.name} is a plain process and cannot be saved into {folder}")

    def delete(self) -> None:
        """Kill, reap, close the pipe, remove the record. Idempotent."""
        with self._lock:
            if self.pidfd < 0:
                return
            self.kill()
            if self.wait(_END_TIMEOUT_S) is None:
                raise SandboxTimeoutError(f"process {self.pid} of {self.name} does not end after SIGKILL")
            self._log.close()
            (self._record / "pid").unlink(missing_ok=True)
            if self._record.is_dir():
                self._record.rmdir()
            os.close(self.pidfd)
            self.pidfd = -1


def _table(spec: SandboxSpec) -> dict[str, str]:
    table = dict(spec.rootfs.host_paths)
    table.update((mount.target, os.fspath(mount.source)) for mount in spec.mounts)
    return table


def to_host(path: str, table: dict[str, str]) -> str:
    """Translate a path inside to a host path by the longest prefix in ``table``; unchanged without a match. Pure."""
    prefix = path
    while prefix not in table and prefix != "/":
        prefix = prefix.rpartition("/")[0] or "/"
    return table[prefix] + path[len(prefix) :] if prefix in table else path


def host_argv(spec: SandboxSpec) -> list[str]:
    """Translate every absolute path in the command to a host path. Pure."""
    table = _table(spec)
    return [to_host(part, table) if part.startswith("/") else part for part in spec.argv]


def host_environment(spec: SandboxSpec) -> dict[str, str]:
    """Combine the minimal environment with the spec's, with PYTHONPATH translated. Pure."""
    table = _table(spec)
    path = ":".join(to_host(part, table) for part in spec.rootfs.python_path)
    return {**MINIMAL_ENVIRONMENT, "PYTHONPATH": path, **dict(spec.env)}


def _limit(pid: int, spec: SandboxSpec) -> None:
    """Set a limit after the start, not between fork and exec, where Python code is unsafe beside threads."""
    hard_nofile = resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]
    nofile = spec.limits.nofile if hard_nofile < 0 else min(spec.limits.nofile, hard_nofile)
    resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (nofile, nofile))


def _start_time(pid: int) -> str:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]
