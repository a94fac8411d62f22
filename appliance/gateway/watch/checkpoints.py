"""Checkpoints of sandboxes, as the supervisor told them last: values for the status, levels for the metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from appliance.common.checkpoint_status import CheckpointStatus, from_wire
from appliance.common.control_checkpoints import CheckpointState
from appliance.gateway.telemetry import names
from appliance.gateway.telemetry.metrics import Level


class Checkpoints:
    """Last state of the checkpoints."""

    def __init__(self) -> None:
        self.found: tuple[CheckpointStatus, ...] = ()
        """Empty before the supervisor has told, and where none are kept."""

    def take(self, message: CheckpointState) -> None:
        """Take a state that the supervisor sent.

        Raises:
            ValueError: no supervisor of this release sends it.
        """
        self.found = from_wire(message.kept, message.problems)

    def levels(self) -> Iterator[Level]:
        """Yield the levels."""
        sizes: Counter[tuple[str, str]] = Counter()
        for one in self.found:
            sizes[one.role, "model" if one.model else "base"] += one.bytes
        for (role, kind), size in sizes.items():
            yield Level(names.CHECKPOINT_SIZE, size, {"role": role, "kind": kind})
