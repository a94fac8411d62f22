"""Public prefixes as the pool has them: blocks that are never cached and never evicted, under keys of their own.

A prefix that the operator has published is computed once and *pinned*: the registry is one more holder of its blocks,
until it is withdrawn. So a request that may use it always finds it, and learns only that it may. Its
blocks count for an account of their own, whose reservation they are, and cost no tenant any of its own.

A request's chain of block ids begins with the prefix's ids, as far as whole blocks of both are the same tokens; what
follows is named under the request's own key, after the last public id as its parent. So what is after a public prefix
is as much its owner's as everything else: another key or another parent gives another id.

Blocks may be computed in the deterministic class, which is as good for all other requests: they serve both. A
deterministic request uses no others.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from engine.core.kv.block_pool import BlockPool
from engine.core.specification import Specification
from isolation.ipc.public import common_length


@dataclass(slots=True, eq=False)
class Resident:
    """One prefix whose blocks are pinned."""

    key: bytes
    token_ids: array[int]
    """Tokens of whole blocks."""
    ids: tuple[bytes, ...]
    """Ids of its blocks."""
    exact: bool
    """Whether it was computed in the deterministic class."""
    blocks: list[int] = field(default_factory=list)
    hits: int = 0
    """Requests that began with it."""
    doubted: bool = False
    """Whether a request was stopped at one of its blocks: it is to be computed anew."""


class PublicBlocks:
    """The prefixes that are resident in one pool."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self.by_key: dict[bytes, Resident] = {}

    def pin(self, resident: Resident) -> bool:
        """Keep what has just been computed. False, and nothing is kept, when some block of it is not there."""
        pool = self._pool
        found = [pool.find(block_id) for block_id in resident.ids]
        blocks = [block for block in found if block is not None and pool.owner(block) == resident.key]
        if len(blocks) < len(found):
            return False
        for block in blocks:
            pool.hold(block)
        pool.pinned.update(blocks)
        pool.accounts.pin(pool.accounts.of(resident.key), len(blocks))
        resident.blocks = blocks
        self.by_key[resident.key] = resident
        return True

    def withdraw(self, key: bytes) -> None:
        """Make a prefix unfindable; it is zeroed when its last holder ends."""
        resident, pool = self.by_key.pop(key), self._pool
        pool.accounts.pin(pool.accounts.of(key), -len(resident.blocks))
        pool.pinned.difference_update(resident.blocks)
        pool.discard(resident.blocks)

    def of(self, spec: Specification, token_ids: array[int]) -> tuple[Resident | None, int]:
        """The prefix that a request may begin with, and in how many whole blocks it does; at least one of its tokens is
        left out, since its logits have to be computed. All are, where log-probabilities of the prompt are wanted."""
        # What the model alone computed of a prefix is of no use to an adapter.
        resident = self.by_key.get(spec.public) if spec.public and not spec.origin else None
        if resident is None or spec.prompt_logprobs >= 0 or (spec.deterministic and not resident.exact):
            return None, 0
        count = common_blocks(resident.token_ids, token_ids, self._block_size)
        return (resident, count) if count else (None, 0)


def common_blocks(prefix: array[int], token_ids: array[int], block_size: int) -> int:
    """Leading whole blocks in which both are the same, the last token of ``token_ids`` left out."""
    return min(common_length(prefix, token_ids), len(token_ids) - 1) // block_size
