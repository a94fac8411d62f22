"""Pure: which models leave the cache so that another one finds room."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Occupant:
    """What takes room in the cache: a model, or what a broken pull has left of one."""

    key: str
    size: int
    """Bytes."""
    used: float
    """Unix time of its last use."""
    kept: bool = False
    """Whether it stays whatever happens: pinned, named by the configuration, or being pulled."""


def choose_evictions(occupants: Iterable[Occupant], excess: int) -> tuple[str, ...] | None:
    """Keys of what must leave so that ``excess`` bytes become free: the least recently used first, and no more than
    needed. None where all that may leave is not enough."""
    chosen: list[str] = []
    for one in sorted(occupants, key=lambda one: (one.used, one.key)):
        if excess <= 0:
            break
        if not one.kept and one.size:
            chosen.append(one.key)
            excess -= one.size
    return None if excess > 0 else tuple(chosen)
