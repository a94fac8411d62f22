"""Reasons that a failed job tells its caller: one printable line that fits the frame."""

from __future__ import annotations

from isolation.ipc.messages import MAX_REASON_BYTES


def presentable(reason: str) -> str:
    """One line that fits the frame; what templates and compilers say may hold anything."""
    line = " ".join("".join(char if char.isprintable() else " " for char in reason).split())
    return line.encode("utf-8", "replace")[:MAX_REASON_BYTES].decode("utf-8", "ignore")
