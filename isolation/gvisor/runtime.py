"""Protocols ``Runtime`` and ``Sandbox``: what the supervisor needs from whatever runs a sandbox.

``isolation.gvisor.gvisor_runtime.GvisorRuntime`` isolates; ``isolation.gvisor.unsafe_runtime.UnsafeRuntime`` has the
same interface without isolation, for machines where no sandbox can run and the operator allows it. All methods may
block and are thread-safe: call them from an event loop through threads, and watch ``pidfd`` for the end (readable when
the sandbox has ended).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from isolation.errors import describe_status
from isolation.gvisor.spec import SandboxSpec
from isolation.host.cgroup import CgroupSupport
from isolation.host.stdio import LineCallback


@dataclass(frozen=True, slots=True)
class Program:
    """What runs sandboxes, for those who want to know what they are in."""

    name: str
    """Name and release; empty where nothing runs them but this machine."""
    digest: str
    """SHA-256 of the program's file, in hex."""
    flags: tuple[str, ...]
    """Flags that it is started with, without paths of this machine."""
    gpu_flags: tuple[str, ...] = ()
    """Flags beyond these for a sandbox with a GPU."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a sandbox ended."""

    status: int
    """Exit status of its program; minus the signal when the sandbox process itself was killed."""
    out_of_memory: bool
    """Whether the kernel killed one of its processes for exceeding ``Limits.memory_bytes``."""

    @property
    def reason(self) -> str:
        """Describe the ending in words, for logs and status."""
        return "ran out of memory" if self.out_of_memory else describe_status(self.status)


class Sandbox(Protocol):
    """One sandbox, running or ended."""

    @property
    def name(self) -> str:
        """Return its name, unique among sandboxes that are not deleted."""

    @property
    def pid(self) -> int:
        """Return the process id of the sandbox process."""

    @property
    def peer_pids(self) -> frozenset[int]:
        """Return the peers that SO_PEERCRED may show when the guest connects; all others must be refused.

        gVisor's gofer opens the connection under the root profile, the sandbox process itself under the other.
        """

    @property
    def pidfd(self) -> int:
        """Return the pidfd, readable once the sandbox has ended; ``delete`` closes it, after which it is -1."""

    def poll(self) -> int | None:
        """Return the exit status once it has ended, else None; still available after ``delete``."""

    def wait(self, timeout_s: float) -> int | None:
        """Wait for its end; None when it is still running after ``timeout_s`` seconds."""

    def ending(self) -> Ending | None:
        """Describe how it ended, or None while it runs; still available after ``delete``."""

    def settle(self, *, busy: bool = False) -> None:
        """Reduce its idle cost after start-up; while ``busy``, even at the price of slow sleeps. May be called at any
        time and repeatedly."""

    def processor_s(self) -> float:
        """Return the processor time of its program and runtime in seconds; 0 after its end."""

    def memory_bytes(self) -> int:
        """Return the memory in bytes that its limit counts, where one is enforced; 0 after its end."""

    def freeze(self) -> bool:
        """Stop all its processes where they are; False where this machine cannot. It ends only when killed."""

    def thaw(self) -> None:
        """Let a frozen one go on. Idempotent."""

    def kill(self) -> None:
        """End it now (SIGKILL to the sandbox process). Idempotent; returns before the end."""

    def output_tail(self) -> tuple[str, ...]:
        """Return its last output lines, cleaned of control characters; after its end the final ones are included."""

    def save(self, folder: Path) -> None:
        """Write its whole memory into an existing, empty folder, which ends it whether or not that worked. It may have
        no descriptor of the host open except its outputs.

        Raises:
            IsolationError: it could not be saved; the folder's contents are unusable.
        """

    def delete(self) -> None:
        """Kill it if it runs and remove its process, directory, mount, cgroup and state. Idempotent."""


class Runtime(Protocol):
    """Boots sandboxes."""

    @property
    def label(self) -> str:
        """Return the label for status and traces: ``gvisor/systrap`` or ``unsafe/none``."""

    @property
    def cgroups(self) -> CgroupSupport:
        """Return which limits are enforced on this machine."""

    @property
    def program_file(self) -> Path | None:
        """Return the file of the program that runs sandboxes; None where there is none."""

    @property
    def fills_folders(self) -> bool:
        """Return whether a restored sandbox may have other mounts in the folders of its spec than what was saved."""

    def program(self) -> Program:
        """Return the program that runs sandboxes, as it is on disk now.

        Raises:
            OSError: its file cannot be read.
        """

    @property
    def surroundings(self) -> tuple[tuple[str, str], ...]:
        """Return what ``identity`` has of the machine, by name, for people; empty where nothing can be saved."""

    def identity(self, spec: SandboxSpec) -> str:
        """Identify everything except mount contents that a checkpoint of this spec depends on: program, flags,
        processor, configuration. Empty where sandboxes cannot be saved."""

    def boot(
        self,
        spec: SandboxSpec,
        on_line: LineCallback | None = None,
        image: Path | None = None,
        hold: Callable[[], None] | None = None,
    ) -> Sandbox:
        """Start a sandbox; returns once its program has been started.

        Args:
            spec: what it runs, sees and may use.
            on_line: called with each line of its output, in a separate thread.
            image: the folder of a ``save`` of a sandbox with equal ``identity`` and mount contents; where
                ``fills_folders``, of one without mounts in its folders, into which its program has not looked. The
                program continues where it was saved, with the isolation of this spec.
            hold: called once everything but the program is there, which then takes little memory; the program starts
                when it returns. What it raises ends the start.

        Raises:
            SandboxStartError: it did not start; everything made for it has been removed.
        """

    def guest_path(self, spec: SandboxSpec, target: str) -> str:
        """Return the path by which the program inside sees ``target``, a path under one of the spec's mounts."""

    def told_memory(self, spec: SandboxSpec) -> int:
        """Return the sandbox's memory limit in bytes where ``/proc/meminfo`` inside describes the sandbox; 0 where it
        describes the whole machine."""

    def cleanup_stale(self) -> tuple[str, ...]:
        """Remove what a killed supervisor left behind; return the names of the sandboxes found."""

    def close(self) -> None:
        """Release the run directory for another supervisor. All sandboxes must have been deleted before."""
