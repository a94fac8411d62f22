"""What the supervisor keeps of files, batches and responses, as gauges."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from appliance.common.batch_status import BatchQueue
from appliance.common.control import StoreState
from appliance.gateway.telemetry import names
from appliance.gateway.telemetry.metrics import Level

GAUGES = {
    "bytes": names.STORED_BYTES,
    "files": names.STORED_FILES,
    "open_batches": names.OPEN_BATCHES,
    "waiting_lines": names.WAITING_LINES,
    "responses": names.STORED_RESPONSES,
    "oldest_s": names.OLDEST_BATCH,
    "max_bytes": names.MAX_STORED_BYTES,
}
"""Figure of the supervisor -> gauge."""


@dataclass(slots=True)
class StoreGauges:
    """Last figures that the supervisor told; none where it keeps no files."""

    queue: Callable[[Mapping[str, int]], BatchQueue | None] = lambda _figures: None
    """Gives the batches that are not over, with these figures."""
    figures: dict[str, int] = field(default_factory=dict)

    def take(self, message: StoreState) -> None:
        """Take figures that the supervisor sent.

        Raises:
            ValueError: no supervisor of this release sends them.
        """
        if message.figures.keys() != GAUGES.keys() or min(message.figures.values()) < 0:
            raise ValueError("figures of files and batches that no supervisor of this release gives")
        self.figures = dict(message.figures)

    def batches(self) -> BatchQueue | None:
        """Return the batches that are not over, and what is kept; None where no files are, or nothing is known."""
        return self.queue(self.figures)

    def levels(self) -> Iterator[Level]:
        """Yield the levels."""
        for name, value in self.figures.items():
            yield Level(GAUGES[name], value, {})
        queue = self.batches()
        if queue is not None:
            yield Level(names.STUCK_BATCHES, queue.stuck, {})
