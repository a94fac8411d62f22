"""Disks of the supervisor and checkpoints on them, as it told them last: levels for metrics, values for alerts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from appliance.common.control import Control, DiskState
from appliance.common.control_checkpoints import CheckpointState
from appliance.common.disk_space import PLACES, DiskSpace
from appliance.gateway.telemetry import names
from appliance.gateway.telemetry.metrics import Level
from appliance.gateway.watch.checkpoints import Checkpoints


class Disks:
    """Last state of the disks."""

    def __init__(self) -> None:
        self.spaces: tuple[DiskSpace, ...] = ()
        """One for each place that the configuration names; empty before the supervisor has told."""
        self.checkpoints = Checkpoints()

    @property
    def takers(self) -> dict[type[Control], Callable[[Any], None]]:
        """What takes each message of these."""
        return {DiskState: self.take, CheckpointState: self.checkpoints.take}

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
        yield from self.checkpoints.levels()
