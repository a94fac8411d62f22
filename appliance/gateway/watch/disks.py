"""Disks of the supervisor, as it told them last: levels for the metrics, values for alerts."""

from __future__ import annotations

from collections.abc import Iterator

from appliance.common.control import DiskState
from appliance.common.disk_space import PLACES, DiskSpace
from appliance.gateway.telemetry import names
from appliance.gateway.telemetry.metrics import Level


class Disks:
    """Last state of the disks."""

    def __init__(self) -> None:
        self.spaces: tuple[DiskSpace, ...] = ()
        """One for each place that the configuration names; empty before the supervisor has told."""

    def take(self, message: DiskState) -> None:
        """Take a state that the supervisor sent.

        Raises:
            ValueError: no supervisor of this release sends it.
        """
        if not message.places.keys() <= PLACES.keys():
            raise ValueError("a disk that no supervisor of this release watches")
        if any(len(pair) != 2 or min(pair) < 0 for pair in message.places.values()):
            raise ValueError("figures of a disk that no supervisor of this release gives")
        self.spaces = tuple(DiskSpace(place, *pair) for place, pair in message.places.items())

    def levels(self) -> Iterator[Level]:
        """Yield the levels."""
        for one in self.spaces:
            yield Level(names.DISK_FREE, one.free, {"place": one.place})
            yield Level(names.DISK_SIZE, one.size, {"place": one.place})
