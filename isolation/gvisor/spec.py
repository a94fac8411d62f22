"""Specification of a sandbox: immutable, validated once, free of IO.

``SandboxSpec`` holds everything that decides what a sandbox can reach. What all sandboxes have in common (identity, no
capabilities, no network) lives in ``isolation.gvisor.bundle``.
"""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from isolation.errors import IsolationError

GUEST_UID = 65_532
"""User and group id inside every sandbox; by convention they own nothing on any host ("nonroot" of distroless
images)."""

MIN_PIDS = 1_024
"""Smallest pids limit. It counts host threads of the sentry and its stubs; at 64 a sandbox dies silently (measured)."""

RESERVED_TARGETS = ("/proc", "/sys", "/dev", "/tmp")  # noqa: S108 - paths inside the sandbox
"""Targets that gVisor itself provides in every sandbox; no host file is mounted there."""

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,47}")
"""Names become directory, cgroup and container names and part of a socket path (108 bytes in all)."""

_DEVICE = re.compile(r"/dev/nvidia([0-9]{1,3}|ctl|-uvm)")


@dataclass(frozen=True, slots=True)
class Mount:
    """A host file or directory mounted read-only into the sandbox.

    Its contents must not change while the sandbox lives, because the sandbox caches them
    (``--file-access-mounts=exclusive``). This includes sockets in a mounted directory: they must exist before the boot.
    """

    source: Path
    """Absolute host path."""
    target: str
    """Absolute, normal path inside the sandbox."""

    def __post_init__(self) -> None:
        if not self.source.is_absolute():
            raise IsolationError(f"mount source {self.source} is not absolute")
        if not is_normal(self.target) or self.target == "/":
            raise IsolationError(f"mount target {self.target!r} is not an absolute, normal path")
        if "/" + self.target.split("/")[1] in RESERVED_TARGETS:
            raise IsolationError(f"mount target {self.target} lies in a directory that the sandbox makes itself")


@dataclass(frozen=True, slots=True)
class Device:
    """A character device of the host, mounted under the same path inside the sandbox."""

    path: str
    """Absolute path below /dev, equal on both sides."""
    major: int
    minor: int

    def __post_init__(self) -> None:
        if not _DEVICE.fullmatch(self.path):
            raise IsolationError(f"device {self.path!r} is none by which programs compute on a GPU; none else is given")


@dataclass(frozen=True, slots=True)
class GpuAccess:
    """Everything that a sandbox with a GPU has in addition; made by ``isolation.gpu.bundle_additions``."""

    driver: str
    """Version of the kernel module and of the libraries."""
    devices: tuple[Device, ...]
    libraries: tuple[Mount, ...]
    """Single files of the driver, each under the name by which programs load it."""
    env: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of one sandbox; enforced where ``CgroupSupport`` says so."""

    memory_bytes: int
    """All memory: anonymous, tmpfs and the sentry's own."""
    cpu_quota_cores: float | None = None
    """Quota in cores for each scheduling period; None means no quota."""
    pids: int = 4_096
    """Largest number of host threads, the sentry's included."""
    nofile: int = 4_096
    """Largest number of file descriptors of the program inside."""

    def __post_init__(self) -> None:
        if self.memory_bytes <= 0 or self.nofile <= 0:
            raise IsolationError("memory_bytes and nofile must be positive")
        if self.cpu_quota_cores is not None and self.cpu_quota_cores <= 0:
            raise IsolationError("cpu_quota_cores must be positive, or None for no quota")
        if self.pids < MIN_PIDS:
            raise IsolationError(f"pids is {self.pids}, below {MIN_PIDS}: the sandbox would die silently")


@dataclass(frozen=True, slots=True)
class Rootfs:
    """Read-only files of a sandbox: mounts over an empty skeleton, and how to start Python in them.

    Made by ``isolation.image.python_rootfs`` (binds of the running Python) or ``isolation.image.rootfs`` (a built
    image).
    """

    python: str
    """Path of the interpreter inside."""
    python_path: tuple[str, ...]
    """Directories inside that go on ``sys.path``."""
    mounts: tuple[Mount, ...]
    masks: tuple[str, ...] = ()
    """Directories inside that are hidden under an empty one."""
    host_paths: tuple[tuple[str, str], ...] = ()
    """Pairs of path inside and path on the host: where ``UnsafeRuntime`` finds the files without a sandbox."""

    def __post_init__(self) -> None:
        for path in (self.python, *self.python_path, *self.masks):
            if not is_normal(path):
                raise IsolationError(f"path {path!r} in the sandbox is not absolute and normal")

    def argv(self, module: str, *arguments: str) -> tuple[str, ...]:
        """The command that runs ``module`` with nothing but ``python_path`` and the standard library."""
        return (self.python, "-s", "-S", "-P", "-m", module, *arguments)


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What one sandbox runs and everything that it can see and use."""

    name: str
    argv: tuple[str, ...]
    """Command inside, starting with an absolute program path; see ``Rootfs.argv``."""
    env: tuple[tuple[str, str], ...]
    """Complete environment besides PATH and PYTHONPATH; see ``isolation.gvisor.environment``."""
    rootfs: Rootfs
    mounts: tuple[Mount, ...]
    """Role-specific mounts: the socket directory, the weights."""
    limits: Limits
    tmpfs_bytes: int = field(default=64 << 20)
    """Size of /tmp and of /dev/shm, each; their pages count towards the sandbox's memory."""
    folders: tuple[str, ...] = ()
    """Folders inside that hold the mounts below them and nothing else, and are there without any. One of these mounts
    may be absent from a checkpoint that a sandbox is restored from (``without_content``)."""
    gpu: GpuAccess | None = None
    """GPU access; None for nearly all sandboxes: no device, library or runsc flag then concerns a GPU."""
    cpus: tuple[int, ...] = ()
    """Processors of the host that its processes are pinned to; empty: all of the supervisor's. No part of the OCI
    configuration, so that a checkpoint is valid on all processors of its machine."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise IsolationError(
                f"sandbox name {self.name!r} is not 1-48 of a-z, 0-9 and '-', starting with a letter or digit"
            )
        if not self.argv or not is_normal(self.argv[0]):
            raise IsolationError("the program of a sandbox is not an absolute path")
        if any("\0" in part for part in self.argv):
            raise IsolationError("an argument of the sandbox's program contains a NUL byte")
        if self.tmpfs_bytes <= 0:
            raise IsolationError("tmpfs_bytes must be positive")
        if any(cpu < 0 for cpu in self.cpus):
            raise IsolationError("a processor's number must not be negative")
        targets = [*self.folders, *(mount.target for mount in self.all_mounts())]
        if len(set(targets)) != len(targets):
            raise IsolationError(f"sandbox {self.name} has two mounts on one target")
        for folder in self.folders:
            if not is_normal(folder) or folder.count("/") != 1 or folder == "/" or folder in RESERVED_TARGETS:
                raise IsolationError(f"folder {folder!r} is not a directory of its own below the root")

    def without_content(self) -> SandboxSpec:
        """Return the same sandbox with nothing in its folders."""
        inside = tuple(f"{folder}/" for folder in self.folders)
        return replace(self, mounts=tuple(one for one in self.mounts if not one.target.startswith(inside)))

    def all_mounts(self) -> tuple[Mount, ...]:
        """Return the mounts in creation order: the root's, then the role's, then the driver's libraries."""
        return (*self.rootfs.mounts, *self.mounts, *(() if self.gpu is None else self.gpu.libraries))


def is_normal(path: str) -> bool:
    """Return whether ``path`` is absolute and contains no ``..``, ``//`` or NUL."""
    return path.startswith("/") and posixpath.normpath(path) == path and "\0" not in path
