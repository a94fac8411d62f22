"""Rights to blocks that are not taken yet.

A prompt is computed chunk by chunk, and in layers with a window it takes and gives back blocks on the way. Its request
gets at once the *right* to as many as it will hold at the most, so that it can never be stuck half-way. Blocks that are
rights of somebody and not held through one are free or cached, but not available to others. A block that several hold
through rights counts for each of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.kv.quota import KvAccount

if TYPE_CHECKING:
    from engine.kv.block_pool import BlockPool


class Rights:
    """The rights to blocks of one pool, and what is done under them."""

    __slots__ = ("_pool", "count")

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
        """Add a holder, who has a right, to a registered block."""
        if not self._pool.refs(block):
            self._promise(-1, self._pool.account_of(block))
        self._pool.hold(block)

    def release(self, blocks: list[int]) -> None:
        """Drop one holder, who keeps the rights, of each of these blocks."""
        self._promise_again(blocks)
        self._pool.release(blocks)

    def discard(self, blocks: list[int]) -> None:
        """The same, and forget the content."""
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
