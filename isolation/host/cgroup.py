"""Resource limits where the machine allows them: one cgroup for each sandbox, on v1 (also hybrid) and v2.

runsc always gets ``--ignore-cgroups``: its own code needs real root and writes ``cgroup.subtree_control`` from the root
down. Instead, the processes of a created, not yet started sandbox are moved here, and their later children inherit the
group.

``CgroupSupport`` says which limits hold, for status. On v1 an out-of-memory kill hits a stub and the sandbox then exits
with status 1, so the kill counter must be read before the group is removed.
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
from isolation.gvisor.spec import Limits
from isolation.host.kernel_file import read_kernel_file

CONTROLLERS = ("memory", "cpu", "pids")
FREEZER = "freezer"
"""Hierarchy of its own on v1, beside the limits; on v2 every group can be frozen."""
ACCOUNT = "cpuacct"
"""Hierarchy that counts processor time on v1, beside the limits or with ``cpu``; on v2 every group counts it."""
BESIDES = (FREEZER, ACCOUNT)
"""Hierarchies that a group is made in where they are, and that limit nothing."""
_FREEZING = (("freezer.state", "FROZEN", "THAWED"), ("cgroup.freeze", "1", "0"))
"""File, its text for frozen, its text for thawed: v1 (the kernel's cgroup-v1/freezer-subsystem), v2 (cgroup-v2,
``cgroup.freeze``)."""
_CPU_PERIOD_US = 10_000
"""Period of a quota. A kernel may let a group use up its quota in one go while others wait (seen on Linux 6.18, with a
program woken beside it: 50 ms with half a core and the kernel's own period of 100 ms), so the period bounds that."""
_CPU_QUOTA_MIN_US = 1_000
"""Least quota that the kernel takes; for less than that in a period, the period is longer."""
_CPU_PERIOD_MAX_US = 1_000_000
"""Longest period that the kernel takes."""
_REMOVE_TIMEOUT_S = 20.0
"""Time limit for the end of killed processes: the last one frees the sandbox's memory (some GiB take 1.6 s) and waits
for its pending disk reads, longer under load."""
_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class CgroupSupport:
    """Limits that this machine enforces."""

    version: int
    """Cgroup version: 1, 2, or 0 for none."""
    enforced: tuple[str, ...]
    """Enforced controllers, a subset of ``CONTROLLERS``."""
    problem: str = ""
    """Reason why something is not enforced; empty when everything is."""

    def describe(self) -> str:
        """Return one line for status."""
        if not self.enforced:
            return f"no limits enforced: {self.problem}"
        line = f"cgroup v{self.version}: {', '.join(self.enforced)}"
        return f"{line}; not enforced: {self.problem}" if self.problem else line


class Cgroup:
    """Cgroup of one sandbox; a directory in each hierarchy in use.

    Args:
        directories: controller, ``BESIDES`` among them, to directory; equal for all on v2, empty where nothing is
            enforced.
    """

    def __init__(self, directories: Mapping[str, Path]) -> None:
        self._by_controller = dict(directories)
        self._unique = tuple(dict.fromkeys(directories.values()))
        self.given_up = False
        """Whether its sandbox has called ``delete``: what is left of the group may be removed by anyone."""

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
        """Move processes into the group; those that have ended meanwhile are skipped.

        Raises:
            IsolationError: the kernel refuses.
        """
        for pid in pids:
            for directory in self._unique:
                try:
                    (directory / "cgroup.procs").write_text(str(pid))
                except ProcessLookupError:
                    break
                except OSError as error:
                    raise IsolationError(f"process {pid} cannot join {directory}: {error.strerror}") from error

    def members(self) -> frozenset[int]:
        """Return the processes in the group."""
        found: set[int] = set()
        for directory in self._unique:
            found |= _read_pids(directory)
        return frozenset(found)

    def listed(self) -> frozenset[int]:
        """Return the processes in the group from one hierarchy, which is one file: none where the group has none."""
        return _read_pids(self._unique[0]) if self._unique else frozenset()

    def processor_s(self) -> float | None:
        """Return the processor seconds of all processes since they are in the group, ended ones among them; None where
        nothing counts them."""
        directory = self._by_controller.get(ACCOUNT)
        if directory is None:
            return None
        for word in words(directory / "cpuacct.usage"):
            return int(word) / 1e9
        found = words(directory / "cpu.stat")
        return int(found[1]) / 1e6 if found[:1] == ["usage_usec"] else None

    def memory_bytes(self) -> int | None:
        """Return the bytes that its memory limit counts; None where there is no such limit."""
        directory = self._by_controller.get("memory")
        if directory is None:
            return None
        for name in ("memory.current", "memory.usage_in_bytes"):
            for word in words(directory / name):
                return int(word)
        return None

    def oom_kills(self) -> int:
        """Return how many of its processes the kernel killed for lack of memory, so far."""
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

    def freeze(self) -> bool:
        """Stop all its processes where they are, so that they take no processor time; False where that is impossible.

        The kernel needs a few milliseconds for it and is not waited for.
        """
        directory = self._by_controller.get(FREEZER)
        return directory is not None and write_freezer(directory, frozen=True)

    def thaw(self) -> None:
        """Let its processes go on. Idempotent. A frozen process of v1 does not even end when it is killed."""
        directory = self._by_controller.get(FREEZER)
        if directory is not None:
            write_freezer(directory, frozen=False)

    def delete(self) -> None:
        """Kill the remaining processes and remove the group. Idempotent.

        Raises:
            IsolationError: a process in it cannot be killed.
        """
        self.given_up = True
        self.thaw()
        for directory in self._unique:
            remove_group(directory)


def cpu_quota(cores: float | None) -> tuple[int, int | None]:
    """Return the microseconds of a period and how many of them a group may run in all; None for no quota. Pure."""
    if cores is None:
        return _CPU_PERIOD_US, None
    period_us = max(_CPU_PERIOD_US, min(_CPU_PERIOD_MAX_US, round(_CPU_QUOTA_MIN_US / cores)))
    return period_us, max(_CPU_QUOTA_MIN_US, round(cores * period_us))


def limit_files(limits: Limits, version: int) -> list[tuple[str, str, bool]]:
    """Return (file, value, required) of each limit. Pure. Files missing on some kernels are not required."""
    memory, pids = str(limits.memory_bytes), str(limits.pids)
    period_us, quota_us = cpu_quota(limits.cpu_quota_cores)
    if version == 2:
        cpu = "max" if quota_us is None else str(quota_us)
        return [
            ("memory.max", memory, True),
            ("memory.swap.max", "0", False),
            ("memory.oom.group", "1", False),  # the whole sandbox ends, not one stub
            ("cpu.max", f"{cpu} {period_us}", True),
            ("pids.max", pids, True),
        ]
    return [
        ("memory.limit_in_bytes", memory, True),
        ("memory.memsw.limit_in_bytes", memory, False),
        ("cpu.cfs_period_us", str(period_us), True),
        ("cpu.cfs_quota_us", str(-1 if quota_us is None else quota_us), True),
        ("pids.max", pids, True),
    ]


def words(path: Path) -> list[str]:
    """Return the words in a cgroup file; none when it cannot be read."""
    try:
        return read_kernel_file(path).decode().split()
    except OSError:
        return []


def write_freezer(directory: Path, *, frozen: bool) -> bool:
    """Freeze or thaw a group; False where it has no file for that, or the kernel refuses."""
    for name, freeze, thaw in _FREEZING:
        try:
            if (directory / name).exists():
                (directory / name).write_text(freeze if frozen else thaw)
                return True
        except OSError:
            return False
    return False


def _read_pids(directory: Path) -> frozenset[int]:
    return frozenset(map(int, words(directory / "cgroup.procs")))


def _describe(pid: int) -> str:
    """Return a process's id, name, state and the kernel function that it waits in."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        waits = Path(f"/proc/{pid}/wchan").read_text()
    except OSError:
        return f"{pid} (gone)"
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    return f"{pid} ({fields['Name']}, {fields['State']}, waits in {waits or 'user space'})"


def remove_group(directory: Path) -> None:
    """Kill the processes of a group, frozen or not, and remove its directory. Idempotent.

    Raises:
        IsolationError: a process in it cannot be killed.
    """
    write_freezer(directory, frozen=False)
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
                stuck = ", ".join(sorted(map(_describe, _read_pids(directory)))) or "none that it lists"
                raise IsolationError(
                    f"cgroup {directory} cannot be removed: {error.strerror}; processes in it: {stuck}"
                ) from error
            time.sleep(_POLL_S)
        else:
            return
