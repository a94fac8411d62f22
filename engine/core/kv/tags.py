"""Stamps: the owner that may read a KV block, in one 64-bit number that lies beside the memory.

A *stamp* is an owner's tag plus a generation. The tag is 62 bits of a hash of the owner's key, so two owners' differ
but for one chance in 2**62. Generations are counted over the whole pool: each time that a block is given to an owner,
or cleaned, it gets the next one. So no two blocks have one stamp at any time, and none has a stamp twice: a table that
names a neighbour's block, another block of its own, or a block that has changed hands since shows.

The two sides of the comparison are kept apart. The scheduler says, when a request gets a block, which stamp the request
expects there: its own owner's tag, whatever the pool believes of the block, and the block's generation. The runner
keeps that beside the block tables (``engine.backends.common.block_table``), and the stamps of the blocks in an array of
its own, which is written in one place only: where the block is made zero for its next holder. Before every step all
blocks that the step's rows read or write are compared, in the kernels' own pass over the tables or by
``BlockTables.mismatched``.

What this does not see: bytes of a block that were changed by a stray write, and a fault that changes a table together
with what is expected of it.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b

PERSON = b"athanor-kv-tag"
"""Domain of the hash; at most 16 bytes."""

TAG_BITS = 62
"""Bits of a tag: with any generation that can be reached the sum stays a positive 64-bit integer."""

MAX_TAGS = 4_096
"""Owners whose tags are remembered; another one's costs a microsecond."""

CLEAN_TAG = 0
"""Tag of a block without an owner."""

NO_STAMP = 0
"""Stamp of the null block, and of places of a table that name it."""

NOWHERE = -1
"""Stamp in place of that of a block that does not exist: no request expects it."""


@lru_cache(MAX_TAGS)
def tag_of(owner: bytes) -> int:
    """The tag of an owner of blocks (``engine.core.kv.contents``); of none, ``CLEAN_TAG``."""
    if not owner:
        return CLEAN_TAG
    digest = blake2b(owner, digest_size=8, person=PERSON).digest()
    return int.from_bytes(digest, "little") >> (64 - TAG_BITS)
