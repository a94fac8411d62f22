"""A list of system calls as an observed process tells it, and what it says to a call. Pure, and without the engine.

``engine.sandbox.allowed_calls`` is what lists are made of; here they come as JSON out of the process that would have
been locked down by them, since a list names descriptors that only this process knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

LOW_WORD = 0xFFFF_FFFF


@dataclass(frozen=True, slots=True)
class Condition:
    """Argument ``index``, under ``mask``, is one of ``values``; as ``engine.sandbox.allowed_calls.Argument``."""

    index: int
    values: tuple[int, ...]
    mask: int


@dataclass(frozen=True, slots=True)
class ListedCall:
    """One entry of a list, with its number on this machine."""

    name: str
    number: int
    conditions: tuple[Condition, ...]
    answer: int | None
    """Error with which the call seems to fail, 0 for none; None: it is made."""

    def allows(self, arguments: Sequence[int]) -> bool:
        """Whether every condition holds."""
        return all(arguments[one.index] & one.mask & LOW_WORD in one.values for one in self.conditions)


@dataclass(frozen=True, slots=True)
class CallList:
    """The list of one program."""

    program: str
    entries: tuple[ListedCall, ...]

    def by_number(self) -> dict[int, ListedCall]:
        """Entries by their number."""
        return {one.number: one for one in self.entries}


def encode(lists: Iterable[CallList]) -> list[dict[str, Any]]:
    """The lists as JSON can hold them."""
    return [asdict(one) for one in lists]


def decode(values: Iterable[Mapping[str, Any]]) -> list[CallList]:
    """Read what ``encode`` made, once it has been through JSON."""
    return [CallList(str(one["program"]), tuple(map(_entry, one["entries"]))) for one in values]


def _entry(value: Mapping[str, Any]) -> ListedCall:
    conditions = tuple(Condition(one["index"], tuple(one["values"]), one["mask"]) for one in value["conditions"])
    return ListedCall(value["name"], value["number"], conditions, value["answer"])
