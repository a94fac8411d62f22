"""What the supervisor keeps of files, batches and responses, as gauges."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from appliance.common.control import StoreState
from appliance.gateway.telemetry import names
from appliance.gateway.telemetry.metrics import Level

GAUGES = {
    "bytes": names.STORED_BYTES,
    "files": names.STORED_FILES,
    "open_batches": names.OPEN_BATCHES,
    "waiting_lines": names.WAITING_LINES,
    "responses": names.STORED_RESPONSES,
}
"""Figure of the supervisor -> gauge."""


@dataclass(slots=True)
class StoreGauges:
    """Last figures that the supervisor told; none where it keeps no files."""

    figures: dict[str, int] = field(default_factory=dict)

    def take(self, message: StoreState) -> None:
        """Take figures that the supervisor sent.

        Raises:
            ValueError: no supervisor of this release sends them.
        """
        if message.figures.keys() != GAUGES.keys() or min(message.figures.values()) < 0:
            raise ValueError("figures of files and batches that no supervisor of this release gives")
        self.figures = dict(message.figures)

    def levels(self) -> Iterator[Level]:
        """Yield the levels."""
        for name, value in self.figures.items():
            yield Level(GAUGES[name], value, {})
