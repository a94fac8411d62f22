"""Objects that hosts of a fleet give to each other open for what they are, and for nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from isolation.keys.errors import SealBrokenError
from isolation.keys.fleet_seal import (
    OVERHEAD_BYTES,
    FleetBinding,
    Generation,
    fleet_name,
    open_from_fleet,
    seal_for_fleet,
)

OF = Generation("alpha", 7, bytes(range(32)))
BINDING = FleetBinding(b"block", "00" * 32, b"b" * 32)
PRODUCER, EPOCH, DATA = b"p" * 32, b"e" * 16, b"keys and values"
MEMBERS = frozenset({PRODUCER})

OTHERS = {
    "tenant": (replace(OF, account="beta"), BINDING),
    "generation": (replace(OF, number=8), BINDING),
    "key": (replace(OF, key=bytes(32)), BINDING),
    "block": (OF, replace(BINDING, block=b"other")),
    "model": (OF, replace(BINDING, model="11" * 32)),
    "backend": (OF, replace(BINDING, backend=b"c" * 32)),
}


def sealed() -> bytes:
    """The object."""
    return seal_for_fleet(OF, BINDING, PRODUCER, EPOCH, DATA)


def test_an_object_stands_alone() -> None:
    """It opens with the generation and nothing else, has a known length, and two of the same block share no bytes
    behind the header."""
    one, two = sealed(), sealed()
    assert open_from_fleet(OF, BINDING, MEMBERS, one) == open_from_fleet(OF, BINDING, MEMBERS, two) == DATA
    assert len(one) == len(DATA) + OVERHEAD_BYTES and one[-len(DATA) - 16 :] != two[-len(DATA) - 16 :]


@pytest.mark.parametrize("other", OTHERS)
def test_under_anything_else_it_does_not_open_and_has_another_name(other: str) -> None:
    """Each part of what an object is bound to: it neither opens nor is found where that part differs."""
    of, binding = OTHERS[other]
    with pytest.raises(SealBrokenError):
        open_from_fleet(of, binding, MEMBERS, sealed())
    # The key is no part of a name: who has another key under one number was told so by a copied server.
    assert (fleet_name(b"f" * 32, of, binding) == fleet_name(b"f" * 32, OF, BINDING)) is (other == "key")
    assert (of.namespace() == OF.namespace()) is (other in ("block", "model", "backend", "generation"))


def test_what_a_store_changes_does_not_open() -> None:
    """Every byte flipped, every length cut, one more byte, another member's name in the header, and one that is no
    member's: none opens. Names differ by the fleet's key, and an unchanged copy opens (control)."""
    whole = sealed()
    for at in range(len(whole)):
        changed = bytearray(whole)
        changed[at] ^= 1
        with pytest.raises(SealBrokenError):
            open_from_fleet(OF, BINDING, MEMBERS | {bytes(changed[40:72])}, changed)
        with pytest.raises(SealBrokenError):
            open_from_fleet(OF, BINDING, MEMBERS, whole[:at])
    with pytest.raises(SealBrokenError):
        open_from_fleet(OF, BINDING, MEMBERS, whole + b"x")
    with pytest.raises(SealBrokenError, match="no member"):
        open_from_fleet(OF, BINDING, frozenset({b"q" * 32}), whole)
    assert fleet_name(b"f" * 32, OF, BINDING) != fleet_name(b"g" * 32, OF, BINDING)
    assert open_from_fleet(OF, BINDING, MEMBERS, bytes(whole)) == DATA


def test_nothing_that_is_printed_has_a_key() -> None:
    """The representation of a generation names number and account alone."""
    made: Callable[[Generation], str] = repr
    assert made(OF) == "<Generation 0x7 of alpha>"
