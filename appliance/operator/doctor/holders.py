"""Processes that listen on a port, as far as proc(5) shows them to this user."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_LISTEN = "0A"
"""State of a listening socket in /proc/net/tcp."""


def holder(port: int) -> str:
    """``process 4242 (nginx)``, ``process 4243 (athanor gateway)``, or an empty text when it cannot be told."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            inodes |= listening(Path(table).read_text().splitlines(), port)
        except OSError:
            continue
    if not inodes:
        return ""
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and _holds(process, inodes):
            return f"process {process.name} ({_name(process)})"
    return ""


def listening(lines: Iterable[str], port: int) -> set[str]:
    """Inodes of sockets that listen on ``port``, from the lines of /proc/net/tcp. Pure."""
    found = set()
    for line in lines:
        fields = line.split()
        if len(fields) > 9 and fields[3] == _LISTEN and fields[1].rpartition(":")[2] == f"{port:04X}":
            found.add(f"socket:[{fields[9]}]")
    return found


def _holds(process: Path, inodes: set[str]) -> bool:
    try:
        with os.scandir(process / "fd") as entries:
            return any(_target(entry.path) in inodes for entry in entries)
    except OSError:
        return False


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


def _name(process: Path) -> str:
    """What it calls itself; of our own, whose program is an interpreter, which one it is."""
    try:
        words = (process / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
        for mark in ("appliance.operator.child", "--role"):
            if mark in words[:-1]:
                return f"athanor {words[words.index(mark) + 1]}"
        return (process / "comm").read_text().strip()
    except OSError:
        return "?"
