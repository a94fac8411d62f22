"""Contents of each KV block: owner, id under which they can be found, stamp, and whether they are to be zeroed.

Ownership. A block's owner is the namespace key of its last holder, ``CLEAN`` when it is zero, ``TRANSIENT`` when the
holder asked that nothing be kept (such a block is *cached* only while other outputs of the same prompt may still take
it up). A given block is put on the list of blocks to zero, whatever its owner was before: the holder then reads zeros
in slots it has not written, also when the memory of a free block was tampered with. A freed ``TRANSIENT`` block is put
on the list at once, so its content is gone one step after its request. The list is drained once a step into the plan,
and the runner zeroes before it computes.

Stamps (``engine.core.kv.tags``). A block gets the next generation whenever it is given to an owner, and when it is
cleaned without having been given: whatever named it before names it no longer.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.core.kv.tags import NO_STAMP, tag_of

CLEAN = b""
"""Owner of a block that is all zero."""

TRANSIENT = b"\x00"
"""Owner of a block whose content must not outlive its request. No namespace key is one byte long."""


class BlockContents:
    """Owners, ids, stamps and dirt of the blocks ``1..num_blocks``."""

    def __init__(self, num_blocks: int) -> None:
        self.owners = [CLEAN] * (num_blocks + 1)
        self.ids: list[bytes | None] = [None] * (num_blocks + 1)
        self.by_id: dict[bytes, int] = {}
        self._dirty: dict[int, None] = {}
        self._generation = 0
        self._generations = [0] * (num_blocks + 1)

    def give(self, block: int, owner: bytes) -> None:
        """Give the block to an owner; it is zeroed before."""
        self._dirty[block] = None
        self.owners[block] = owner
        self._generation += 1
        self._generations[block] = self._generation

    def clean(self, block: int) -> None:
        """Have a block without holder and id zeroed, where its content must not be kept."""
        if self.owners[block] == TRANSIENT:
            self.owners[block] = CLEAN
            self._dirty[block] = None
            self._generation += 1
            self._generations[block] = self._generation

    def register(self, block: int, block_id: bytes) -> None:
        """Make the block findable. When the id is taken already, or the block has one, nothing changes."""
        if block_id not in self.by_id and self.ids[block] is None:
            self.by_id[block_id] = block
            self.ids[block] = block_id

    def forget(self, block: int) -> None:
        """Make the block unfindable."""
        block_id = self.ids[block]
        if block_id is not None:
            del self.by_id[block_id]
            self.ids[block] = None

    def spoil(self, block: int) -> None:
        """Make the block unfindable; its content must not outlive its present holders."""
        self.forget(block)
        self.owners[block] = TRANSIENT

    def overwritten(self, block: int) -> None:
        """All of the block is overwritten by other means: it need not be zeroed."""
        self._dirty.pop(block, None)

    def known_of(self, owner: bytes) -> list[bytes]:
        """Ids of all that can be found of an owner; linear in what can be found."""
        return [block_id for block_id, block in self.by_id.items() if self.owners[block] == owner]

    def stamps(self, blocks: Iterable[int], owner: bytes) -> tuple[int, ...]:
        """Stamps that a request expects of blocks that it was given as ``owner``, or found as its own; the null block
        has no stamp."""
        tag, generations = tag_of(owner), self._generations
        return tuple([tag + generations[block] if block else NO_STAMP for block in blocks])

    def new_stamps(self, blocks: list[int]) -> list[int]:
        """The stamps that blocks just drained have once they are zero."""
        owners, generations = self.owners, self._generations
        return [tag_of(owners[block]) + generations[block] for block in blocks]

    def drain_dirty(self) -> list[int]:
        """Blocks to zero before the next computation; each is named once."""
        dirty = list(self._dirty)
        self._dirty.clear()
        return dirty

    @property
    def has_dirty(self) -> bool:
        """Whether some block waits to be zeroed."""
        return bool(self._dirty)

    def check_integrity(self, free: list[int], cached: list[int]) -> None:
        """Assert that ids and owners agree with each other, and with the blocks that are free and cached."""
        for block in free:
            assert self.ids[block] is None, "a free block is registered"
            assert self.owners[block] != TRANSIENT, "a free block keeps what it must not"
        for block in cached:
            assert self.ids[block] is not None, "a cached block is not registered"
            assert self.owners[block] != CLEAN, "a cached block has no owner"
        for block_id, block in self.by_id.items():
            assert self.ids[block] == block_id, "the index of ids is wrong"
        assert sum(1 for known in self.ids if known is not None) == len(self.by_id)
