"""Words that all wordings of changes use: directions, what is told of one change, and lists of names. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from policy.model import PolicySet

MAX_NAMED = 3
"""Names that a sentence lists before it counts the rest."""


class Direction(StrEnum):
    """Direction of a change, seen from the tenant."""

    WIDER = "wider"
    """Allows more, or protects less."""
    NARROWER = "narrower"
    """Allows less, or protects more."""
    OTHER = "other"
    """Neither: content, or a detail without effect on what is allowed."""


@dataclass(frozen=True, slots=True)
class Sides:
    """The two policies that are compared."""

    old: PolicySet
    new: PolicySet


@dataclass(frozen=True, slots=True)
class Told:
    """One thing that changed, in words."""

    direction: Direction
    text: str
    path: str = ""
    """Path of the rule where it is not the field's own."""


Wording = Callable[[Any, Any, Sides], Iterable[Told]]
"""Maps a field's old and new value to what is told about them."""


def more(wider: bool) -> Direction:
    """Return the direction of a change that allows more, or less."""
    return Direction.WIDER if wider else Direction.NARROWER


def listed(names: Sequence[str]) -> str:
    """Return names as text: ``a, b, c and 4 more``."""
    if len(names) <= MAX_NAMED + 1:
        return ", ".join(names[:-1]) + " and " + names[-1] if len(names) > 1 else "".join(names)
    return f"{', '.join(names[:MAX_NAMED])} and {len(names) - MAX_NAMED:,} more"
