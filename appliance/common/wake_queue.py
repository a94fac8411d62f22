"""Order in which sleeping models are woken for requests, and how long each has to wait. Pure: seconds are arguments.

A wake takes a core and more, so wakes that run side by side all end late. Only some run at a time, and the others wait
for their turn: first the most used models that fit together, since most requests are theirs; then the *guests*. Of each
kind the model that was asked for first comes first. All that wait were counted when they came
(``appliance.common.sleep_rules.WakeGuard``), so no more than a minute's wakes can come before one of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

MOST_AT_ONCE = 2
"""Fewest wakes that run at a time where more are asked for: while one waits for the end of another model or for the
disk, the other computes."""

CORES_OF_WAKE = 2
"""Cores that a wake uses: its engine and its text sandbox are restored side by side."""


ANSWER_S = 1.0
"""Seconds for which a guest is taken to stay awake for the requests that waited for it."""

GUESTS_IN_TURN = 1
"""Guests that are expected to follow each other in one place before the model is asked for again that has slept for
them."""


def most_at_once(cores: int) -> int:
    """Return how many wakes run at a time on so many cores."""
    return max(MOST_AT_ONCE, cores // CORES_OF_WAKE)


@dataclass(slots=True)
class WakeQueue:
    """Models that requests wait for and whose wake has not begun."""

    most: int = MOST_AT_ONCE
    """Wakes that run at a time."""
    _kept: dict[str, bool] = field(default_factory=dict)
    """The models in the order in which they came, and whether each is no guest."""

    def join(self, model: str, *, kept: bool) -> None:
        """Let a model wait for its turn. One that waits already keeps its place among those of its kind."""
        self._kept[model] = kept

    def leave(self, model: str) -> None:
        """Forget a model: its wake begins, or no request waits for it. Idempotent."""
        self._kept.pop(model, None)

    def is_turn(self, model: str, waking: int) -> bool:
        """Return whether the wake of a model that waits may begin beside so many others. A guest takes no place that
        one of the most used models waits for."""
        guests, first = self._ahead(model)
        if not self._kept[model] and first:
            return False
        return waking + len(first) + len(guests) < self.most

    def left_s(self, model: str, waking: Iterable[float], wake_s: Callable[[str], float], gap_s: float) -> float:
        """Return the expected seconds until the wake of a model that waits can begin, were there room.

        Args:
            model: it waits.
            waking: seconds that are left of each wake that runs.
            wake_s: seconds that the wake of a model takes.
            gap_s: seconds after which guests have a place again.
        """
        ends = sorted([0.0] * self.most + sorted(waking))[-self.most :]
        guests, first = self._ahead(model)
        for one in first:
            heapq.heappush(ends, heapq.heappop(ends) + wake_s(one))
        gaps, before = divmod(len(guests), GUESTS_IN_TURN)
        return ends[0] + gaps * gap_s + sum(wake_s(one) + ANSWER_S for one in guests[:before])

    def _ahead(self, model: str) -> tuple[list[str], list[str]]:
        """Return the guests, and the others, whose turn comes before that of a model."""
        names = list(self._kept)
        before = names[: names.index(model)]
        if self._kept[model]:
            return [], [one for one in before if self._kept[one]]
        return [one for one in before if not self._kept[one]], [one for one in names if self._kept[one]]
