"""Processors that this process may use: physical cores, NUMA nodes, and the quota of its own cgroups.

Everything is read below a root folder, so that tests can show other machines. A file that is missing or malformed says
nothing: a processor then counts as a core of its own, all processors as one node, and no quota is known. See the
kernel's admin-guide/cputopology and admin-guide/cgroup-v2, and sched-bwc for version 1.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from isolation.host.cgroup_tree import own_directory, parse_mountinfo, parse_own_groups

_CPUS = "sys/devices/system/cpu"
_NODES = "sys/devices/system/node"
_SIBLINGS = ("core_cpus_list", "thread_siblings_list")
"""Files with the processors of one physical core: the present name, and the name before Linux 5.3. The core's own
number is not used: processors with several dies repeat it, and some machines have none."""

_MAX_CPU = 1 << 16
"""Bound of a processor's number, far above every kernel's own (8,192)."""


@dataclass(frozen=True, slots=True)
class Cpu:
    """One logical processor."""

    number: int
    core: int
    """Physical core, named by the smallest number of its processors."""
    node: int
    """NUMA node; 0 where the kernel names none."""


@dataclass(frozen=True, slots=True)
class Cores:
    """Processors that this process may use, and the quota that it must keep."""

    cpus: tuple[Cpu, ...]
    """Processors in the order of their numbers; at least one."""
    online: int
    """Number of the machine's processors, those that this process may not use included."""
    quota: float | None = None
    """Smallest processor quota of this process's cgroups in cores; None without one."""


def read_cores(root: Path = Path("/"), allowed: Iterable[int] | None = None) -> Cores:
    """Read the processors of this machine.

    Args:
        root: folder that has ``proc`` and ``sys``.
        allowed: numbers of the usable processors; None: the affinity of the calling thread.
    """
    numbers = sorted(os.sched_getaffinity(0) if allowed is None else set(allowed))
    nodes = dict(_nodes(root))
    cpus = tuple(Cpu(number, _core(root, number), nodes.get(number, 0)) for number in numbers)
    online = parse_cpu_list(_read(root / _CPUS / "online")) | set(numbers)
    return Cores(cpus, len(online), read_quota(root))


def read_quota(root: Path = Path("/")) -> float | None:
    """Return the smallest quota in cores of this process's cgroups and of those above them; None without one."""
    try:
        mounts = parse_mountinfo(_read(root / "proc/self/mountinfo"))
        own = parse_own_groups(_read(root / "proc/self/cgroup"))
        directories = {name: own_directory(mounts, own, name, root) for name in ("", "cpu")}
    except (ValueError, IndexError):
        return None
    found = []
    for controller, quota in (("", _quota_v2), ("cpu", _quota_v1)):
        directory = directories[controller]
        if directory is None:
            continue
        top = root / mounts[controller][1].relative_to("/")
        groups = (group for group in (directory, *directory.parents) if group.is_relative_to(top))
        found += [cores for group in groups if (cores := quota(group)) is not None]
    return min(found, default=None)


def parse_cpu_list(text: str) -> frozenset[int]:
    """Numbers in a list such as ``0-3,8``; empty when the list is malformed. Pure."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, dash, last = part.partition("-")
        if not _is_number(first) or (dash and not _is_number(last)):
            return frozenset()
        found.update(range(int(first), int(last if dash else first) + 1))
    return frozenset(found)


def format_cpu_list(numbers: Iterable[int]) -> str:
    """Write numbers as a list such as ``0-3,8``. Pure."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in ranges)


def _core(root: Path, number: int) -> int:
    """Physical core of a processor; a list that leaves the processor itself out is malformed."""
    topology = root / _CPUS / f"cpu{number}" / "topology"
    for name in _SIBLINGS:
        siblings = parse_cpu_list(_read(topology / name))
        if number in siblings:
            return min(siblings)
    return number


def _nodes(root: Path) -> Iterator[tuple[int, int]]:
    """Pairs of a processor and its node. A node of memory alone has no processors."""
    for path in sorted((root / _NODES).glob("node[0-9]*/cpulist")):
        name = path.parent.name.removeprefix("node")
        if _is_number(name):
            yield from ((number, int(name)) for number in parse_cpu_list(_read(path)))


def _quota_v2(group: Path) -> float | None:
    """Read ``cpu.max``: microseconds, or ``max``, in each period of microseconds."""
    quota, _, period = _read(group / "cpu.max").strip().partition(" ")
    return _ratio(quota, period)


def _quota_v1(group: Path) -> float | None:
    """Read ``cpu.cfs_quota_us``, which is -1 without a quota, and its period."""
    return _ratio(*(_read(group / name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")))


def _ratio(quota: str, period: str) -> float | None:
    """Quota in cores; None for ``max``, -1 and whatever else is no pair of positive numbers."""
    if not (quota.isdecimal() and period.isdecimal() and int(quota) and int(period)):
        return None
    return int(quota) / int(period)


def _is_number(text: str) -> bool:
    return text.isdecimal() and int(text) < _MAX_CPU


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
