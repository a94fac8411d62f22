"""Limits where the machine allows them: one cgroup a sandbox, on v1 (also hybrid) and v2.

``--ignore-cgroups`` is always given to runsc: its own code wants real root and writes ``cgroup.subtree_control`` from
the very top. Instead the processes of a created, not yet started sandbox are moved here; what they fork later stays.

Which limits hold is one value, ``CgroupSupport``, so that status can show it. On v1 the kernel ends a stub on memory
shortage and the sandbox then exits with status 1, so the kill counter must be read before the group is removed.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from isolation.errors import IsolationError
from isolation.spec import Limits

CONTROLLERS = ("memory", "cpu", "pids")
_CPU_PERIOD_US = 100_000
_REMOVE_TIMEOUT_S = 5.0
_POLL_S = 0.01
_LEAF = "supervisor"
"""Where the supervisor's own process goes on v2: a group with children may hold no process itself."""


@dataclass(frozen=True, slots=True)
class CgroupSupport:
    """What is enforced on this machine."""

    version: int
    """1, 2, or 0 for none."""
    enforced: tuple[str, ...]
    """Of ``CONTROLLERS``."""
    problem: str = ""
    """Why something is not enforced."""

    def describe(self) -> str:
        """One line for status."""
        if not self.enforced:
            return f"no limits enforced: {self.problem}"
        line = f"cgroup v{self.version}: {', '.join(self.enforced)}"
        return f"{line}; not enforced: {self.problem}" if self.problem else line


class Cgroup:
    """The group of one sandbox; a directory in each hierarchy in use.

    Args:
        directories: controller to directory; the same directory for all on v2, empty where nothing is enforced.
    """

    def __init__(self, directories: Mapping[str, Path]) -> None:
        self._by_controller = dict(directories)
        self._unique = tuple(dict.fromkeys(directories.values()))

    def set_limits(self, limits: Limits, version: int) -> None:
        """Write the limits.

        Raises:
            IsolationError: the kernel refuses a value.
        """
        for name, value, needed in limit_files(limits, version):
            directory = self._by_controller.get(name.partition(".")[0])
            if directory is None:
                continue
            try:
                (directory / name).write_text(value)
            except OSError as error:
                if needed:
                    raise IsolationError(
                        f"cgroup limit {directory / name} = {value} is refused: {error.strerror}"
                    ) from error

    def add(self, pids: Iterable[int]) -> None:
        """Move processes in; those that have ended meanwhile are skipped."""
        for pid in pids:
            for directory in self._unique:
                try:
                    (directory / "cgroup.procs").write_text(str(pid))
                except ProcessLookupError:
                    break

    def members(self) -> frozenset[int]:
        """Processes that are in it now."""
        found: set[int] = set()
        for directory in self._unique:
            found |= _read_pids(directory)
        return frozenset(found)

    def oom_kills(self) -> int:
        """How many of its processes the kernel ended for want of memory, so far."""
        directory = self._by_controller.get("memory")
        if directory is None:
            return 0
        for name in ("memory.events", "memory.oom_control"):
            try:
                text = (directory / name).read_text()
            except OSError:
                continue
            match = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
            return int(match[1]) if match else 0
        return 0

    def delete(self) -> None:
        """Kill what is left in it and remove it. Idempotent.

        Raises:
            IsolationError: a process in it cannot be ended.
        """
        for directory in self._unique:
            _remove_group(directory)


def limit_files(limits: Limits, version: int) -> list[tuple[str, str, bool]]:
    """(file, value, needed) of each limit. Pure. Files that some kernels lack are not needed."""
    memory, pids = str(limits.memory_bytes), str(limits.pids)
    cores = limits.cpu_quota_cores
    quota_us = None if cores is None else max(1_000, round(cores * _CPU_PERIOD_US))
    if version == 2:
        cpu = "max" if quota_us is None else str(quota_us)
        return [
            ("memory.max", memory, True),
            ("memory.swap.max", "0", False),
            ("memory.oom.group", "1", False),  # the whole sandbox ends, not a stub of it
            ("cpu.max", f"{cpu} {_CPU_PERIOD_US}", True),
            ("pids.max", pids, True),
        ]
    return [
        ("memory.limit_in_bytes", memory, True),
        ("memory.memsw.limit_in_bytes", memory, False),
        ("cpu.cfs_period_us", str(_CPU_PERIOD_US), True),
        ("cpu.cfs_quota_us", str(-1 if quota_us is None else quota_us), True),
        ("pids.max", pids, True),
    ]


class CgroupTree:
    """The parent group of all sandboxes of one supervisor.

    Args:
        parents: controller to the directory in which sandboxes' groups are made.
        support: what that amounts to.
    """

    def __init__(self, parents: Mapping[str, Path], support: CgroupSupport) -> None:
        self._parents = dict(parents)
        self.support = support

    @classmethod
    def nothing(cls, problem: str) -> CgroupTree:
        """A tree that enforces nothing."""
        return cls({}, CgroupSupport(0, (), problem))

    @classmethod
    def detect(cls, name: str) -> CgroupTree:
        """Make the parent group ``name`` below our own group wherever this machine lets us.

        On v2 this moves the calling process into a leaf beside it, as the kernel demands.
        """
        mounts = parse_mountinfo(Path("/proc/self/mountinfo").read_text())
        own = parse_own_groups(Path("/proc/self/cgroup").read_text())
        unified = _own_directory(mounts, own, "")
        if unified is not None and "memory" in _words(unified / "cgroup.controllers"):
            return cls._detect_v2(_delegated_base(unified), name)
        directories = {name: _own_directory(mounts, own, name) for name in CONTROLLERS}
        return cls.make_v1({key: path for key, path in directories.items() if path}, name)

    @classmethod
    def make_v1(cls, bases: Mapping[str, Path], name: str) -> CgroupTree:
        """Make the parent group in each v1 hierarchy in ``bases`` (controller to our own group's directory)."""
        parents: dict[str, Path] = {}
        problems = [f"{key} (no hierarchy)" for key in CONTROLLERS if key not in bases]
        for controller, base in bases.items():
            try:
                (base / name).mkdir(exist_ok=True)
            except OSError as error:
                problems.append(f"{controller} ({error.strerror})")
            else:
                parents[controller] = base / name
        support = CgroupSupport(1 if parents else 0, tuple(parents), ", ".join(problems))
        return cls(parents, support)

    @classmethod
    def _detect_v2(cls, base: Path, name: str) -> CgroupTree:
        leaf, parent = base / _LEAF, base / name
        try:
            leaf.mkdir(exist_ok=True)
            (leaf / "cgroup.procs").write_text(str(os.getpid()))
        except OSError as error:
            return cls.nothing(f"cgroup {base} is not ours to change ({error.strerror})")
        try:
            parent.mkdir(exist_ok=True)
            for group in (base, parent):
                there = _words(group / "cgroup.controllers")
                wanted = [f"+{key}" for key in CONTROLLERS if key in there]
                (group / "cgroup.subtree_control").write_text(" ".join(wanted))
        except OSError as error:
            # Typically EBUSY: other processes live in our group, such as the shell that started us.
            (base / "cgroup.procs").write_text(str(os.getpid()))
            return cls.nothing(f"cgroup {base} holds other processes ({error.strerror})")
        enforced = tuple(key for key in CONTROLLERS if key in _words(parent / "cgroup.subtree_control"))
        missing = ", ".join(key for key in CONTROLLERS if key not in enforced)
        return cls(dict.fromkeys(enforced, parent), CgroupSupport(2, enforced, missing))

    def create(self, name: str, limits: Limits) -> Cgroup:
        """A group for one sandbox, with its limits set and nothing in it.

        Raises:
            IsolationError: it cannot be made or a limit is refused.
        """
        directories = {key: parent / name for key, parent in self._parents.items()}
        group = Cgroup(directories)
        try:
            for directory in dict.fromkeys(directories.values()):
                directory.mkdir()
            group.set_limits(limits, self.support.version)
        except BaseException as error:
            group.delete()
            if isinstance(error, OSError):
                raise IsolationError(f"cgroup of sandbox {name} cannot be made: {error}") from error
            raise
        return group

    def cleanup(self) -> tuple[str, ...]:
        """Kill and remove the groups of all sandboxes; give their names."""
        names: set[str] = set()
        for parent in dict.fromkeys(self._parents.values()):
            for group in sorted(path for path in parent.iterdir() if path.is_dir()):
                names.add(group.name)
                _remove_group(group)
        return tuple(sorted(names))

    def close(self) -> None:
        """Remove the parent group, if it is empty."""
        for parent in dict.fromkeys(self._parents.values()):
            try:
                parent.rmdir()
            except OSError:
                continue


def parse_mountinfo(text: str) -> dict[str, tuple[str, Path]]:
    """Controller (empty for v2) to (root of the mount, mount point); from proc(5)'s mountinfo. Pure."""
    mounts: dict[str, tuple[str, Path]] = {}
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        fields, (kind, *rest) = left.split(), right.split()
        if kind == "cgroup2":
            mounts.setdefault("", (fields[3], Path(fields[4])))
        elif kind == "cgroup":
            for option in rest[-1].split(","):
                mounts.setdefault(option, (fields[3], Path(fields[4])))
    return mounts


def parse_own_groups(text: str) -> dict[str, str]:
    """Controller (empty for v2) to our group's path; from cgroups(7)'s /proc/self/cgroup. Pure."""
    groups: dict[str, str] = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            groups[controller] = path
    return groups


def _own_directory(
    mounts: Mapping[str, tuple[str, Path]], own: Mapping[str, str], controller: str
) -> Path | None:
    if controller not in mounts or controller not in own:
        return None
    root, point = mounts[controller]
    below = os.path.relpath(own[controller], root)
    if below.startswith(".."):
        return None
    directory = point / below
    return directory if directory.is_dir() else None


def _delegated_base(own: Path) -> Path:
    """Our own group, or the one above when we already are in the leaf (``DelegateSubgroup=``, or a second run)."""
    return own.parent if own.name == _LEAF and os.access(own.parent / "cgroup.procs", os.W_OK) else own


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _read_pids(directory: Path) -> set[int]:
    return {int(word) for word in _words(directory / "cgroup.procs")}


def _remove_group(directory: Path) -> None:
    deadline = time.monotonic() + _REMOVE_TIMEOUT_S
    while True:
        for pid in _read_pids(directory):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            directory.rmdir()
        except FileNotFoundError:
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise IsolationError(f"cgroup {directory} cannot be removed: {error}") from error
            time.sleep(_POLL_S)
        else:
            return
