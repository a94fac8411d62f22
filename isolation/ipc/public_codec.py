"""Arms of the codec for public prefixes: PublicPrefixes and PublicUsage.

Payloads:

* PublicPrefixes: count u32; of each prefix key 32 bytes, number of ids u32; then all ids u32, prefix after prefix;
* PublicUsage: n x (key 32 bytes, state u8, blocks u32, hits u64), as many as the frame holds.
"""

from __future__ import annotations

import struct

from isolation.ipc.frame import (
    HEADER_BYTES,
    MAX_U32,
    MAX_U64,
    Arm,
    Frame,
    Kind,
    require,
    require_array,
    require_length,
    require_range,
    take_array,
)
from isolation.ipc.messages import NAMESPACE_KEY_BYTES
from isolation.ipc.public_messages import (
    MAX_PUBLIC_PREFIXES,
    MAX_PUBLIC_TOKENS,
    PublicPrefix,
    PublicPrefixes,
    PublicState,
    PublicUsage,
    PublicUse,
)

_COUNT = struct.Struct("<I")
_PREFIX = struct.Struct(f"<{NAMESPACE_KEY_BYTES}sI")
_USE = struct.Struct(f"<{NAMESPACE_KEY_BYTES}sBIQ")


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


def _check_usage(message: PublicUsage) -> None:
    require_length("uses", len(message.uses), MAX_PUBLIC_PREFIXES)
    for use in message.uses:
        require(len(use.key) == NAMESPACE_KEY_BYTES, "a prefix's key has another length")
        PublicState(use.state)
        require_range("num_blocks", use.num_blocks, 0, MAX_U32)
        require_range("hits", use.hits, 0, MAX_U64)


def _pack_usage(message: PublicUsage) -> bytes:
    return b"".join(_USE.pack(use.key, use.state, use.num_blocks, use.hits) for use in message.uses)


def _unpack_usage(_request: int, frame: Frame) -> PublicUsage:
    size = len(frame) - HEADER_BYTES
    require(size % _USE.size == 0 and size <= _USE.size * MAX_PUBLIC_PREFIXES, "the frame holds no whole prefixes")
    return PublicUsage(
        tuple(
            PublicUse(key, PublicState(state), num_blocks, hits)
            for key, state, num_blocks, hits in _USE.iter_unpack(frame[HEADER_BYTES:])
        )
    )


ARMS = (
    Arm(Kind.PUBLIC_PREFIXES, PublicPrefixes, _check_prefixes, _pack_prefixes, _unpack_prefixes, names_request=False),
    Arm(Kind.PUBLIC_USAGE, PublicUsage, _check_usage, _pack_usage, _unpack_usage, names_request=False),
)
