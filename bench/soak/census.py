"""Everything countable of a running appliance that could leak, taken from the kernel and not from what it says."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from appliance.selftest.processes import parents, tree
from bench.soak.room import SHARED_MEMORY
from bench.soak.served import HOST_ROLES, Served
from isolation.host.rundir import RunDirectory

SLACK: Mapping[str, int] = {
    "sockets": 3,
    "files": 2,
    "pipes": 0,
    "memfds": 0,
    "anonymous": 2,
    "threads": 8,
    "stubs": 24,
    "entries": 0,
    "entries audit": 1_000,
}
"""How many more of a kind there may be at rest than before, in one place: a connection that the exporter keeps, a file
that is being written, threads of pools that are bounded and filled on demand (five of asyncio's and those of the
operator's listener), stubs of grammars that are kept, and segments of the
audit log, which is there to grow. All else must be as many as before."""


def take(served: Served) -> Counter[str]:
    """Counts by ``kind where``."""
    found: Counter[str] = Counter()
    for line in tree(served.target.pid).items():
        _count_process(line[0], found)
    roots = {role: _host_pid(served, role) for role in HOST_ROLES} | {"launcher": served.target.pid}
    for role, pid in roots.items():
        if pid is None:
            continue
        for kind, count in of_process(pid).items():
            found[f"{kind} {role}"] += count
    found["strays"] = len(strays(served))
    found["mounts"] = len(_mounts())
    found["cgroups"] = sum(1 for _ in _cgroups(served))
    found["bundles"] = sum(1 for path in served.run_dir.glob("*/*") if path.is_dir())
    found["shared memory"] = len(os.listdir(SHARED_MEMORY))
    found["entries tmp"] = len(os.listdir(served.room.temporary))
    for name, folder in (("state", served.target.state), ("run", served.run_dir), ("audit", served.room.audit)):
        found[f"entries {name}"] = len(os.listdir(folder))
    return found


def exceeding(before: Mapping[str, int], now: Mapping[str, int]) -> list[str]:
    """What is there more than it may be. Pure."""
    found = []
    for name, count in sorted(now.items()):
        allowed = before.get(name, 0) + SLACK.get(name, SLACK.get(name.partition(" ")[0], 0))
        if count > allowed:
            found.append(f"{name}: {count} where {before.get(name, 0)} were")
    return found


def of_process(pid: int) -> Counter[str]:
    """Threads, and descriptors by what they are, of one process."""
    found: Counter[str] = Counter()
    with contextlib.suppress(OSError):
        found["threads"] = len(os.listdir(f"/proc/{pid}/task"))
        for number in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found[_kind_of(os.readlink(f"/proc/{pid}/fd/{number}"))] += 1
    return found


def _kind_of(link: str) -> str:
    for prefix, kind in (
        ("socket:", "sockets"),
        ("pipe:", "pipes"),
        ("/memfd:", "memfds"),
        ("anon_inode:", "anonymous"),
    ):
        if link.startswith(prefix):
            return kind
    return "files"


def strays(served: Served) -> list[str]:
    """Processes that name the appliance's folders and are no descendants of it any more."""
    ours = tree(served.target.pid).keys() | {os.getpid()}
    found = []
    for pid in parents().keys() - ours:
        command = _command(pid)
        if str(served.run_dir) in command or str(served.target.state) in command:
            found.append(f"{pid} {command[:80]}")
    return found


def _count_process(pid: int, found: Counter[str]) -> None:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return
    words = _command(pid).split(" ")
    if state == "Z":
        found["zombies"] += 1
    elif "boot" in words:
        found["sandboxes"] += 1
    elif "gofer" in words:
        found["gofers"] += 1
    elif "appliance.operator.child" in words or "appliance.operator.cli" in words:
        found["host processes"] += 1
    else:
        found["stubs"] += 1


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _host_pid(served: Served, role: str) -> int | None:
    try:
        return served.host_pid(role)
    except LookupError:
        return None


def _mounts() -> list[str]:
    return Path("/proc/self/mountinfo").read_text().splitlines()


def _cgroups(served: Served) -> list[Path]:
    """The groups of its sandboxes, in every hierarchy."""
    return [child for parent in group_parents(served) for child in parent.iterdir() if child.is_dir()]


def group_parents(served: Served) -> list[Path]:
    """The groups above its sandboxes', in every hierarchy, at most four levels deep."""
    top, label = Path("/sys/fs/cgroup"), RunDirectory(served.run_dir / "sandboxes", -1).label
    return [path for depth in range(1, 5) for path in top.glob("/".join(["*"] * depth + [label]))]
