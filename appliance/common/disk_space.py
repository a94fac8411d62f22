"""Space on the disks that the supervisor writes to: what is watched, and from when on it is too little."""

from __future__ import annotations

from dataclasses import dataclass

LOW_BYTES, LOW_SHARE = 2 << 30, 0.05
"""Free bytes and share of a file system below which, both together, it will be full soon: what the audit log of a busy
week or one checkpoint takes, on a disk that is small enough for it to matter."""

FULL_BYTES = 64 << 20
"""Free bytes of a file system below which it counts as full."""

PLACES = {
    "audit": "audit log",
    "spill": "spilled KV",
    "checkpoints": "checkpoints",
    "cache": "cache of digests and forms",
    "keyring": "keyring",
    "batches": "files and batches",
    "models": "cache of models",
    "run": "sockets and bundles",
}
"""Watched folders, as metrics name them, and what lies there."""


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """File system of one watched folder; bytes."""

    place: str
    """One of ``PLACES``."""
    free: int
    """What a process without root may still write."""
    size: int

    @property
    def full(self) -> bool:
        """Whether nothing more can be written, or soon."""
        return self.free < FULL_BYTES

    @property
    def low(self) -> bool:
        """Whether it will be full soon, or is."""
        return self.full or (self.free < LOW_BYTES and self.free < self.size * LOW_SHARE)
