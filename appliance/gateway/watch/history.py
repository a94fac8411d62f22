"""History of the last ten minutes: points of the appliance, and samples of the counts, which all rates are from.

Both are taken when the gateway looks at its engines in any case, so they cost no wake-up. All times are monotonic
seconds: a machine whose clock is set loses nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from appliance.common.status import Counts, Point, Rates
from appliance.gateway.watch.definitions import RATE_WINDOW_S, rates

MAX_POINTS = 300
"""Points kept: ten minutes at one each two seconds, some 30 KiB."""

SAMPLE_S = 1.0
"""Least time between two samples. Surfaces that are asked within it show the same rates."""

NOTHING = Counts()


@dataclass(frozen=True, slots=True)
class CountSample:
    """Counts at one moment."""

    at: float
    tenants: Mapping[str, Counts]
    total: Counts


@dataclass(slots=True)
class Samples:
    """Samples of the last ``RATE_WINDOW_S``, and the one before; at most a dozen."""

    _kept: deque[CountSample] = field(default_factory=deque)

    def take(self, now: float, counts: Callable[[], tuple[Mapping[str, Counts], Counts]]) -> None:
        """Keep the counts of all tenants and their sum, unless that was done a moment ago."""
        kept = self._kept
        if kept and now - kept[-1].at < SAMPLE_S:
            return
        kept.append(CountSample(now, *counts()))
        while len(kept) > 2 and now - kept[1].at >= RATE_WINDOW_S:
            kept.popleft()

    @property
    def since(self) -> Mapping[str, Counts] | None:
        """Counts of all tenants at the beginning of the window; None before there is a sample."""
        return self._kept[0].tenants if self._kept else None

    @property
    def rates(self) -> Rates:
        """Rates of all tenants and strangers together; zeros before there are two samples."""
        return rates(self._kept[0].total, self._kept[-1].total, self._seconds) if self._kept else Rates()

    def rates_of(self, tenant: str) -> Rates:
        """Return one tenant's rates over the same seconds."""
        if not self._kept:
            return Rates()
        first, last = self._kept[0].tenants, self._kept[-1].tenants
        return rates(first.get(tenant, NOTHING), last.get(tenant, NOTHING), self._seconds)

    def output_of(self, tenant: str) -> int:
        """Return one tenant's output tokens in these seconds: tenants sort by them as by their rates, at less cost."""
        first, last = self._kept[0].tenants, self._kept[-1].tenants
        return last.get(tenant, NOTHING).output_tokens - first.get(tenant, NOTHING).output_tokens

    @property
    def _seconds(self) -> float:
        return self._kept[-1].at - self._kept[0].at


class History:
    """Points of the appliance; bounded."""

    def __init__(self) -> None:
        self._points: deque[Point] = deque(maxlen=MAX_POINTS)

    @property
    def points(self) -> tuple[Point, ...]:
        """Points that are kept, oldest first."""
        return tuple(self._points)

    def add(self, point: Point) -> None:
        """Keep a point in place of the oldest."""
        self._points.append(point)

    def after(self, at: float) -> tuple[Point, ...]:
        """Return the points later than a moment, oldest first."""
        return tuple(point for point in self._points if point.at > at)
