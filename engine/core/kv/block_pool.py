"""Holders of KV blocks, in flat lists of ints.

Each usable block is in exactly one of three states:

* *free*: no request holds it and its content is of no use;
* *cached*: no request holds it, but its content is registered under a block id and may be taken up again;
* *held*: ``refs`` requests have it in their tables (more than one only when they share a cached prefix).

``free + cached + held == num_blocks`` always (``check_integrity``). When blocks are needed, free ones go first, then
cached ones, least recently used first, but none that another account's reservation protects, and its own where the
taker is at its cap (``engine.core.kv.quota``).

What lies in a block, and whose it is, is in ``engine.core.kv.contents``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from engine.core.kv.cached import CachedBlocks
from engine.core.kv.contents import CLEAN, BlockContents
from engine.core.kv.quota import KvAccount, KvAccounts
from isolation.ipc.kv import KvQuota


class BlockPool:
    """Reference counts, owners, content ids and eviction order of the usable blocks ``1..num_blocks``."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._refs = [0] * (num_blocks + 1)
        self._free = list(range(num_blocks, 0, -1))
        self.accounts = KvAccounts(num_blocks)
        self.contents = BlockContents(num_blocks)
        self.rights = Rights(self)
        self._cached = CachedBlocks(self.accounts)
        self.evicted: list[tuple[int, bytes, bytes]] | None = None
        """Evictions since this list was last cleared: block, id, owner. The content is still there until the block is
        zeroed, at the beginning of the next computation. None without a spill tier."""
        self.spoiled: list[tuple[bytes, bytes]] | None = None
        """Id and owner of blocks that could be found and turned out to be wrong, since this list was last cleared. None
        without a spill tier."""
        self.pinned: set[int] = set()
        """Blocks that are held for good (``engine.core.kv.public``)."""
        self._accounts = [KvAccount(CLEAN, num_blocks)] * (num_blocks + 1)
        """Whose quota a block counts for, as long as it is held or cached."""

    @property
    def num_unheld(self) -> int:
        """Blocks that no request holds, free or cached."""
        return len(self._free) + self._cached.count

    @property
    def num_available(self) -> int:
        """Blocks that can be taken now without a right, cached ones included, quotas not considered."""
        return self.num_unheld - self.rights.count

    def available_for(self, account: KvAccount) -> int:
        """Blocks that an account can take now without a right and without a preemption. Below 0: so many too
        many have been taken since the quotas were made smaller."""
        room = self._open_to(account)
        if account.cap < self.num_blocks:
            return min(room, account.cap - account.held - account.promised)
        return room

    def available_beside(self, key: bytes, spared: Mapping[bytes, int]) -> int:
        """Blocks as in ``available_for``, for the account with this key, which is not opened, without those that are to
        stay cached: so many (``spared``) of the account with each key. What others have counts for the pool alone and
        not for the account's cap; what their reservations protect is not available anyway."""
        account, accounts = self.accounts.look_up(key), self.accounts
        others = ((accounts.look_up(other), count) for other, count in spared.items() if other != key)
        left = self._open_to(account) - sum(max(0, count - other.protected) for other, count in others)
        return min(left, self.available_for(account)) - spared.get(key, 0)

    def room_for(self, account: KvAccount, new: int) -> int:
        """Blocks as in ``available_for``, but what an account takes within its reservation keeps its own cached blocks:
        of ``new`` blocks more, those that it can take besides."""
        if not account.claims(new):
            return self.available_for(account)
        spare = self.num_unheld - self.rights.count - self.accounts.protected
        return spare if account.lends else spare + account.protected - min(account.cached, account.protected)

    def lacking(self, account: KvAccount, wanted: int, new: int) -> int:
        """How many of ``wanted`` blocks, ``new`` of which are not the account's yet, are not available to it; 0 or less
        when all are."""
        return new - self.room_for(account, new) if account.claims(new) else wanted - self.available_for(account)

    @property
    def num_cached(self) -> int:
        """Blocks that no request holds and whose content may be taken up again."""
        return self._cached.count

    def refs(self, block: int) -> int:
        """How many requests hold the block."""
        return self._refs[block]

    def owner(self, block: int) -> bytes:
        """Whose bytes the block holds: a namespace key, ``CLEAN`` or ``TRANSIENT``."""
        return self.contents.owners[block]

    def account_of(self, block: int) -> KvAccount:
        """Whose quota a held or cached block counts for."""
        return self._accounts[block]

    def take(self, count: int, owner: bytes, account: KvAccount | None = None) -> list[int]:
        """Give ``count`` blocks to a request of ``owner``; the caller has checked ``available_for`` the account, which
        is the owner's where none is named."""
        assert count <= len(self._free) + self._cached.count, "take() beyond what is available"
        if account is None:
            account = self.accounts.of(owner)
        return [self.take_one(owner, account) for _ in range(count)]

    def take_one(self, owner: bytes, account: KvAccount) -> int:
        """Give one block, as ``take`` does."""
        account.held += 1  # before its last cached block may go, with which the account would be closed
        if self.accounts.bounded:
            self._make_way(account)
        if not self._free:
            self._evict(account)
        block = self._free.pop()
        self.contents.give(block, owner)
        self._refs[block] = 1
        self._accounts[block] = account
        if account.reserved:
            self.accounts.weigh(account)
        return block

    def num_idle(self, blocks: list[int]) -> int:
        """Count the blocks of these that no request holds."""
        refs = self._refs
        return sum(1 for block in blocks if not refs[block])

    def num_private(self, blocks: list[int]) -> int:
        """Count the blocks of this table that have one holder: so many become available with its release."""
        refs = self._refs
        return sum(1 for block in blocks if refs[block] == 1)

    def find(self, block_id: bytes) -> int | None:
        """The block registered under this id, held or cached."""
        return self.contents.by_id.get(block_id)

    def hold(self, block: int) -> None:
        """Add a holder to a registered block."""
        if self._refs[block] == 0:
            account = self._accounts[block]
            self._cached.remove(block, account)
            account.held += 1
            if account.reserved:
                self.accounts.weigh(account)
        self._refs[block] += 1

    def register(self, block: int, block_id: bytes) -> None:
        """Make a held, complete block findable. When the id is taken already, nothing changes."""
        assert self._refs[block] > 0, "register() of a block without a holder"
        self.contents.register(block, block_id)

    def release(self, blocks: list[int]) -> None:
        """Drop one holder of each block of a table. Later blocks of the table are evicted before earlier ones."""
        refs, ids, accounts, cached = self._refs, self.contents.ids, self._accounts, self._cached
        for block in reversed(blocks):
            refs[block] -= 1
            if refs[block] > 0:
                continue
            assert refs[block] == 0, "release() of a block without a holder"
            account = accounts[block]
            account.held -= 1
            if ids[block] is not None:
                cached.add(block, account)
            else:
                self._put_free(block)
            if account.reserved:
                self.accounts.weigh(account)

    def discard(self, blocks: list[int]) -> None:
        """Drop one holder of each block and forget the content: it is wrong, or must not be kept.

        Blocks that other requests of the namespace still hold are only made unfindable.
        """
        for block in blocks:
            block_id = self.contents.ids[block]
            if self.spoiled is not None and block_id is not None:
                self.spoiled.append((block_id, self.owner(block)))
            self.contents.spoil(block)
        self.release(blocks)

    def forget(self, block_id: bytes) -> None:
        """Make the content under this id, if there is any, unfindable; it is zeroed when its last holder ends."""
        block = self.find(block_id)
        if block is None:
            return
        self.contents.spoil(block)
        if not self._refs[block]:
            self._drop(block)

    def set_quotas(self, quotas: list[KvQuota]) -> None:
        """Put other quotas in force; what is held or cached beyond them stays until it is needed or ends."""
        self._cached.sort(self._accounts, *self.accounts.replace(quotas))

    def touch(self, blocks: Sequence[int]) -> None:
        """Blocks of one prompt that can be found, in its order, were of use: those without a holder are evicted as if
        they had been released now, the last one first; so is what came from outside behind one of them."""
        refs = self._refs
        self._cached.refresh([block for block in blocks if not refs[block]], self._accounts)

    def adopt(self, block_id: bytes, owner: bytes, behind: bytes = b"") -> int | None:
        """Take a block for content that comes from outside, registered and without a holder; None when the id is known
        already or its account can have no more. The caller overwrites all of it before the next computation, so it is
        not zeroed.

        Args:
            block_id: its id.
            owner: whose content it is.
            behind: id of the block that it continues, before which it is evicted and never in its place; empty: none.
        """
        if block_id in self.contents.by_id or self.available_for(self.accounts.look_up(owner)) < 1:
            return None
        account = self.accounts.of(owner)
        before = self.find(behind)
        block = self.take_one(owner, account)
        if before is not None and self.find(behind) is None:
            self.release([block])
            return None
        self.contents.overwritten(block)
        self.register(block, block_id)
        self.release([block])
        if before is not None and not self._refs[before] and self._accounts[before] is account:
            self._cached.put_behind(block, before, account)
        return block

    def coldest(self, count: int) -> Iterator[tuple[int, bytes, bytes]]:
        """Block, id and owner of the ``count`` cached blocks that are evicted next; for reading alone."""
        for block in self._cached.coldest(count):
            block_id = self.contents.ids[block]
            assert block_id is not None, "a cached block is not registered"
            yield block, block_id, self.owner(block)

    @property
    def num_free(self) -> int:
        """Blocks whose content is of no use."""
        return len(self._free)

    def disown(self, owner: bytes) -> int:
        """Make everything of this owner unfindable; gives how many blocks. They are zeroed when their last
        holders end."""
        known = self.contents.known_of(owner)
        for block_id in known:
            self.forget(block_id)
        return len(known)

    def check_integrity(self) -> None:
        """Assert what this module promises; linear in the number of blocks."""
        held = sum(1 for refs in self._refs[1:] if refs > 0)
        assert self.num_unheld + held == self.num_blocks, "blocks lost or doubled"
        assert self._refs[0] == 0, "the null block is held"
        assert len(set(self._free)) == len(self._free), "a block is free twice"
        cached = self._cached.all()
        assert len(cached) == self._cached.count, "a cached block is on no list"
        assert not any(self._refs[block] for block in self._free), "a free block is held"
        assert not any(self._refs[block] for block in cached), "a cached block is held"
        self._cached.check_integrity(self._accounts)
        self.contents.check_integrity(self._free, cached)
        self.rights.check_integrity()
        self._check_accounts(cached)

    def _check_accounts(self, cached: list[int]) -> None:
        self.accounts.check_integrity()
        counted: dict[KvAccount, list[int]] = {}
        for block in range(1, self.num_blocks + 1):
            if self._refs[block]:
                counted.setdefault(self._accounts[block], [0, 0])[0] += 1
        for block in cached:
            counted.setdefault(self._accounts[block], [0, 0])[1] += 1
        for account in self.accounts.by_key.values():
            assert [account.held, account.cached] == counted.pop(account, [0, 0]), "an account is off"
        assert not counted, "a block of an account that is closed"

    def _open_to(self, account: KvAccount) -> int:
        """Blocks that neither a right nor another account's reservation keeps from an account."""
        return self.num_unheld - self.rights.count - self.accounts.protected + account.protected

    def _put_free(self, block: int) -> None:
        self.contents.clean(block)
        self._free.append(block)

    def _make_way(self, account: KvAccount) -> None:
        """Make a block free for an account, whose count it is in already, where quotas want another than a free one."""
        if account.kept and self._must_use_own(account):
            self._drop(self._cached.first_of(account.kept))
        if len(self._free) <= self.accounts.withheld - account.withheld:
            self._evict(account)

    def _must_use_own(self, account: KvAccount) -> bool:
        """Whether the account's next block has to be one of its own cached ones: it is at its cap, or all that is free
        or cached is promised or protected."""
        if account.held + account.cached > account.cap:
            return True
        return account.protected > 0 and self.num_unheld - self.rights.count <= self.accounts.protected

    def _evict(self, taker: KvAccount) -> None:
        """Make the cached block free that was released first, of those that this account may take, if there is one.
        Where there is none some are free, which a partition that has just been made has yet to get."""
        block = self._cached.oldest_for(taker)
        if block is None:
            return
        account = self._drop(block)
        if account is not taker:
            # What was promised to its requests counts as theirs: it lies in what is free.
            assert account.resident + account.promised >= account.reserved, "a protected block was evicted"
            account.lost += 1

    def _drop(self, block: int) -> KvAccount:
        """Make a cached block free."""
        block_id = self.contents.ids[block]
        if self.evicted is not None and block_id is not None:
            self.evicted.append((block, block_id, self.owner(block)))
        self.contents.forget(block)
        account = self._accounts[block]
        self._cached.remove(block, account)
        self._put_free(block)
        if account.reserved:
            self.accounts.weigh(account)
        if not account.cached:
            self.accounts.close_empty(account)
        return account


class Rights:
    """Rights to blocks of one pool that are not taken yet, and what is done under them.

    A prompt is computed chunk by chunk, and in layers with a window it takes and gives back blocks on the way. Its
    request gets at once the *right* to as many as it will hold at the most, so that it can never be stuck half-way.
    Blocks that are rights of a request and not held through one are free or cached, but not available to others. A
    block that several requests hold through rights counts for each of them.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.count = 0
        """Rights for which no block is held."""

    def grant(self, count: int, account: KvAccount) -> None:
        """Give so many rights; the caller has checked ``available_for``. Below 0: rights that were given come back."""
        self._promise(count, account)
        if account.reserved:
            self._pool.accounts.weigh(account)
        assert 0 <= self.count <= self._pool.num_unheld, "rights to more than there is"

    def take(self, owner: bytes, account: KvAccount) -> int:
        """Give a block to a request that has a right to it."""
        assert account.promised > 0, "a block without a right"
        self._promise(-1, account)
        return self._pool.take_one(owner, account)

    def hold(self, block: int) -> None:
        """Add a holder that has a right to a registered block."""
        if not self._pool.refs(block):
            self._promise(-1, self._pool.account_of(block))
        self._pool.hold(block)

    def release(self, blocks: list[int]) -> None:
        """Drop one holder of each of these blocks; it keeps the rights."""
        self._promise_again(blocks)
        self._pool.release(blocks)

    def discard(self, blocks: list[int]) -> None:
        """Release these blocks and forget their content."""
        self._promise_again(blocks)
        self._pool.discard(blocks)

    def check_integrity(self) -> None:
        """Assert that rights can be had, and agree with what accounts were promised."""
        assert 0 <= self.count <= self._pool.num_unheld, "rights to more than there is"
        assert self.count == sum(account.promised for account in self._pool.accounts.by_key.values())

    def _promise(self, count: int, account: KvAccount) -> None:
        self.count += count
        account.promised += count

    def _promise_again(self, blocks: list[int]) -> None:
        pool = self._pool
        for block in blocks:
            if pool.refs(block) == 1:
                self._promise(1, pool.account_of(block))
