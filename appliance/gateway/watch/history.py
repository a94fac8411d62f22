"""History of the last ten minutes: points of the appliance, and marks of the tenants' counts, which all rates are from.

Both are taken when the gateway looks at its engines in any case, so they cost no wake-up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from appliance.common.status import Point

MAX_POINTS = 300
"""Points kept: ten minutes at one each two seconds, some 30 KiB."""

MARK_S = 5.0
"""Between two marks of the tenants' counts."""

NUM_MARKS = 3
"""Marks kept: rates are of the last 10 to 15 seconds."""

Counts = tuple[int, int, int]
"""Requests, tokens and refusals of one tenant since the start."""

NOTHING: Counts = (0, 0, 0)


class History:
    """Points of the appliance and marks of the tenants' counts, both bounded."""

    def __init__(self) -> None:
        self._points: deque[Point] = deque(maxlen=MAX_POINTS)
        self._marks: deque[tuple[float, dict[str, Counts]]] = deque(maxlen=NUM_MARKS)

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

    def mark(self, now: float, counts: Callable[[], Iterable[tuple[str, Counts]]]) -> None:
        """Keep the tenants' counts, unless that was done a moment ago."""
        if not self._marks or now - self._marks[-1][0] >= MARK_S or now < self._marks[-1][0]:
            self._marks.append((now, dict(counts())))

    @property
    def marked(self) -> dict[str, Counts] | None:
        """Counts of the oldest mark; None before there is one."""
        return self._marks[0][1] if self._marks else None

    def marked_s(self, now: float) -> float:
        """Return the seconds since the oldest mark, over which rates are; 0 before there is one."""
        return max(now - self._marks[0][0], 1.0) if self._marks else 0.0

    def rates(self, tenant: str, counts: Counts, now: float) -> tuple[float, float, float]:
        """Return requests, tokens and refusals a second since the oldest mark; zeros before there is one."""
        if not self._marks:
            return 0.0, 0.0, 0.0
        seconds = self.marked_s(now)
        then = self._marks[0][1].get(tenant, NOTHING)
        requests, tokens, refused = (max(0, new - old) / seconds for new, old in zip(counts, then, strict=True))
        return requests, tokens, refused
