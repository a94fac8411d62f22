"""Failure reasons for the caller: one printable line that fits a frame."""

from __future__ import annotations

from isolation.ipc.messages import MAX_REASON_BYTES


def presentable(reason: str) -> str:
    """Convert text to one line that fits a frame; messages of templates and compilers may contain anything."""
    line = " ".join("".join(char if char.isprintable() else " " for char in reason).split())
    return line.encode("utf-8", "replace")[:MAX_REASON_BYTES].decode("utf-8", "ignore")
