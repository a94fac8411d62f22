"""What the supervisor needs of whatever runs a sandbox: two small protocols.

``isolation.gvisor.GvisorRuntime`` is the wall; ``isolation.unsafe.UnsafeRuntime`` is the same without one, for
machines where no sandbox can run and the operator says so. All methods may block and are thread-safe: call them from
an event loop through threads, and watch ``pidfd`` for the end (readable when the sandbox has ended).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from isolation.cgroup import CgroupSupport
from isolation.errors import describe_status
from isolation.spec import SandboxSpec
from isolation.stdio import LineCallback


@dataclass(frozen=True, slots=True)
class Ending:
    """How a sandbox ended."""

    status: int
    """Exit status of its program; minus the signal when the sandbox process itself was killed."""
    out_of_memory: bool
    """The kernel ended one of its processes for passing ``Limits.memory_bytes``."""

    @property
    def reason(self) -> str:
        """In words, for logs and status."""
        return "ran out of memory" if self.out_of_memory else describe_status(self.status)


class Sandbox(Protocol):
    """One running, or ended, sandbox."""

    @property
    def name(self) -> str:
        """Its name, unique while it is not deleted."""
        ...

    @property
    def pid(self) -> int:
        """Process id of the sandbox process."""
        ...

    @property
    def peer_pids(self) -> frozenset[int]:
        """What SO_PEERCRED may show when the guest connects to our socket; nobody else may be let in.

        gVisor's gofer opens the connection under the profile for root, the sandbox process itself under the other.
        """
        ...

    @property
    def pidfd(self) -> int:
        """Becomes readable when the sandbox ends; closed by ``delete``, after which it is -1."""
        ...

    @property
    def log_fd(self) -> int:
        """The reading end of its output pipe, drained by the sandbox object itself."""
        ...

    def poll(self) -> int | None:
        """Exit status once it has ended, else None; stays known after ``delete``."""
        ...

    def wait(self, timeout_s: float) -> int | None:
        """Wait for its end; None when it still runs after ``timeout_s`` seconds."""
        ...

    def ending(self) -> Ending | None:
        """How it ended, or None while it runs; stays known after ``delete``."""
        ...

    def settle(self, *, busy: bool = False) -> None:
        """Its start is over: from now on it shall cost little; while it is ``busy`` even at the price of slow sleeps.
        May be called at any time, and more than once."""
        ...

    def processor_s(self) -> float:
        """Processor time it has used, in seconds: its program and what runs it; 0 after its end."""
        ...

    def memory_bytes(self) -> int:
        """Memory that it holds, as its limit counts it where one is enforced; 0 after its end."""
        ...

    def kill(self) -> None:
        """End it now (SIGKILL to the sandbox process). Idempotent; returns before the end."""
        ...

    def output_tail(self) -> tuple[str, ...]:
        """The last lines it printed, cleaned of control characters; after its end its last words are among them."""
        ...

    def save(self, folder: Path) -> None:
        """Write its whole memory into an existing, empty folder; it ends with that, whether it worked or not. No
        descriptor of the host but its outputs may be open in it.

        Raises:
            IsolationError: it could not be saved; what lies in the folder is of no use.
        """
        ...

    def delete(self) -> None:
        """Kill it if need be and leave nothing: process, directory, mount, cgroup, state. Idempotent."""
        ...


class Runtime(Protocol):
    """Boots sandboxes."""

    @property
    def label(self) -> str:
        """For status and traces: ``gvisor/systrap`` or ``unsafe/none``."""
        ...

    @property
    def cgroups(self) -> CgroupSupport:
        """Which limits are enforced on this machine."""
        ...

    def identity(self, spec: SandboxSpec) -> str:
        """What a saved sandbox of this spec depends on, besides the contents of its mounts: program, flags, processor,
        configuration. Empty where sandboxes cannot be saved."""
        ...

    def boot(self, spec: SandboxSpec, on_line: LineCallback | None = None, image: Path | None = None) -> Sandbox:
        """Start a sandbox; returns when its program has been started.

        Args:
            spec: what it shall be.
            on_line: called with each line it prints, in a thread of its own.
            image: the folder of a ``save`` of a sandbox with the same ``identity`` and contents of mounts. The program
                goes on where it was saved, behind the walls of this spec.

        Raises:
            SandboxStartError: it did not come up; nothing is left of it.
        """
        ...

    def guest_path(self, spec: SandboxSpec, target: str) -> str:
        """The path by which the program inside sees ``target``, a path under one of the spec's mounts."""
        ...

    def told_memory(self, spec: SandboxSpec) -> int:
        """The sandbox's limit in bytes, where ``/proc/meminfo`` inside tells what of it is used; 0 where that speaks of
        the whole machine."""
        ...

    def cleanup_stale(self) -> tuple[str, ...]:
        """Remove what a killed supervisor left behind; give the names of the sandboxes found."""
        ...

    def close(self) -> None:
        """Give the run directory free for another supervisor. Sandboxes must have been deleted before."""
        ...
