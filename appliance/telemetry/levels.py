"""Levels: values that go up and down, told by whoever knows them and read when somebody scrapes.

A level whose owner is gone must go as well, or a dashboard shows for ever what an engine had when it died. So levels
are told all at once, and each telling takes the place of the last. Two rows that end under one label, because both
tenants count as ``other``, are added up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from appliance.telemetry.names import Instrument

Labels = dict[str, str]
"""Attribute names to values, both as they are emitted."""


@dataclass(frozen=True, slots=True)
class Level:
    """One value under the name and label words that ``names.GAUGES`` lists."""

    name: str
    value: float
    labels: Mapping[str, str]


class Levels:
    """The current value of every series of every gauge. ``replace`` and ``put`` are called by one thread; the meter
    reads in another."""

    def __init__(self, meter: Meter, gauges: Mapping[str, Instrument]) -> None:
        self._told: dict[str, dict[tuple[tuple[str, str], ...], float]] = {name: {} for name in gauges}
        for name, gauge in gauges.items():
            meter.create_observable_gauge(name, [self._reader(name)], gauge.unit, gauge.description)

    def put(self, name: str, value: float, labels: Labels) -> None:
        """Set one series, which stays until ``replace``."""
        # A dictionary of its own each time: the reader may be at the old one.
        self._told[name] = {**self._told[name], tuple(sorted(labels.items())): value}

    def replace(self, rows: Iterable[tuple[str, float, Labels]]) -> None:
        """Set all series of all gauges; those that are not named are gone."""
        told: dict[str, dict[tuple[tuple[str, str], ...], float]] = {name: {} for name in self._told}
        for name, value, labels in rows:
            if math.isfinite(value):
                series = tuple(sorted(labels.items()))
                told[name][series] = told[name].get(series, 0.0) + value
        self._told = told

    def _reader(self, name: str) -> Callable[[CallbackOptions], list[Observation]]:
        def read(_: CallbackOptions) -> list[Observation]:
            return [Observation(value, dict(series)) for series, value in self._told[name].items()]

        return read
