"""All faults there are, and the order in which a run has them: shuffled decks from the seed, one kind after another."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from bench.soak.answers import CUT
from bench.soak.errors import UsageError
from bench.soak.faults import (
    clock,
    corruption,
    deaths,
    descriptors,
    disks,
    exporter,
    hangs,
    keys,
    memory,
    policies,
    strangers,
)
from bench.soak.ground import Fault

KINDS: tuple[tuple[Fault, ...], ...] = tuple(
    module.FAULTS
    for module in (deaths, hangs, disks, descriptors, memory, clock, exporter, corruption, policies, keys, strangers)
)
"""Faults by what they are about; a round of a run begins with one of each."""

FAULTS: tuple[Fault, ...] = tuple(fault for kind in KINDS for fault in kind)


def is_gentle(fault: Fault) -> bool:
    """Whether it ends no process: under such faults memory is looked at over long lives."""
    return CUT not in fault.may


def find(name: str) -> Fault:
    """The fault of this name.

    Raises:
        UsageError: there is none.
    """
    for fault in FAULTS:
        if fault.name == name:
            return fault
    raise UsageError(f"there is no fault {name!r}; they are: {', '.join(fault.name for fault in FAULTS)}")


def sequence(seed: int, chosen: Sequence[Fault] = ()) -> Iterator[Fault]:
    """Without end: the chosen ones in their order, or round after round all of them.

    A round has every fault once. It is dealt in passes with at most one fault of a kind, those that end processes
    first, so that the beginning of a run, however short, has one of each kind and then long lives.
    """
    draw = random.Random(f"{seed}/sequence")
    while True:
        yield from chosen or _round(draw)


def _round(draw: random.Random) -> Iterator[Fault]:
    decks = [draw.sample(kind, len(kind)) for kind in KINDS]
    while any(decks):
        dealt = [deck.pop() for deck in decks if deck]
        draw.shuffle(dealt)
        yield from sorted(dealt, key=is_gentle)
