"""The messages about public prefixes: beginnings of prompts that the operator publishes for several tenants.

The host sends the whole table whenever it changes, and to an engine that has just come up. The engine computes each
prefix under its own key, keeps its blocks for good, and says what became of it: only what it has called ``RESIDENT``
is named in a ``Submit``. What the table no longer names is withdrawn as soon as what is new is resident.

Payload of PublicPrefixes: count u32; of each prefix key 32 bytes, number of ids u32; then all ids u32, prefix after
prefix. That of PublicUsage is rows of a record.
"""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass
from enum import IntEnum

from isolation.ipc.frame import (
    HEADER_BYTES,
    Frame,
    Kind,
    MessageCodec,
    Record,
    require,
    require_array,
    require_length,
    require_range,
    rows_codec,
    take_array,
)
from isolation.ipc.messages import NAMESPACE_KEY_BYTES

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


_COUNT = struct.Struct("<I")
_PREFIX = struct.Struct(f"<{NAMESPACE_KEY_BYTES}sI")
_USE = Record(f"key:{NAMESPACE_KEY_BYTES}s state:B num_blocks:I hits:Q", state=PublicState)


def _check_prefixes(message: PublicPrefixes) -> None:
    require_length("prefixes", len(message.prefixes), MAX_PUBLIC_PREFIXES)
    for prefix in message.prefixes:
        require(len(prefix.key) == NAMESPACE_KEY_BYTES, "a prefix's key has another length")
        require_array("the prefix", prefix.token_ids, "I")
        require_range("prefix length", len(prefix.token_ids), 1, MAX_PUBLIC_TOKENS)
    keys = {prefix.key for prefix in message.prefixes}
    require(len(keys) == len(message.prefixes), "a key stands in the table twice")


def _pack_prefixes(message: PublicPrefixes) -> bytes:
    heads = [_PREFIX.pack(prefix.key, len(prefix.token_ids)) for prefix in message.prefixes]
    ids = [prefix.token_ids.tobytes() for prefix in message.prefixes]
    return b"".join((_COUNT.pack(len(message.prefixes)), *heads, *ids))


def _unpack_prefixes(_request: int, frame: Frame) -> PublicPrefixes:
    (count,) = _COUNT.unpack_from(frame, HEADER_BYTES)
    require_length("prefixes", count, MAX_PUBLIC_PREFIXES)
    heads = HEADER_BYTES + _COUNT.size
    place = heads + _PREFIX.size * count
    require(place <= len(frame), "the count does not fit the frame")
    pairs = list(_PREFIX.iter_unpack(frame[heads:place]))
    require(place + 4 * sum(length for _, length in pairs) == len(frame), "the counts do not give the frame's length")
    prefixes = []
    for key, length in pairs:
        prefixes.append(PublicPrefix(key, take_array("I", frame, place, place + 4 * length)))
        place += 4 * length
    return PublicPrefixes(tuple(prefixes))


ARMS = (
    MessageCodec(
        Kind.PUBLIC_PREFIXES, PublicPrefixes, _check_prefixes, _pack_prefixes, _unpack_prefixes, names_request=False
    ),
    rows_codec(Kind.PUBLIC_USAGE, PublicUsage, PublicUse, _USE, MAX_PUBLIC_PREFIXES),
)
