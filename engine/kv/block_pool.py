"""Who holds which KV block, in flat lists of ints.

Each usable block is in exactly one of three states:

* *free*: no request holds it and its content is of no use;
* *cached*: no request holds it, but its content is registered under a block id and may be taken up again;
* *held*: ``refs`` requests have it in their tables (more than one only when they share a cached prefix).

``free + cached + held == num_blocks`` always (``check_integrity``). When blocks are needed, free ones go first, then
cached ones, least recently used first.

Ownership. The pool remembers whose bytes a block holds: the namespace key of its last holder, ``CLEAN`` when it is
zero, ``TRANSIENT`` when the holder asked that nothing be kept (such a block is *cached* only while other outputs of
the same prompt may still take it up). A taken block is put on the list of blocks to zero,
whoever had it before: the holder then reads zeros in slots it has not written, also when the memory of a free block
was tampered with. A freed ``TRANSIENT`` block is put on the list at once, so its content is gone one step after its
request. The list is drained once a step into the plan, and the runner zeroes before it computes.

Rights. A prompt is computed chunk by chunk, and in layers with a window it takes and gives back blocks on the way. Its
request gets at once the *right* to as many as it will hold at the most, so that it can never be stuck half-way. Blocks
that are rights of somebody and not held through one are free or cached, but not available to others. A block that
several hold through rights counts for each of them.

Stamps (``engine.kv.tags``). A block gets the pool's next generation whenever it is taken, and when it is cleaned
without having been taken: whatever named it before names it no longer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import islice

from engine.kv.tags import NO_STAMP, tag_of

CLEAN = b""
"""Owner of a block that is all zero."""

TRANSIENT = b"\x00"
"""Owner of a block whose content must not outlive its request. No namespace key is one byte long."""


class BlockPool:
    """Reference counts, owners, content ids and eviction order of the usable blocks ``1..num_blocks``."""

    __slots__ = (
        "_by_id",
        "_cached",
        "_dirty",
        "_free",
        "_generation",
        "_generations",
        "_ids",
        "_owners",
        "_refs",
        "_reserved",
        "evicted",
        "num_blocks",
    )

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._refs = [0] * (num_blocks + 1)
        self._owners = [CLEAN] * (num_blocks + 1)
        self._ids: list[bytes | None] = [None] * (num_blocks + 1)
        self._by_id: dict[bytes, int] = {}
        self._free = list(range(num_blocks, 0, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._dirty: dict[int, None] = {}
        self._reserved = 0
        self._generation = 0
        self._generations = [0] * (num_blocks + 1)
        self.evicted: list[tuple[int, bytes, bytes]] | None = None
        """What lost its place since somebody last took this list: block, id, owner. The content is still there until
        the block is zeroed, at the beginning of the next computation. None where nobody wants to know."""

    @property
    def num_available(self) -> int:
        """Blocks that can be taken now without a right, cached ones included."""
        return len(self._free) + len(self._cached) - self._reserved

    @property
    def num_reserved(self) -> int:
        """Rights for which no block is held."""
        return self._reserved

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and whose content may be taken up again."""
        return len(self._cached)

    def refs(self, block: int) -> int:
        """How many requests hold the block."""
        return self._refs[block]

    def owner(self, block: int) -> bytes:
        """Whose bytes the block holds: a namespace key, ``CLEAN`` or ``TRANSIENT``."""
        return self._owners[block]

    def stamps(self, blocks: Iterable[int], owner: bytes) -> tuple[int, ...]:
        """What somebody who has taken these blocks for ``owner``, or found them as its, expects of them; the null block
        has no stamp."""
        tag, generations = tag_of(owner), self._generations
        return tuple([tag + generations[block] if block else NO_STAMP for block in blocks])

    def take(self, count: int, owner: bytes) -> list[int]:
        """Give ``count`` blocks to a request of ``owner``; the caller has checked ``num_available``."""
        assert count <= len(self._free) + len(self._cached), "take() beyond what is available"
        return [self.take_one(owner) for _ in range(count)]

    def take_one(self, owner: bytes) -> int:
        """The same for one block."""
        block = self._free.pop() if self._free else self._evict()
        self._dirty[block] = None
        self._owners[block] = owner
        self._refs[block] = 1
        self._generation += 1
        self._generations[block] = self._generation
        return block

    def grant(self, count: int) -> None:
        """Give so many rights; the caller has checked ``num_available``. Below 0: rights that were given come back."""
        self._reserved += count
        assert 0 <= self._reserved <= len(self._free) + len(self._cached), "rights to more than there is"

    def take_granted(self, owner: bytes) -> int:
        """Give a block to a request that has a right to it."""
        assert self._reserved > 0, "a block without a right"
        self._reserved -= 1
        return self.take_one(owner)

    def hold_granted(self, block: int) -> None:
        """Add a holder, who has a right, to a registered block."""
        if not self._refs[block]:
            self._reserved -= 1
        self.hold(block)

    def release_granted(self, blocks: list[int]) -> None:
        """Drop one holder, who keeps the rights, of each of these blocks."""
        refs = self._refs
        self._reserved += sum(1 for block in blocks if refs[block] == 1)
        self.release(blocks)

    def discard_granted(self, blocks: list[int]) -> None:
        """The same, and forget the content."""
        refs = self._refs
        self._reserved += sum(1 for block in blocks if refs[block] == 1)
        self.discard(blocks)

    def num_idle(self, blocks: list[int]) -> int:
        """How many of these blocks nobody holds."""
        refs = self._refs
        return sum(1 for block in blocks if not refs[block])

    def num_private(self, blocks: list[int]) -> int:
        """How many blocks of this table nobody else holds: so many become available with its release."""
        refs = self._refs
        return sum(1 for block in blocks if refs[block] == 1)

    def find(self, block_id: bytes) -> int | None:
        """The block registered under this id, held or cached."""
        return self._by_id.get(block_id)

    def hold(self, block: int) -> None:
        """Add a holder to a registered block."""
        if self._refs[block] == 0:
            del self._cached[block]
        self._refs[block] += 1

    def register(self, block: int, block_id: bytes) -> None:
        """Make a held, complete block findable. When the id is taken already, nothing changes."""
        assert self._refs[block] > 0, "register() of a block that nobody holds"
        if block_id not in self._by_id and self._ids[block] is None:
            self._by_id[block_id] = block
            self._ids[block] = block_id

    def release(self, blocks: list[int]) -> None:
        """Drop one holder of each block of a table. Later blocks of the table are evicted before earlier ones."""
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block] > 0:
                continue
            assert self._refs[block] == 0, "release() of a block that nobody holds"
            if self._ids[block] is not None:
                self._cached[block] = None
            else:
                self._put_free(block)

    def discard(self, blocks: list[int]) -> None:
        """Drop one holder of each block and forget the content: it is wrong, or must not be kept.

        Blocks that other requests of the namespace still hold are only made unfindable.
        """
        for block in blocks:
            self._forget(block)
            self._owners[block] = TRANSIENT
        self.release(blocks)

    def forget(self, block_id: bytes) -> None:
        """Make the content under this id, if there is any, unfindable; it is zeroed when nobody holds it any longer."""
        block = self._by_id.get(block_id)
        if block is None:
            return
        self._forget(block)
        self._owners[block] = TRANSIENT
        if not self._refs[block]:
            del self._cached[block]
            self._put_free(block)

    def adopt(self, block_id: bytes, owner: bytes) -> int | None:
        """A block for content that comes from outside, registered and held by nobody; None when the id is known already
        or no block is available. The caller overwrites all of it before the next computation, so it is not zeroed."""
        if block_id in self._by_id or self.num_available < 1:
            return None
        block = self.take_one(owner)
        self._dirty.pop(block, None)
        self.register(block, block_id)
        self.release([block])
        return block

    def coldest(self, count: int) -> Iterator[tuple[int, bytes, bytes]]:
        """Block, id and owner of the ``count`` cached blocks that are evicted next; for reading alone."""
        for block in islice(self._cached, count):
            block_id = self._ids[block]
            assert block_id is not None, "a cached block is not registered"
            yield block, block_id, self._owners[block]

    @property
    def num_free(self) -> int:
        """Blocks whose content is of no use."""
        return len(self._free)

    def disown(self, owner: bytes) -> int:
        """Make everything of this owner unfindable; gives how many blocks. They are zeroed when nobody holds them any
        longer."""
        known = [block_id for block_id, block in self._by_id.items() if self._owners[block] == owner]
        for block_id in known:
            self.forget(block_id)
        return len(known)

    def drain_dirty(self) -> list[int]:
        """Blocks to zero before the next computation; each is named once."""
        dirty = list(self._dirty)
        self._dirty.clear()
        return dirty

    def new_stamps(self, blocks: list[int]) -> list[int]:
        """The stamps that blocks just drained have once they are zero."""
        owners, generations = self._owners, self._generations
        return [tag_of(owners[block]) + generations[block] for block in blocks]

    @property
    def has_dirty(self) -> bool:
        """Whether some block waits to be zeroed."""
        return bool(self._dirty)

    def check_integrity(self) -> None:
        """Assert what this module promises; linear in the number of blocks."""
        held = sum(1 for refs in self._refs[1:] if refs > 0)
        assert len(self._free) + len(self._cached) + held == self.num_blocks, "blocks lost or doubled"
        assert 0 <= self._reserved <= len(self._free) + len(self._cached), "rights to more than there is"
        assert self._refs[0] == 0, "the null block is held"
        assert len(set(self._free)) == len(self._free), "a block is free twice"
        for block in self._free:
            assert self._refs[block] == 0, "a free block is held"
            assert self._ids[block] is None, "a free block is registered"
            assert self._owners[block] != TRANSIENT, "a free block keeps what it must not"
        for block in self._cached:
            assert self._refs[block] == 0, "a cached block is held"
            assert self._ids[block] is not None, "a cached block is not registered"
            assert self._owners[block] != CLEAN, "a cached block has no owner"
        for block_id, block in self._by_id.items():
            assert self._ids[block] == block_id, "the index of ids is wrong"
        assert sum(1 for known in self._ids if known is not None) == len(self._by_id)

    def _put_free(self, block: int) -> None:
        if self._owners[block] == TRANSIENT:
            self._owners[block] = CLEAN
            self._dirty[block] = None
            self._generation += 1
            self._generations[block] = self._generation
        self._free.append(block)

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        block_id = self._ids[block]
        if self.evicted is not None and block_id is not None:
            self.evicted.append((block, block_id, self._owners[block]))
        self._forget(block)
        return block

    def _forget(self, block: int) -> None:
        block_id = self._ids[block]
        if block_id is not None:
            del self._by_id[block_id]
            self._ids[block] = None
