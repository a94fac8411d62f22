"""Blocks that nobody holds and whose content may be taken up again, in the order of their release.

Blocks of accounts with a quota lie on lists of their own (``KvAccount.kept``), those of all others on one list, so that
the oldest block that an account may take is found by a look at the head of each list.
"""

from __future__ import annotations

from collections import OrderedDict
from heapq import nsmallest
from itertools import islice
from operator import itemgetter

from engine.kv.quota import KvAccount, KvAccounts


class CachedBlocks:
    """The cached blocks of a pool; keeps ``KvAccount.cached``."""

    __slots__ = ("_accounts", "_released", "_shared", "count")

    def __init__(self, accounts: KvAccounts) -> None:
        self._accounts = accounts
        self._shared: OrderedDict[int, int] = OrderedDict()
        """Of accounts without a quota: the time of release by block."""
        self._released = 0
        """Releases so far: the clock of this order."""
        self.count = 0

    def add(self, block: int, account: KvAccount) -> None:
        """The block was released; it is the youngest."""
        account.cached += 1
        self.count += 1
        self._released += 1
        (self._shared if account.kept is None else account.kept)[block] = self._released

    def remove(self, block: int, account: KvAccount) -> None:
        """The block is held, or free."""
        del (self._shared if account.kept is None else account.kept)[block]
        account.cached -= 1
        self.count -= 1

    def oldest_for(self, taker: KvAccount) -> int | None:
        """The block released first, of those that this account may take: its own, and what is not protected."""
        source = self._shared
        if self._accounts.bounded:
            oldest = next(iter(source.values())) if source else self._released + 1
            for account in self._accounts.bounded:
                kept = account.kept
                # The block that is taken is counted already: within its reservation an account keeps what it has.
                open_ = account.resident > account.reserved if account is taker else account.surplus > 0
                if kept and open_ and (first := next(iter(kept.values()))) < oldest:
                    source, oldest = kept, first
        return next(iter(source or taker.kept or ()), None)

    def coldest(self, count: int) -> list[int]:
        """The ``count`` blocks released first, whoever may take them."""
        own = (account.kept for account in self._accounts.bounded if account.kept is not None)
        heads = (item for kept in (self._shared, *own) for item in islice(kept.items(), count))
        return [block for block, _ in nsmallest(count, heads, key=itemgetter(1))]

    def sort(self, owners: list[KvAccount], bounded: list[KvAccount], freed: list[KvAccount]) -> None:
        """Other accounts have quotas now: put every block on the list it belongs on. ``owners``: account by block."""
        for account in freed:
            if account.kept is not None:
                self._shared.update(account.kept)
                account.kept = None
        if freed:
            self._shared = OrderedDict(sorted(self._shared.items(), key=lambda item: item[1]))
        fresh = {account for account in bounded if account.kept is None}
        for account in fresh:
            account.kept = OrderedDict()
        if fresh:
            for block in list(self._shared):
                account = owners[block]
                if account in fresh and account.kept is not None:
                    account.kept[block] = self._shared.pop(block)

    def all(self) -> list[int]:
        """Every cached block; linear in their number."""
        own = [account.kept for account in self._accounts.bounded if account.kept is not None]
        return [block for kept in (self._shared, *own) for block in kept]
