"""Processor time of an appliance's processes by component, in nanoseconds.

A sandbox is several processes: the gofer, gVisor's kernel, and the stub processes in which systrap runs the guest. All
of them are descendants of the supervisor. A process belongs to a component when its cgroup is named after it, or when
one of its ancestors is the sandbox process named in the appliance's status. Time is the scheduler's own
(``/proc/PID/task/TID/schedstat``, first field), because the ticks of ``/proc/PID/stat`` are 10 ms.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

ROOMS = ("gateway", "supervisor", "text", "engine")
"""Components of an appliance; all other processes below its launcher count as ``other``."""


def parents() -> dict[int, int]:
    """Map each process of the machine to its parent."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    return found


def tree(root: int) -> dict[int, list[int]]:
    """Return every descendant of ``root``, itself included, with its ancestors from the nearest up to ``root``."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents().items():
        children.setdefault(parent, []).append(pid)
    lines = {root: [root]}
    queue = [root]
    while queue:
        pid = queue.pop()
        for child in children.get(pid, ()):
            lines[child] = [child, *lines[pid]]
            queue.append(child)
    return lines


def rooms(launcher: int, sandboxes: Mapping[str, int]) -> dict[int, str]:
    """Map processes to components; ``root`` is the launcher, ``sandboxes`` maps component to sandbox process."""
    by_pid = {pid: room for room, pid in sandboxes.items()}
    return {pid: _room(pid, line, by_pid) for pid, line in tree(launcher).items()}


def _room(pid: int, line: list[int], by_pid: Mapping[int, str]) -> str:
    for ancestor in line:
        if ancestor in by_pid:
            return by_pid[ancestor]
    command = _text(f"/proc/{pid}/cmdline").split("\0")
    if "appliance.operator.child" in command:
        return command[command.index("appliance.operator.child") + 1]
    for group in _text(f"/proc/{pid}/cgroup").splitlines():
        name = group.rpartition("/")[2]
        for room in ("engine", "text"):
            if name.startswith(f"{room}-"):
                return room
    return "other"


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


class CpuClock:
    """Processor nanoseconds by component. An ended thread keeps its last reading."""

    def __init__(self, launcher: int, sandboxes: Mapping[str, int]) -> None:
        self._launcher = launcher
        self._sandboxes = dict(sandboxes)
        self._seen: dict[tuple[int, int], tuple[str, int]] = {}

    def read(self) -> dict[str, int]:
        """Return nanoseconds since each process began, by component."""
        for pid, room in rooms(self._launcher, self._sandboxes).items():
            try:
                threads = list(Path(f"/proc/{pid}/task").iterdir())
            except OSError:
                continue
            for thread in threads:
                fields = _text(f"{thread}/schedstat").split()
                if fields:
                    self._seen[pid, int(thread.name)] = (room, int(fields[0]))
        totals = dict.fromkeys((*ROOMS, "other"), 0)
        for room, spent in self._seen.values():
            totals[room] += spent
        return totals
