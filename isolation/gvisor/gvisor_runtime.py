"""``GvisorRuntime``: sandboxes under gVisor's user-space kernel, driven through ``runsc``.

A boot is ``create`` (sentry and gofer start, the guest program does not), then the move into the cgroup, then
``start``. The end of a sandbox shows on a pidfd; its status is read with ``waitid``, because the supervisor is its
parent.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from isolation.errors import IsolationError, ProcessError, SandboxStartError, SandboxTimeoutError, UserNamespaceError
from isolation.gvisor.bundle import Bundle, Profile, oci_config
from isolation.gvisor.cpuid import processor, show_native_cpuid
from isolation.gvisor.runsc import COMPARES_MOUNTS_SINCE, Runsc, RunscCommand, container_id
from isolation.gvisor.runtime import Ending, Program
from isolation.gvisor.spec import SandboxSpec
from isolation.gvisor.timerslack import BUSY_SLACK_NS, SENTRY_SLACK_NS, let_timers_ring_late
from isolation.host.cgroup import Cgroup, CgroupSupport
from isolation.host.cgroup_tree import CgroupTree
from isolation.host.oom_score import let_end_first
from isolation.host.process import run, spawn
from isolation.host.reaper import Claim, Reaper, command_line, descendants
from isolation.host.rundir import RunDirectory
from isolation.host.stdio import LineCallback, LogPipe
from isolation.host.usage import processor_seconds, proportional_bytes, spent_seconds
from isolation.host.userns import current_profile

_VERB_TIMEOUT_S = 30.0
"""Time limit for one runsc command, which normally takes 0.02-0.2 s."""
_END_TIMEOUT_S = 20.0
"""Time limit for an end: after SIGKILL the kernel frees some GiB in 1.6 s, longer under load."""
_SAVE_TIMEOUT_S = 60.0
"""Time limit for a checkpoint: 150 MB take 0.6 s on an idle machine, half of it disk time."""
_POLL_S = 0.005
_RIGHTS_HINT = (
    "runsc needs root with CAP_SYS_ADMIN, CAP_SETUID, CAP_SETGID and CAP_SYS_CHROOT,"
    " or no root and a machine that allows user namespaces"
)
_MAX_SOCKET_PATH = 107
"""Bytes of a Unix socket's path; with a longer one runsc would silently use a world-writable directory."""


class GvisorRuntime:
    """Boots sandboxes under gVisor's systrap platform.

    Args:
        runsc: from ``find_runsc``.
        run_dir: directory of this supervisor alone, on a local file system; locked for the runtime's lifetime.

    Raises:
        IsolationError: another supervisor holds ``run_dir``.
        UserNamespaceError: not root, and ``userns.enter`` has not been called.
    """

    label = "gvisor/systrap"

    def __init__(self, runsc: Runsc, run_dir: Path) -> None:
        profile = current_profile()
        if profile is None:
            raise UserNamespaceError(
                "runsc needs root", hint="call isolation.host.userns.enter() before any thread is started"
            )
        self.runsc = runsc
        self.profile: Profile = profile
        self._directory = RunDirectory.open(run_dir)
        self._command = RunscCommand(runsc.path, self._directory.state, profile, runsc.version)
        self._tree = CgroupTree.detect(self._directory.label)
        self._reaper = Reaper()
        self.native_cpuid = show_native_cpuid()
        """Whether sandboxes see all processor features, or only those known to gVisor."""

    @property
    def cgroups(self) -> CgroupSupport:
        """Return which limits are enforced on this machine."""
        return self._tree.support

    def guest_path(self, spec: SandboxSpec, target: str) -> str:
        """Return the path unchanged: the sandbox sees every mount at its target."""
        return target

    def told_memory(self, spec: SandboxSpec) -> int:
        """Return the memory limit: gVisor reports a sandbox's own memory only."""
        return spec.limits.memory_bytes

    def control_socket(self, name: str) -> Path:
        """Return the path of the socket on which runsc talks to a sandbox's kernel; it is there while that one runs."""
        return self._directory.state / f"runsc-{container_id(name)}.sock"

    @property
    def program_file(self) -> Path:
        """Return runsc's file."""
        return self.runsc.path

    @property
    def fills_folders(self) -> bool:
        """Return whether this runsc restores into other mounts: the sentry finds those of the checkpoint by their
        destinations, and the gofer shows what it has mounted below them."""
        return self.runsc.version < COMPARES_MOUNTS_SINCE

    def program(self) -> Program:
        """Return runsc with its release, digest and flags; see ``Runtime.program``."""
        with self.runsc.path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        flags = tuple(flag for flag in self._command.flags()[1:] if not flag.startswith("--root="))
        with_gpu = tuple(flag for flag in self._command.flags(gpu=True) if flag not in self._command.flags())
        return Program(f"runsc {self.runsc.version}", digest, flags, with_gpu)

    @property
    def surroundings(self) -> tuple[tuple[str, str], ...]:
        """Return runsc, processor and kernel; see ``Runtime.surroundings``."""
        kind = hashlib.sha256(processor().encode()).hexdigest()[:16]
        return (("runsc", str(self.runsc.version)), ("processor", kind), ("kernel", os.uname().release))

    def identity(self, spec: SandboxSpec) -> str:
        """Identify runsc, its flags, the processor, the kernel and the bundle; see ``Runtime.identity``."""
        parts = [*self._command.flags()[2:], processor(), str(self.native_cpuid), os.uname().release]
        binary = self.runsc.path.stat()
        parts += [str(self.runsc.version), str(binary.st_size), str(binary.st_mtime_ns), self.profile.value]
        return json.dumps([parts, oci_config(spec, self.profile)], sort_keys=True)

    def boot(
        self,
        spec: SandboxSpec,
        on_line: LineCallback | None = None,
        image: Path | None = None,
        hold: Callable[[], None] | None = None,
    ) -> GvisorSandbox:
        """Start a sandbox; see ``Runtime.boot``."""
        socket = self.control_socket(spec.name)
        if len(os.fsencode(socket)) > _MAX_SOCKET_PATH:
            raise SandboxStartError(
                f"the path {socket} is longer than a socket's path may be", hint="use a shorter run directory"
            )
        bundle = Bundle.create(self._directory.bundles, spec, self.profile)
        with ExitStack() as undo:
            undo.callback(bundle.delete)
            cgroup = self._tree.create(spec.name, spec.limits)
            undo.callback(cgroup.delete)
            log = LogPipe(spec.name, on_line)
            undo.callback(log.close)
            undo.callback(self._remove_state, spec.name)
            try:
                claim, family = self._create(spec, bundle, cgroup, log)
            except ProcessError as error:
                log.close()  # reads all remaining runsc output
                raise start_error(spec.name, error, bundle, log) from error
            undo.pop_all()
        sandbox = GvisorSandbox(spec.name, self, _Parts(bundle, cgroup, log, claim, family))
        try:
            if hold is not None:
                hold()
            self._begin(spec.name, bundle, image)
        except BaseException as error:
            why = start_error(spec.name, error, bundle, log) if isinstance(error, ProcessError) else error
            try:
                sandbox.delete()
            except IsolationError as left:
                why.add_note(f"and it could not be removed: {left}")
            raise why from error
        return sandbox

    def _begin(self, name: str, bundle: Bundle, image: Path | None) -> None:
        """Start the program of a created sandbox, or restore into it what was saved.

        Raises:
            ProcessError: runsc failed.
        """
        if image is None:
            begin = self._command.start(name, gpu=bundle.gpu)
        else:
            begin = self._command.restore(name, bundle, image)
        run(begin, timeout_s=_VERB_TIMEOUT_S)

    def _create(self, spec: SandboxSpec, bundle: Bundle, cgroup: Cgroup, log: LogPipe) -> tuple[Claim, frozenset[int]]:
        """Run ``runsc create``, claim its process and move it into the cgroup; all or nothing.

        Sentry, gofer and stubs are descendants of this command and so inherit its processors.
        """
        with self._reaper.adopting() as before:
            mark = f"--bundle={bundle.path}"
            try:
                command = self._command.create(spec.name, bundle)
                run(command, timeout_s=_VERB_TIMEOUT_S, stdio=log.write_fd, cpus=spec.cpus)
                log.close_write()
                pid = int(bundle.pid_file.read_text())
                new = self._reaper.orphans() - before
                family = frozenset(orphan for orphan in new if mark in command_line(orphan))
                members = family | descendants(pid)
                cgroup.add(members)
                let_end_first(members)
                return self._reaper.claim(pid), family
            except BaseException:
                for orphan in self._reaper.orphans() - before:
                    if mark in command_line(orphan):
                        os.kill(orphan, signal.SIGKILL)
                raise

    def save(self, name: str, folder: Path) -> None:
        """Run ``runsc checkpoint``; see ``Sandbox.save``.

        Raises:
            ProcessError: runsc failed, for instance because the disk is full.
        """
        run(self._command.checkpoint(name, folder), timeout_s=_SAVE_TIMEOUT_S)

    def remove(self, name: str, family: frozenset[int]) -> None:
        """Run ``runsc delete`` while reaping, until every process in ``family`` is gone.

        Raises:
            ProcessError: runsc could not delete it.
            SandboxTimeoutError: one of its processes is still alive.
        """
        self._remove_state(name)
        deadline = time.monotonic() + _END_TIMEOUT_S
        while family & self._reaper.orphans():
            if self._reaper.reap_orphans() == 0:
                if time.monotonic() > deadline:
                    raise SandboxTimeoutError(f"processes of sandbox {name} cannot be ended")
                time.sleep(_POLL_S)

    def _remove_state(self, name: str) -> None:
        """Run ``runsc delete`` while reaping: it waits for the gofer, which is now this process's child."""
        argv = self._command.delete(name)
        deadline = time.monotonic() + _VERB_TIMEOUT_S
        with spawn(argv) as child:
            while (status := child.wait(_POLL_S)) is None:
                self._reaper.reap_orphans()
                if time.monotonic() > deadline:
                    raise ProcessError(argv, None, problem="did not end")
        self._reaper.reap_orphans()
        if status != 0:
            raise ProcessError(argv, status)

    def release(self, claim: Claim) -> None:
        """Release a sandbox's process claim after its end."""
        self._reaper.release(claim)

    def cleanup_stale(self) -> tuple[str, ...]:
        """Remove what a killed supervisor left behind; see ``isolation.host.rundir``."""
        self._tree.thaw()
        names = set(self._directory.end_stale_processes())
        names |= set(self._tree.cleanup())
        names |= set(self._directory.wipe())
        self._reaper.reap_orphans()
        return tuple(sorted(names))

    def close(self) -> None:
        """Remove the parent cgroup and release the run directory."""
        self._tree.close()
        self._directory.close()


@dataclass(frozen=True, slots=True)
class _Parts:
    """Resources that one sandbox owns."""

    bundle: Bundle
    cgroup: Cgroup
    log: LogPipe
    claim: Claim
    family: frozenset[int]
    """Process ids of the sentry and the gofer."""


class GvisorSandbox:
    """One sandbox of a ``GvisorRuntime``; see ``isolation.gvisor.runtime.Sandbox`` for the contract."""

    def __init__(self, name: str, runtime: GvisorRuntime, parts: _Parts) -> None:
        self.name = name
        self._runtime = runtime
        self._parts = parts
        self._ending: Ending | None = None
        self._deleted = False
        self._lock = threading.RLock()

    @property
    def pid(self) -> int:
        """Return the process id of the sentry."""
        return self._parts.claim.pid

    @property
    def peer_pids(self) -> frozenset[int]:
        """Return the process ids of sentry and gofer."""
        return self._parts.family

    @property
    def pidfd(self) -> int:
        """Return the pidfd, readable once the sandbox has ended; -1 after ``delete``."""
        return self._parts.claim.pidfd

    @property
    def log_fd(self) -> int:
        """Return the read end of the output pipe."""
        return self._parts.log.log_fd

    def poll(self) -> int | None:
        """Return the exit status once it has ended, else None."""
        ending = self.ending()
        return None if ending is None else ending.status

    def wait(self, timeout_s: float) -> int | None:
        """Wait for its end; None when it is still running."""
        self._parts.claim.wait(timeout_s)
        return self.poll()

    def ending(self) -> Ending | None:
        """Describe how it ended; the out-of-memory counter is read at the first call after the end."""
        with self._lock:
            if self._ending is None and (status := self._parts.claim.poll()) is not None:
                self._ending = Ending(status, self._parts.cgroup.oom_kills() > 0)
            return self._ending

    def settle(self, *, busy: bool = False) -> None:
        """Increase the timer slack of the sentry, more while the guest is busy."""
        with self._lock:
            if self.pidfd >= 0 and self.poll() is None:
                let_timers_ring_late(self.pid, BUSY_SLACK_NS if busy else SENTRY_SLACK_NS)

    def processor_s(self) -> float:
        """Return the processor seconds of sentry and stubs, and of the gofer where a cgroup counts or lists them
        all."""
        with self._lock:
            if self.pidfd < 0 or self.poll() is not None:
                return 0.0
            # A count is one small file, a list one and one for each process, and the tree some hundred.
            if (counted := self._parts.cgroup.processor_s()) is not None:
                return counted
            listed = self._parts.cgroup.listed()
            return spent_seconds(listed) if self.pid in listed else processor_seconds(self.pid)

    def memory_bytes(self) -> int:
        """Return the memory of its cgroup, or of sentry and stubs without one."""
        with self._lock:
            if self.pidfd < 0 or self.poll() is not None:
                return 0
            held = self._parts.cgroup.memory_bytes()
        return proportional_bytes(self.pid) if held is None else held

    def freeze(self) -> bool:
        """Freeze sentry, stubs and gofer by their cgroup; False where there is none. Not after ``delete`` has begun."""
        return self._parts.cgroup.freeze()

    def thaw(self) -> None:
        """Let a frozen one go on. Idempotent."""
        self._parts.cgroup.thaw()

    def kill(self) -> None:
        """SIGKILL to the sentry, which is thawed for it; its stubs and gofer end with it."""
        with self._lock:
            if self.pidfd >= 0 and self.poll() is None:
                self.thaw()
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def output_tail(self) -> tuple[str, ...]:
        """The last lines it printed."""
        return self._parts.log.tail(ended=self.poll() is not None)

    def save(self, folder: Path) -> None:
        """Write its memory into the folder and end the sandbox; see ``Sandbox.save``."""
        self.thaw()
        try:
            self._runtime.save(self.name, folder)
        finally:
            self.kill()

    def delete(self) -> None:
        """Kill, reap, remove state, output pipe, cgroup and bundle. Idempotent."""
        with self._lock:
            if self._deleted:
                return
            parts = self._parts
            family = parts.family | (descendants(self.pid) if self.poll() is None else set())
            self.kill()
            if self.wait(_END_TIMEOUT_S) is None:
                raise SandboxTimeoutError(f"sandbox {self.name} does not end after SIGKILL")
            with ExitStack() as steps:  # last first; each step runs even when an earlier one failed
                steps.callback(self._runtime.release, parts.claim)
                steps.callback(parts.bundle.delete)
                steps.callback(parts.cgroup.delete)
                steps.callback(parts.log.close)
                steps.callback(self._runtime.remove, self.name, family)
            self._deleted = True


def start_error(name: str, error: ProcessError, bundle: Bundle, log: LogPipe) -> SandboxStartError:
    """Build the error of a failed start: command, output, runsc's log, and the remedy where known."""
    said = dict.fromkeys((*log.tail()[-5:], *_logged_errors(bundle.log_file)[-3:]))
    message = "; ".join((f"sandbox {name} did not come up: {error}", *said))
    hint = _RIGHTS_HINT if "operation not permitted" in message else ""
    return SandboxStartError(message, hint=hint)


def _logged_errors(path: Path) -> list[str]:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and record.get("level") in ("error", "fatal", "panic"):
            found.append(str(record.get("msg", ""))[:500])
    return found
