"""Which names are label values. Each new value is a time series until this process ends, so there is a bound; a name
keeps the label that its counts have, so that no counter ever goes back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

OTHER = "other"
"""Label value of every name beyond the bounds."""


@dataclass(slots=True)
class SeriesNames:
    """Names with series of their own, and what the others have counted.

    While no more names than ``places`` are known, each has a place. Of more names those get one that are counted first.
    A name that comes too late counts as ``OTHER``, until its share of all that was counted since the start is one part
    in ``places`` or more: then it has one of ``late_places``, and its counts from that moment on. What was counted as
    ``OTHER`` stays there. No place is ever taken back: a series that ended, and one whose counts moved, would show
    increases that never were.
    """

    places: int
    late_places: int = 0
    _known: set[str] = field(default_factory=set)
    _placed: set[str] = field(default_factory=set)
    _late: int = 0
    _amounts: dict[str, int] = field(default_factory=dict)
    """What each known name without a place has counted."""
    _total: int = 0

    def know(self, known: Iterable[str]) -> None:
        """Note which names exist, in addition to those noted before."""
        names = list(known)
        self._known.update(names)
        if len(self._known) <= self.places:
            for name in names:
                self.place(name)

    def place(self, name: str) -> None:
        """Give a known name a place, where one of the first is left."""
        if name in self._known and len(self._placed) - self._late < self.places:
            self._placed.add(name)

    def label(self, name: str) -> str:
        """Return the name itself, or ``OTHER``."""
        return name if name in self._placed else OTHER

    def is_known(self, name: str) -> bool:
        """Whether the name exists, as far as was noted."""
        return name in self._known

    def weigh(self, name: str, amount: int) -> bool:
        """Add what the name has counted; returns whether that brings it one of the late places."""
        self._total += amount
        if name in self._placed or name not in self._known:
            return False
        counted = self._amounts[name] = self._amounts.get(name, 0) + amount
        if self._late == self.late_places or not counted or counted * self.places < self._total:
            return False
        del self._amounts[name]
        self._placed.add(name)
        self._late += 1
        return True
