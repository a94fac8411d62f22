"""Processor time of a server on this machine: a process, all that descend from it, by what they are.

Read from ``/proc`` (proc(5)); a process that ends between two readings takes its time with it unless its parent has
waited for it, which adds it to the parent's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
"""The unit of processor time in /proc: a hundredth of a second on every Linux we serve."""

_MARKS = (
    ("appliance.operator.child gateway", "gateway"),
    ("appliance.operator.child supervisor", "supervisor"),
    ("runsc", "sandboxes"),
)
"""What a command line of the appliance's holds, and the label of that process; checked in this order."""

OTHER = "server"
"""Label of every other process."""


@dataclass(frozen=True, slots=True)
class _Process:
    parent: int
    ticks: int
    label: str


def cpu_by_label(root: int) -> dict[str, float]:
    """Seconds of processor time, user and system, of a process and its descendants, by label.

    Without a label of its own a process has its parent's: what a sandbox starts is the sandbox's.
    """
    table = _read_all()
    total: dict[str, float] = {}
    for pid in table:
        label = _label(pid, root, table)
        if label is not None:
            total[label] = total.get(label, 0.0) + table[pid].ticks * TICK_S
    return total


def spent(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Seconds by label between two readings."""
    return {label: max(0.0, seconds - before.get(label, 0.0)) for label, seconds in after.items()}


def _label(pid: int, root: int, table: Mapping[int, _Process]) -> str | None:
    """The nearest label on the way up to the root; None when the root is not there."""
    found = ""
    seen = 0
    while pid in table and seen < len(table):
        found = found or table[pid].label
        if pid == root:
            return found or OTHER
        pid, seen = table[pid].parent, seen + 1
    return None


def _read_all() -> dict[int, _Process]:
    table = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        label = next((label for mark, label in _MARKS if mark in command), "")
        table[int(entry.name)] = _Process(int(fields[1]), sum(map(int, fields[11:15])), label)
    return table
