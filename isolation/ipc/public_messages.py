"""The messages about public prefixes: beginnings of prompts that the operator publishes for several tenants.

The host sends the whole table whenever it changes, and to an engine that has just come up. The engine computes each
prefix under its own key, keeps its blocks for good, and says what became of it: only what it has called ``RESIDENT``
is named in a ``Submit``. What the table no longer names is withdrawn as soon as what is new is resident.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import IntEnum

MAX_PUBLIC_PREFIXES = 64
"""Prefixes of one table: with the next bound, all of them fit one frame."""
MAX_PUBLIC_TOKENS = 16_384
"""Tokens of one prefix: some sixty pages."""


def common_length(prefix: array[int], token_ids: array[int]) -> int:
    """Leading ids in which both are the same; linear in the prefix's length."""
    low, high = 0, min(len(prefix), len(token_ids))
    if token_ids[:high] == prefix[:high]:
        return high
    while low < high - 1:
        middle = (low + high) // 2
        if token_ids[low:middle] == prefix[low:middle]:
            low = middle
        else:
            high = middle
    return low


class PublicState(IntEnum):
    """What became of a prefix in an engine."""

    RESIDENT = 1
    """Computed, and kept until it is withdrawn: requests may begin with it."""
    PENDING = 2
    """Yet to be computed."""
    NO_ROOM = 3
    """Its blocks do not fit the pool beside what is reserved, or beside other prefixes."""
    UNSUPPORTED = 4
    """This engine keeps no prefixes, or its layers keep windows only."""
    INVALID = 5
    """It fills no block, or holds an id that the model does not have."""
    FAILED = 6
    """Its computation failed."""


@dataclass(frozen=True, slots=True)
class PublicPrefix:
    """One prefix. Another text has another key, always."""

    key: bytes
    """``NAMESPACE_KEY_BYTES`` random bytes, as of a namespace."""
    token_ids: array[int]
    """Typecode ``I``, 1 to ``MAX_PUBLIC_TOKENS`` ids; whole blocks of them are shared."""


@dataclass(frozen=True, slots=True)
class PublicPrefixes:
    """The whole table, in place of the last one; no key stands there twice."""

    prefixes: tuple[PublicPrefix, ...] = ()


@dataclass(frozen=True, slots=True)
class PublicUse:
    """One prefix of the table in an engine."""

    key: bytes
    state: PublicState
    num_blocks: int
    """Blocks that it keeps, unsigned 32-bit; none unless it is resident."""
    hits: int
    """Requests that began with it, unsigned 64-bit, since it became resident."""


@dataclass(frozen=True, slots=True)
class PublicUsage:
    """Every prefix of the table, in its order."""

    uses: tuple[PublicUse, ...] = ()
