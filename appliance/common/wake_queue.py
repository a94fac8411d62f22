"""Order in which sleeping models are woken for requests, and how long each has to wait. Pure: seconds are arguments.

A wake takes a core and more, so wakes that run side by side all end late. Only some run at a time, and the others wait
for their turn: first the most used models that fit together, since most requests are theirs; then the *guests*. Of each
kind the model that was asked for first comes first; but a guest comes before those whose tenant has begun more wakes of
guests in the last minute, so that no tenant's guests keep those of others waiting all the time. A model for which there
is no room keeps none back that needs less: when other models' requests end nobody knows, and a tenant could have them
go on. All that wait were counted when they came (``appliance.common.sleep_rules.WakeGuard``), so no more than a
minute's wakes can come before one of them.

A model that needs the room of several others would wait as long as smaller ones take what becomes free. So one that has
waited for long at its turn reserves room: for ``RESERVED_S`` nothing that needs less begins to wake, and for as long
afterwards all others may again. Room that it finds within that time is its own.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

MOST_AT_ONCE = 2
"""Fewest wakes that run at a time where more are asked for: while one waits for the end of another model or for the
disk, the other computes."""

CORES_OF_WAKE = 2
"""Cores that a wake uses: its engine and its text sandbox are restored side by side."""

RESERVED_S = 10.0
"""Seconds for which a large model first reserves room, and those after which the next may: what is smaller gets at
least half of all time. As long as a request is let wait for a wake to begin, so that none is refused for this alone."""

LONGEST_RESERVED_S = 4 * RESERVED_S
"""Seconds for which it does so each further time: of two minutes, the longest that a request waits for room, a third.
What is smaller is refused meanwhile, with what is left of them, where that is more than it would be let wait."""


def most_at_once(cores: int) -> int:
    """Return how many wakes run at a time on so many cores."""
    return max(MOST_AT_ONCE, cores // CORES_OF_WAKE)


@dataclass(frozen=True, slots=True)
class WakeTurn:
    """A model that requests wait for, as it was looked at last."""

    kept: bool
    """Whether it is one of the most used models that fit together, or there is room for it; else it is a guest."""
    need_bytes: int = 0
    room: bool = True
    """Whether there is room for it, once others have been put to sleep."""
    due: bool = False
    """Whether it has waited for so long that it comes before guests."""
    held: bool = False
    """Whether another's reservation holds it back: it takes no turn from one that needs more."""
    begun: int = 0
    """Wakes of guests that the tenant of its request has begun in the last minute, before this one."""

    @property
    def first(self) -> bool:
        """Whether it comes before guests."""
        return self.kept or self.due


@dataclass(slots=True)
class RoomReservation:
    """Room that a model reserves against those that need less."""

    _model: str = ""
    """Which one; empty: none."""
    _need_bytes: int = 0
    _until: float = -math.inf
    _again: float = -math.inf
    """When room may be reserved again, by any model."""
    _next_s: float = RESERVED_S
    """For how long the same model reserves next."""

    def claim(self, model: str, need_bytes: int, now: float) -> None:
        """Reserve room for a model that waits for some, unless some is or was reserved just now."""
        if now < self._again:
            return
        length_s = self._next_s if model == self._model else RESERVED_S
        self._model, self._need_bytes = model, need_bytes
        self._until, self._again = now + length_s, now + 2 * length_s
        self._next_s = LONGEST_RESERVED_S

    def left_s(self, model: str, need_bytes: int, now: float) -> float:
        """Return the most seconds for which the wake of a model waits for another's reservation; 0: it need not."""
        if not self._model or model == self._model or need_bytes >= self._need_bytes:
            return 0.0
        return max(0.0, self._until - now)

    def release(self, model: str) -> None:
        """Give up what a model has reserved. Idempotent. The time until the next may reserve some passes all the
        same."""
        if model == self._model:
            self._model, self._need_bytes = "", 0


@dataclass(slots=True)
class WakeQueue:
    """Models that requests wait for and whose wake has not begun."""

    most: int = MOST_AT_ONCE
    """Wakes that run at a time."""
    _turns: dict[str, WakeTurn] = field(default_factory=dict)
    """In the order in which the models came."""
    reservation: RoomReservation = field(default_factory=RoomReservation)
    """Ends with the turn of its model."""

    def join(self, model: str, turn: WakeTurn) -> None:
        """Let a model wait for its turn, or note what has changed. One that waits already keeps its place among those
        of its kind; one that was due stays so, and of several requests' tenants the one that has begun fewest counts.
        """
        known = self._turns.get(model, turn)
        self._turns[model] = replace(turn, due=turn.due or known.due, begun=min(turn.begun, known.begun))

    def with_turn(self, model: str, turn: WakeTurn) -> WakeQueue:
        """Return a copy that a model has joined, for an estimate: who is refused by it has changed nothing."""
        copy = WakeQueue(self.most, dict(self._turns), self.reservation)
        copy.join(model, turn)
        return copy

    def leave(self, model: str) -> None:
        """Forget a model: its wake begins, or no request waits for it. Idempotent."""
        self._turns.pop(model, None)
        self.reservation.release(model)

    def is_free(self, waking: int) -> bool:
        """Return whether the wake of a model for which no request waits may begin beside so many others."""
        return waking + len(self._turns) < self.most

    def is_turn(self, model: str, waking: int) -> bool:
        """Return whether the wake of a model that waits may begin beside so many others. A guest takes no place that
        one of the most used models waits for."""
        guests, first = self._ahead(model)
        if not self._turns[model].first and first:
            return False
        return waking + len(first) + len(guests) < self.most

    def has_guests_before(self, model: str) -> bool:
        """Return whether guests come before a model that waits: they take the next place that guests have."""
        return bool(self._ahead(model)[0])

    def left_s(self, model: str, waking: Iterable[float], wake_s: Callable[[str], float], gap_s: float) -> float:
        """Return the seconds until the wake of a model that waits can begin, were there room. Each guest before it
        counts ``gap_s``: so long it may take, since the owner of the place may take it back in between.

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
        return ends[0] + len(guests) * gap_s

    def expected_s(self, model: str, waking: Iterable[float], wake_s: Callable[[str], float], place_s: float) -> float:
        """Return the expected seconds until then, arguments as in ``left_s``. Guests follow each other in one place, so
        each before it counts its wake, and all together the seconds (``place_s``) until they have a place again."""
        guests, _ = self._ahead(model)
        return self.left_s(model, waking, wake_s, 0.0) + (place_s + sum(map(wake_s, guests)) if guests else 0.0)

    def _ahead(self, model: str) -> tuple[list[str], list[str]]:
        """Return the guests, and the others, whose turn comes before that of a model."""
        mine, came = self._turns[model], list(self._turns).index(model)
        guests, first = list[str](), list[str]()
        for place, (name, turn) in enumerate(self._turns.items()):
            # What has no room keeps none back that needs less, and what is held back none that needs more: the room is
            # reserved for that one.
            if name == model or (not turn.room and turn.need_bytes > mine.need_bytes):
                continue
            if turn.held and not mine.held and turn.need_bytes < mine.need_bytes:
                continue
            if turn.first:
                if place < came or not mine.first:
                    first.append(name)
            elif not mine.first and (turn.begun, place) < (mine.begun, came):
                guests.append(name)
        return guests, first
