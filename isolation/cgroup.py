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
        """Move processes in; those that have ended meanwhile are skipped.

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
        """Processes that are in it now."""
        found: set[int] = set()
        for directory in self._unique:
            found |= _read_pids(directory)
        return frozenset(found)

    def memory_bytes(self) -> int | None:
        """What its memory limit counts now; None where there is none."""
        directory = self._by_controller.get("memory")
        if directory is None:
            return None
        for name in ("memory.current", "memory.usage_in_bytes"):
            for word in words(directory / name):
                return int(word)
        return None

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
            remove_group(directory)


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


def words(path: Path) -> list[str]:
    """The words in a cgroup file; none where it cannot be read."""
    try:
        return path.read_text().split()
    except OSError:
        return []


def _read_pids(directory: Path) -> set[int]:
    return {int(word) for word in words(directory / "cgroup.procs")}


def remove_group(directory: Path) -> None:
    """Kill what is in a group and remove its directory. Idempotent.

    Raises:
        IsolationError: a process in it cannot be ended.
    """
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
