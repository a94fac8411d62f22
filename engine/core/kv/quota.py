"""What each tenant may keep in the pool, and what it keeps: accounts of blocks, by namespace key.

An account's *residents* are the blocks whose content is its own: ``held`` by its requests, or ``cached``. Three numbers
bound them:

* ``reserved``: what it can always have. No other account's need takes a cached block of an account that has no more
  than this, or the memory of its running requests; an account with less than it needs takes from those above their
  own reservation (the *borrowers*), by eviction first and then by preemption.
* ``cap``: what it never exceeds. At its cap an account evicts its own blocks, and preempts its own requests.
* ``lends``: whether others may use what it leaves of its reservation. Where not, and where the cap is the reservation,
  the account is a partition: neither what it does nor what it leaves can be seen in what others get.

``protected`` is the part of free and cached blocks that is not available to others for an account's sake: its protected
cached blocks or, of a partition, all of its reservation that no request holds. Their sum is kept up to date, so what is
available to an account is a few additions (``BlockPool.available_for``). Since the reservations are together no more
than the pool, an account below its reservation finds free blocks, or an account above its own.

Parts travel as ten-thousandths of the pool, and are rounded down.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from isolation.ipc.kv import WHOLE_POOL, KvQuota, KvUse


@dataclass(slots=True, eq=False)
class KvAccount:
    """The blocks of one namespace, and its bounds, all in blocks."""

    key: bytes
    cap: int
    quota: KvQuota | None = None
    """What the host set; None: no reservation, no cap."""
    reserved: int = 0
    lends: bool = True
    held: int = 0
    """Blocks that its requests hold, each counted once."""
    cached: int = 0
    promised: int = 0
    """Rights of its requests for which no block is held."""
    protected: int = 0
    """Free and cached blocks that are not available to others for this account's sake."""
    withheld: int = 0
    """Blocks of a partition that are to stay free."""
    pinned: int = 0
    """Part of ``held`` that is a public prefix: its own reservation, never lent and never preempted."""
    kept: OrderedDict[int, int] | None = None
    """Its cached blocks with the time of their release, oldest first; None: they are among those of all others."""
    num_requests: int = 0
    """Live requests."""
    lost: int = 0
    """Cached blocks that were evicted for others."""
    preempted: int = 0
    """Requests that were preempted for others."""
    waited: int = 0
    """Times that a queue was suspended at the cap."""

    @property
    def used(self) -> int:
        """Blocks that its running requests have, or have a right to."""
        return self.held + self.promised

    @property
    def resident(self) -> int:
        """Blocks with its content."""
        return self.held + self.cached

    @property
    def surplus(self) -> int:
        """Cached blocks that others may evict."""
        return self.cached - min(self.cached, max(0, self.reserved - self.used))

    def use(self) -> KvUse:
        """What the operator may see of it."""
        return KvUse(
            self.key,
            self.resident,
            self.held,
            self.reserved + self.pinned,
            self.cap,
            self.lost,
            self.preempted,
            self.waited,
        )

    def claims(self, new: int) -> bool:
        """Whether so many more blocks are within its reservation."""
        return self.held + self.cached + self.promised + new <= self.reserved and new > 0

    def borrows(self) -> bool:
        """Whether its running requests have more than is reserved for it."""
        return self.held + self.promised > self.reserved


class KvAccounts:
    """All accounts of a pool."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.by_key: dict[bytes, KvAccount] = {}
        self.bounded: list[KvAccount] = []
        """Accounts with a quota."""
        self.protected = 0
        """Sum of all ``protected``."""
        self.total_reserved = 0
        self.pinned = 0
        """Blocks of public prefixes; part of ``total_reserved``."""
        self.withheld = 0
        """Free blocks that partitions keep: cached blocks of other accounts may not lie in them, or it could be seen
        from what is evicted what a partition's tenant does."""

    @property
    def bounds(self) -> bool:
        """Whether any account may need less than the whole pool."""
        return bool(self.bounded) or self.pinned > 0

    def of(self, key: bytes) -> KvAccount:
        """The account of a namespace, opened when it is new."""
        account = self.by_key.get(key)
        if account is None:
            account = self.by_key[key] = KvAccount(key, self.num_blocks)
        return account

    def look_up(self, key: bytes) -> KvAccount:
        """The account of a namespace, for reading alone: one that is new is not opened, since nobody would close it."""
        return self.by_key.get(key) or KvAccount(key, self.num_blocks)

    def leave(self, account: KvAccount) -> None:
        """A request of the account has ended; an account of which nothing is left is closed."""
        account.num_requests -= 1
        if not account.num_requests:
            self._close(account)

    def close_empty(self, account: KvAccount) -> None:
        """Its last block was evicted: nothing of it may be left."""
        self._close(account)

    def weigh(self, account: KvAccount) -> None:
        """Its numbers have changed: bring ``protected`` up to date."""
        if not account.lends:
            withheld = max(0, account.reserved - account.held - account.cached)
            self.withheld += withheld - account.withheld
            account.withheld = withheld
        left = account.reserved - account.held - account.promised
        protected = 0 if left <= 0 else left if not account.lends else min(left, account.cached)
        self.protected += protected - account.protected
        account.protected = protected

    def pin(self, account: KvAccount, count: int) -> None:
        """So many of the blocks that the account holds are there for good; below 0: are no longer."""
        account.pinned += count
        self.pinned += count
        self.total_reserved += count

    def may_need(self, account: KvAccount) -> int:
        """The most blocks that one request of the account can count on: its cap, and no more than what the others'
        reservations leave."""
        return min(account.cap, self.num_blocks - self.total_reserved + account.reserved)

    def replace(self, quotas: Iterable[KvQuota]) -> tuple[list[KvAccount], list[KvAccount]]:
        """Put other quotas in force. Gives the accounts that are bounded now, and those that are no longer."""
        before = self.bounded
        chosen = {quota.namespace: quota for quota in quotas}
        freed = [account for account in before if account.key not in chosen]
        for account in before:
            self.withheld -= account.withheld
            account.withheld = 0
        for account in freed:
            account.quota, account.reserved, account.cap, account.lends = None, 0, self.num_blocks, True
        self.bounded = []
        for key, quota in chosen.items():
            account = self.of(key)
            account.quota = quota
            account.reserved = self.num_blocks * quota.reserved // WHOLE_POOL
            account.cap = self.num_blocks * quota.cap // WHOLE_POOL
            account.lends = quota.lends
            self.bounded.append(account)
        self.total_reserved = self.pinned + sum(account.reserved for account in self.bounded)
        for account in (*freed, *self.bounded):
            self.weigh(account)
        for account in freed:
            self._close(account)
        return self.bounded, freed

    def check_integrity(self) -> None:
        """Assert that sums agree with their parts."""
        assert self.protected == sum(account.protected for account in self.by_key.values()), "what is protected is off"
        assert self.withheld == sum(account.withheld for account in self.by_key.values()), "what is withheld is off"
        assert self.total_reserved <= self.num_blocks, "more is reserved than there is"
        assert self.pinned == sum(account.pinned for account in self.by_key.values()), "what is pinned is off"
        for account in self.by_key.values():
            assert min(account.held, account.cached, account.promised, account.num_requests) >= 0
            assert account.kept is None or bool(account.kept) == bool(account.cached)
            assert (account.kept is None) == (account.quota is None)

    def _close(self, account: KvAccount) -> None:
        busy = account.num_requests or account.held or account.cached or account.promised or account.quota
        if not busy and self.by_key.get(account.key) is account:
            del self.by_key[account.key]
