"""What the supervisor tells the gateway of checkpoints (``appliance.common.control``)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """Supervisor, now and then where sandboxes are saved: bytes and Unix time of each checkpoint that sandboxes begin
    with, by role and model (``appliance.common.checkpoint_status``), and why one is not there or not used."""

    kept: dict[str, list[int]]
    problems: dict[str, str]
