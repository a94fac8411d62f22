"""All faults there are, and the order in which a run has them: a shuffled deck, again and again, from the seed."""

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

FAULTS: tuple[Fault, ...] = tuple(
    fault
    for module in (
        deaths, hangs, disks, descriptors, memory, clock, exporter, corruption, policies, keys, strangers,
    )
    for fault in module.FAULTS
)  # fmt: skip


GENTLE = tuple(fault for fault in FAULTS if CUT not in fault.may)
"""Those that end no process: under them memory is looked at over long lives."""


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
    """Without end: the chosen ones in their order, or all of them shuffled anew each round."""
    draw = random.Random(f"{seed}/sequence")
    while True:
        yield from chosen or draw.sample(FAULTS, len(FAULTS))


def calm_sequence(seed: int) -> Iterator[Fault]:
    """Without end: those that end no process, shuffled anew each round."""
    draw = random.Random(f"{seed}/calm")
    while True:
        yield from draw.sample(GENTLE, len(GENTLE))
