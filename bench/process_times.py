"""Processes by what they are, the processor time that they used, and the memory that they hold."""

from __future__ import annotations

import collections
import contextlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

Sample = TypeVar("Sample")

MOST_SAMPLES = 12
"""Most samples of an appliance that is to be idle: with half a minute each, longer than it makes checkpoints."""


def tree(roots: Iterable[int]) -> list[int]:
    """These processes and all their descendants."""
    children: dict[int, list[int]] = collections.defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children[parent].append(int(entry.name))
    found, todo = [], list(roots)
    while todo:
        found.append(pid := todo.pop())
        todo += children[pid]
    return found


def label(pid: int) -> str:
    """What a process of the appliance is."""
    try:
        command = (Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "gone"
    for word, name in (("child gateway", "gateway"), ("child supervisor", "supervisor"), (" demo ", "launcher")):
        if word in command:
            return name
    room = next((name for name in ("engine-", "text-", "sleep-") if name in command), "")
    for word, name in (("runsc-sandbox", "sentry"), ("runsc-gofer", "gofer")):
        if word in command:
            return f"{room.strip('-')} {name}".strip()
    return "stub"


def seconds(pids: Iterable[int]) -> float:
    """Processor time of processes, user and system, in all their threads."""
    return sum(_spent(pid) for pid in pids)


def named_seconds(pids: Iterable[int]) -> dict[str, float]:
    """Return the processor time by what the processes are."""
    names: dict[str, float] = collections.defaultdict(float)
    for pid in pids:
        names[name_of(pid)] += _spent(pid)
    return dict(names)


def name_of(pid: int) -> str:
    """Return what a process is; a stub belongs to its sentry."""
    name = label(pid)
    if name == "stub":
        with contextlib.suppress(OSError):
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            name = label(parent).replace("sentry", "stubs")
    return name


def _spent(pid: int) -> float:
    """From the scheduler's own count in nanoseconds; ticks would hide small shares."""
    total = 0
    with contextlib.suppress(OSError):
        for task in (Path("/proc") / str(pid) / "task").iterdir():
            with contextlib.suppress(OSError):
                total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def held_kib(pid: int) -> dict[str, int]:
    """Return the memory of a process in KiB: ``anonymous``, which it alone holds, and ``files``, its share of pages of
    files that it has mapped. A supervisor maps and locks the weights of the models that are awake, so its whole share
    grows and shrinks with their number.

    Raises:
        OSError: there is no such process.
    """
    rollup = (Path("/proc") / str(pid) / "smaps_rollup").read_text()
    found = dict(re.findall(r"^Pss_(Anon|File):\s+(\d+)", rollup, re.M))
    return {"anonymous": int(found["Anon"]), "files": int(found["File"])}


def steady(roots: Iterable[int], sample: Callable[[], Sample]) -> tuple[Sample, int]:
    """Return a sample in which no process has begun or ended below these, and how many were taken: after a start or a
    load the supervisor still makes checkpoints, and what it takes then is not what an idle appliance takes.

    Raises:
        RuntimeError: processes come and go all the time.
    """
    roots = tuple(roots)
    for number in range(1, MOST_SAMPLES + 1):
        before = set(tree(roots))
        found = sample()
        if set(tree(roots)) == before:
            return found, number
    raise RuntimeError(f"processes began or ended in each of {MOST_SAMPLES} samples: this appliance is not idle")
