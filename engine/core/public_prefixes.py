"""Computes the public prefixes that the host names, one after the other, and withdraws what it names no longer.

A prefix is computed as a request of the engine's own, under the prefix's key: its chunks take part in steps as any
prompt's, before requests of lower priority. When it has ended its blocks are pinned, between two steps, so that none
can have been taken. What is new becomes resident before what is old is withdrawn, where both fit.

Public prefixes take no more than ``1 / MOST`` of the pool, and nothing that is reserved: tenants' reservations come
first. When those grow, prefixes are withdrawn, the last of the table first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.core.kv.block_pool import BlockPool
from engine.core.kv.prefix_cache import PrefixCache
from engine.core.kv.public import Resident
from engine.core.kv.quota import KvAccount
from engine.core.scheduler.plan import StepResult
from engine.core.scheduler.scheduler import Scheduler
from engine.core.specification import SILENT_ID
from engine.core.stages import Publishing
from engine.errors import RequestRejectedError
from isolation.ipc.engine import Submit
from isolation.ipc.kv import WHOLE_POOL, KvQuota
from isolation.ipc.messages import FailureCode, Priority
from isolation.ipc.public import PublicPrefix, PublicState, PublicUsage, PublicUse
from isolation.ipc.sampling import Sampling

MOST = 2
"""One part in so many of the pool is the most that public prefixes take together; the host promises no more."""

USAGE_PERIOD_NS = 1_000_000_000
"""Time between two reports that tell of hits alone."""


class Publisher(Publishing):
    """The table of prefixes, and what became of each."""

    def __init__(self, scheduler: Scheduler, pool: BlockPool, cache: PrefixCache, *, exact: Callable[[], bool]) -> None:
        """``exact``: whether this engine can compute in the deterministic class, as it has found when it was warm."""
        self._scheduler = scheduler
        self._pool = pool
        self._cache = cache
        self._exact = exact
        self._table: dict[bytes, PublicPrefix] = {}
        self._states: dict[bytes, PublicState] = {}
        self._current: Resident | None = None
        """What is being computed."""
        self._leaving: list[KvAccount] = []
        """Accounts of withdrawn prefixes whose blocks are still in a request's table."""
        self._ended: list[int] = []
        self._news = False
        self._crowded = False
        """Whether too many requests waited when a prefix was to be begun: no sooner than after the next step again."""
        self._told_hits = 0
        self._next_usage_ns = 0

    @property
    def supported(self) -> bool:
        """Whether this engine keeps public prefixes."""
        return supports(self._scheduler)

    @property
    def has_work(self) -> bool:
        """Whether a prefix can be begun, or a request has to be answered."""
        return bool(self._ended) or (self._current is None and not self._crowded and self._next() is not None)

    def set(self, table: Sequence[PublicPrefix]) -> None:
        """Put another table in force. What failed or found no room is tried again."""
        self._table = {prefix.key: prefix for prefix in table}
        if self._current is not None and self._current.key not in self._table:
            self._scheduler.abort(SILENT_ID)
            self._pool.disown(self._current.key)
            self._current = None
        resident = self._cache.public.by_key
        self._states = {
            key: PublicState.RESIDENT if key in resident else self._first_state(prefix)
            for key, prefix in self._table.items()
        }
        self._news = True
        if self._next() is None:
            self._withdraw_stale()

    def make_room(self, quotas: Sequence[KvQuota]) -> None:
        """Withdraw what would not fit beside these quotas, before they are in force."""
        blocks = self._pool.num_blocks
        reserved = sum(blocks * quota.reserved // WHOLE_POOL for quota in quotas)
        for key in reversed(list(self._cache.public.by_key)):
            if reserved + self._pool.accounts.pinned <= blocks:
                return
            self._withdraw(key)
            if key in self._states:
                self._states[key] = PublicState.NO_ROOM

    def try_again(self) -> None:
        """Try prefixes that found no room, after other quotas are in force."""
        for key, state in self._states.items():
            if state is PublicState.NO_ROOM:
                self._states[key] = PublicState.PENDING

    def before_schedule(self, _now_ns: int) -> Sequence[int]:
        """Begin the next prefix, if it is time. Gives requests that have ended because they no longer fit."""
        ended, self._ended = self._ended, []
        while self._current is None and not self._crowded and (key := self._next()) is not None:
            self._begin(self._table[key])
        if self._leaving:
            self._close_accounts()
        return ended

    def after_commit(self, _result: StepResult) -> None:
        """Pin what has been computed, and compute anew what is in doubt."""
        self._crowded = False
        for resident in [one for one in self._cache.public.by_key.values() if one.doubted]:
            self._withdraw(resident.key)
            if resident.key in self._states:
                self._states[resident.key] = PublicState.PENDING
        current = self._current
        if current is None or self._scheduler.is_live(SILENT_ID):
            return
        self._current = None
        fits = self._fits(len(current.ids))
        pinned = fits and self._cache.public.pin(current)
        failed = PublicState.FAILED if fits else PublicState.NO_ROOM
        self._states[current.key] = PublicState.RESIDENT if pinned else failed
        self._news = True
        if pinned:
            self._ended += [one for one in self._scheduler.cut_limits() if one != SILENT_ID]
        else:
            self._pool.disown(current.key)
        if self._next() is None:
            self._withdraw_stale()

    def take_usage(self, now_ns: int) -> PublicUsage | None:
        """What became of each prefix, when that has changed; and hits, now and then."""
        resident = self._cache.public.by_key
        hits = sum(one.hits for one in resident.values())
        if not self._news and (hits == self._told_hits or now_ns < self._next_usage_ns):
            return None
        self._news, self._told_hits, self._next_usage_ns = False, hits, now_ns + USAGE_PERIOD_NS
        return PublicUsage(
            tuple(
                PublicUse(key, state, len(resident[key].blocks), resident[key].hits)
                if key in resident
                else PublicUse(key, state, 0, 0)
                for key, state in self._states.items()
            )
        )

    def _first_state(self, prefix: PublicPrefix) -> PublicState:
        limits = self._scheduler.limits
        if not self.supported:
            return PublicState.UNSUPPORTED
        if len(prefix.token_ids) < limits.block_size or max(prefix.token_ids) >= limits.vocab_size:
            return PublicState.INVALID
        return PublicState.PENDING

    def _next(self) -> bytes | None:
        """The first of the table that is yet to be computed."""
        return next((key for key, state in self._states.items() if state is PublicState.PENDING), None)

    def _begin(self, prefix: PublicPrefix) -> None:
        """Have a prefix computed, or note why not."""
        size = self._scheduler.limits.block_size
        count = len(prefix.token_ids) // size
        if not self._fits(count):
            self._withdraw_stale()
        if not self._fits(count):
            self._states[prefix.key] = PublicState.NO_ROOM
            self._news = True
            return
        # One token more, so that the last block is computed and not only sampled from.
        exact = self._exact()
        submit = Submit(
            SILENT_ID,
            prefix.key,
            prefix.token_ids[: count * size] + prefix.token_ids[:1],
            1,
            Sampling(temperature=0.0),
            ignore_eos=True,
            deterministic=exact,
            priority=Priority.HIGH,
        )
        try:
            self._scheduler.add(submit, now_ns=0)
        except RequestRejectedError as error:
            self._crowded = error.code is FailureCode.OVERLOADED
            if not self._crowded:
                self._states[prefix.key] = PublicState.NO_ROOM
                self._news = True
            return
        ids = tuple(self._cache.chain(submit))
        self._current = Resident(prefix.key, prefix.token_ids[: count * size], ids, exact)

    def _fits(self, count: int) -> bool:
        """Whether so many blocks more may be kept for good."""
        accounts = self._pool.accounts
        within = (accounts.pinned + count) * MOST <= self._pool.num_blocks
        return within and accounts.total_reserved + count <= self._pool.num_blocks

    def _withdraw_stale(self) -> None:
        for key in [key for key in self._cache.public.by_key if key not in self._table]:
            self._withdraw(key)

    def _withdraw(self, key: bytes) -> None:
        self._cache.public.withdraw(key)
        self._leaving.append(self._pool.accounts.of(key))
        self._close_accounts()
        self._news = True

    def _close_accounts(self) -> None:
        for account in self._leaving:
            self._pool.accounts.close_empty(account)
        self._leaving = [account for account in self._leaving if account.held]


def supports(scheduler: Scheduler) -> bool:
    """Whether an engine with such limits keeps public prefixes: it caches prefixes, in one table of whole contexts."""
    return scheduler.limits.prefix_caching and not scheduler.limits.groups
