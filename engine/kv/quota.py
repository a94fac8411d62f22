"""What each tenant may keep in the pool, and what it keeps: accounts of blocks, by namespace key.

An account's *residents* are the blocks whose content is its own: ``held`` by its requests, or ``cached``. Three numbers
bound them:

* ``reserved``: what it can always have. Nobody else's need takes a cached block of an account that has no more than
  this, or the memory of its running requests; and who has less than it needs takes from those who have more than their
  own reservation (the *borrowers*), by eviction first and then by preemption.
* ``cap``: what it never exceeds. At its cap an account evicts its own blocks, and preempts its own requests.
* ``lends``: whether others may use what it leaves of its reservation. Where not, and where the cap is the reservation,
  the account is a partition: neither what it does nor what it leaves can be seen in what others get.

``aside`` is the part of free and cached blocks that is not available to others for an account's sake: its protected
cached blocks or, of a partition, all of its reservation that no request holds. Their sum is kept up to date, so what is
available to an account is a few additions (``BlockPool.available_for``). Since the reservations are together no more
than the pool, an account below its reservation finds free blocks or somebody above his.

Parts travel as ten-thousandths of the pool, and are rounded down.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from isolation.ipc.kv_messages import WHOLE_POOL, KvQuota, KvUse

if TYPE_CHECKING:
    from engine.scheduler.account import Account


class KvAccount:
    """The blocks of one namespace, and its bounds, all in blocks."""

    __slots__ = (
        "aside",
        "cached",
        "cap",
        "held",
        "kept",
        "key",
        "lends",
        "lost",
        "num_requests",
        "parked",
        "pinned",
        "preempted",
        "promised",
        "quota",
        "reserved",
        "waited",
        "withheld",
    )  # fmt: skip

    def __init__(self, key: bytes, cap: int) -> None:
        self.key = key
        self.quota: KvQuota | None = None
        """What the host set; None: no reservation, no cap."""
        self.reserved = 0
        self.cap = cap
        self.lends = True
        self.held = 0
        """Blocks that its requests hold, each counted once."""
        self.cached = 0
        self.promised = 0
        """Rights of its requests for which no block is held."""
        self.aside = 0
        self.withheld = 0
        """Blocks of a partition that are to stay free."""
        self.pinned = 0
        """Of ``held``, blocks of a public prefix: its own reservation, never lent and never preempted."""
        self.kept: OrderedDict[int, int] | None = None
        """Its cached blocks with the time of their release, oldest first; None: they are among everybody's."""
        self.num_requests = 0
        """Live requests."""
        self.parked: dict[Account, None] = {}
        """Queues that wait until the account is further below its cap."""
        self.lost = 0
        """Cached blocks that were evicted for others."""
        self.preempted = 0
        """Requests that were preempted for others."""
        self.waited = 0
        """Times that a queue was parked."""

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
            self.key, self.resident, self.held, self.reserved + self.pinned, self.cap, self.lost, self.preempted,
            self.waited,
        )  # fmt: skip

    def claims(self, new: int) -> bool:
        """Whether so many more blocks are within its reservation."""
        return self.held + self.cached + self.promised + new <= self.reserved and new > 0

    def borrows(self) -> bool:
        """Whether its running requests have more than is reserved for it."""
        return self.held + self.promised > self.reserved


class KvAccounts:
    """All accounts of a pool."""

    __slots__ = ("bounded", "by_key", "num_blocks", "pinned", "set_aside", "total_reserved", "withheld")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.by_key: dict[bytes, KvAccount] = {}
        self.bounded: list[KvAccount] = []
        """Accounts with a quota."""
        self.set_aside = 0
        """Sum of all ``aside``."""
        self.total_reserved = 0
        self.pinned = 0
        """Blocks of public prefixes; part of ``total_reserved``."""
        self.withheld = 0
        """Free blocks that partitions keep: nobody else's cached blocks may lie in them, or it could be seen from what
        is evicted what a partition's tenant does."""

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

    def leave(self, account: KvAccount) -> None:
        """A request of the account has ended; an account of which nothing is left is closed."""
        account.num_requests -= 1
        if not account.num_requests:
            self._close(account)

    def close_empty(self, account: KvAccount) -> None:
        """Its last block was evicted: nothing of it may be left."""
        self._close(account)

    def weigh(self, account: KvAccount) -> None:
        """Its numbers have changed: bring ``aside`` up to date."""
        if not account.lends:
            withheld = max(0, account.reserved - account.held - account.cached)
            self.withheld += withheld - account.withheld
            account.withheld = withheld
        left = account.reserved - account.held - account.promised
        aside = 0 if left <= 0 else left if not account.lends else min(left, account.cached)
        self.set_aside += aside - account.aside
        account.aside = aside

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
        assert self.set_aside == sum(account.aside for account in self.by_key.values()), "what is set aside is off"
        assert self.withheld == sum(account.withheld for account in self.by_key.values()), "what is withheld is off"
        assert self.total_reserved <= self.num_blocks, "more is reserved than there is"
        assert self.pinned == sum(account.pinned for account in self.by_key.values()), "what is pinned is off"
        for account in self.by_key.values():
            assert min(account.held, account.cached, account.promised, account.num_requests) >= 0
            assert account.kept is None or len(account.kept) == account.cached
            assert (account.kept is None) == (account.quota is None)

    def _close(self, account: KvAccount) -> None:
        busy = account.num_requests or account.held or account.cached or account.promised or account.quota
        if not busy and self.by_key.get(account.key) is account:
            del self.by_key[account.key]
