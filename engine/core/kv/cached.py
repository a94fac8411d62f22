"""Order in which cached blocks of a pool are evicted.

The block that was released first goes first, and of a prompt its last block: without its first block nothing of a
prompt is found, without its last one all but that. A table is released from its end, so the order of releases does it.
What comes from outside comes from the beginning of its prompt: such a block goes behind the block that it continues,
and is evicted before it, whatever was released meanwhile.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from heapq import nsmallest
from itertools import islice
from operator import itemgetter

from engine.core.kv.quota import KvAccount, KvAccounts


class _Run:
    """Blocks that came behind a released one, in the order of their prompt; all of them have its place in the order."""

    __slots__ = ("blocks", "first", "forks")

    def __init__(self, first: int) -> None:
        self.first = first
        """The block that is on a list."""
        self.blocks: OrderedDict[int, None] = OrderedDict()
        """Those behind it, which are on none."""
        self.forks = False
        """Whether two blocks may continue one of these."""


class CachedBlocks:
    """The cached blocks of a pool, in the order of their release; keeps ``KvAccount.cached``.

    Blocks of accounts with a quota lie on lists of their own (``KvAccount.kept``), those of all others on one list, so
    that the oldest block that an account may take is found by a look at the head of each list.
    """

    def __init__(self, accounts: KvAccounts) -> None:
        self._accounts = accounts
        self._shared: OrderedDict[int, int] = OrderedDict()
        """Time of release by block, for accounts without a quota."""
        self._released = 0
        """Releases so far: the clock of this order."""
        self._runs: dict[int, _Run] = {}
        """By each of its blocks, the first one included; a run has two blocks at least."""
        self.count = 0

    def add(self, block: int, account: KvAccount) -> None:
        """The block was released; it is the youngest."""
        account.cached += 1
        self.count += 1
        self._released += 1
        (self._shared if account.kept is None else account.kept)[block] = self._released

    def put_behind(self, block: int, before: int, account: KvAccount) -> None:
        """Have a block evicted just before the one that it continues, and no later; both are of this account."""
        assert block not in self._runs, "a block with a place in a prompt gets another"
        del (self._shared if account.kept is None else account.kept)[block]
        run = self._runs.get(before)
        if run is None:
            run = self._runs[before] = _Run(before)
        run.forks = run.forks or before != next(reversed(run.blocks), run.first)
        run.blocks[block] = None
        self._runs[block] = run

    def refresh(self, blocks: list[int], owners: list[KvAccount]) -> None:
        """Have these blocks of one prompt, in its order, be the youngest, its first one most of all. What is behind a
        released one is so with it, so that a prompt that came whole costs as much as a block. ``owners``: account by
        block."""
        runs = self._runs
        for block in reversed(blocks):
            run = runs.get(block)
            if run is None or run.first == block:
                account = owners[block]
                ages = self._shared if account.kept is None else account.kept
                self._released += 1
                ages[block] = self._released
                ages.move_to_end(block)

    def remove(self, block: int, account: KvAccount) -> None:
        """The block is held, or free."""
        account.cached -= 1
        self.count -= 1
        ages = self._shared if account.kept is None else account.kept
        run = self._runs.pop(block, None) if self._runs else None
        if run is None:
            del ages[block]
            return
        if block != run.first:
            del run.blocks[block]
        else:
            del ages[block]
            run.first, _ = run.blocks.popitem(last=False)
            if run.forks and ages:
                # What is left may continue blocks that were held and released before: no older one may be left behind.
                ages[run.first] = next(iter(ages.values()))
                ages.move_to_end(run.first, last=False)
            else:  # The first block is held, with all before it: what continues it is as young.
                self._released += 1
                ages[run.first] = self._released
        if not run.blocks:
            del self._runs[run.first]

    def oldest_for(self, taker: KvAccount) -> int | None:
        """The block to evict first, of those that this account may take: its own, and what is not protected."""
        source = self._shared
        if self._accounts.bounded:
            oldest = next(iter(source.values())) if source else self._released + 1
            for account in self._accounts.bounded:
                kept = account.kept
                # The block that is taken is counted already: within its reservation an account keeps what it has.
                open_ = account.resident > account.reserved if account is taker else account.surplus > 0
                if kept and open_ and (first := next(iter(kept.values()))) < oldest:
                    source, oldest = kept, first
        source = source or taker.kept or source
        return self.first_of(source) if source else None

    def first_of(self, ages: OrderedDict[int, int]) -> int:
        """The block to evict first, of a list that has some."""
        first = next(iter(ages))
        run = self._runs.get(first) if self._runs else None
        return first if run is None else next(reversed(run.blocks))

    def coldest(self, count: int) -> list[int]:
        """The ``count`` blocks to evict first, protected ones included."""
        own = (account.kept for account in self._accounts.bounded if account.kept is not None)
        heads = (item for kept in (self._shared, *own) for item in islice(self._in_order(kept), count))
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
        return [block for kept in (self._shared, *own) for block, _ in self._in_order(kept)]

    def check_integrity(self, owners: list[KvAccount]) -> None:
        """Assert that each run hangs on a list, and has blocks of one account."""
        for block, run in self._runs.items():
            assert block == run.first or block in run.blocks, "a block is not in its run"
            assert run.blocks, "a run has no block behind its first one"
            assert run.first not in run.blocks, "a block is twice in its run"
            assert owners[block] is owners[run.first], "a run has blocks of two accounts"
            assert all(self._runs.get(other) is run for other in (run.first, *run.blocks)), "a run is known in part"

    def _in_order(self, ages: OrderedDict[int, int]) -> Iterator[tuple[int, int]]:
        """Blocks of a list and those behind them, with their times, as they are evicted."""
        for first, age in ages.items():
            run = self._runs.get(first)
            for block in reversed(run.blocks) if run is not None else ():
                yield block, age
            yield first, age
