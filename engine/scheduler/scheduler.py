"""Chooses what the next step runs, and takes its tokens back.

Between two calls the scheduler is plain state: ``schedule`` turns it into a ``StepPlan``, ``commit`` takes the sampled
ids. No IO, no clock (times are arguments), no tensors. What a step costs here does not grow with the tokens known or
with the requests waiting, and with the requests running only by a few list operations in C (``decoding``, ``commit``).

One step, in this order:

1. *Decodes.* Every request with one token left to compute gets it (``max_num_seqs`` never exceeds the token budget).
   When a block is needed and none is available, a request is preempted (``sharing``). Its blocks go back, and it is
   computed again later.
2. *Prefills* fill what is left of the budget, in chunks, always for the account with the least service of the most
   urgent priority (``fairness``, ``admission``).

Progress. The oldest running request is never preempted and, since no request is admitted that is longer than the
whole pool, it always gets its next block; so the oldest always ends, and then the next is the oldest. A request
preempted in a step is not admitted again in that step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import partial

from engine.errors import RequestRejectedError
from engine.kv.block_pool import BlockPool
from engine.kv.layout import most_blocks
from engine.kv.prefix_cache import PrefixCache
from engine.kv.quota import KvAccount
from engine.request import Request
from engine.scheduler.admission import Admissions
from engine.scheduler.commit import Commits
from engine.scheduler.growth import Growth
from engine.scheduler.limits import SchedulerLimits, check_submit
from engine.scheduler.live import LiveRequests
from engine.scheduler.plan import NO_ROWS, RowMask, StepPlan, StepResult
from engine.scheduler.sharing import Sharing
from engine.scheduler.siblings import found_family
from isolation.ipc.kv_messages import MAX_KV_USES, KvQuota, KvUsage
from isolation.ipc.messages import FailureCode, Submit

CHECK_EVERY = 256
"""Steps between two comparisons of the services with the proved bound: its cost is then below a microsecond a step."""


class FairnessBrokenError(AssertionError):
    """The proved bound on the difference of services does not hold: a defect of this package."""


class Scheduler:
    """Continuous batching with chunked prefill, fair between namespaces."""

    def __init__(
        self, limits: SchedulerLimits, pool: BlockPool, cache: PrefixCache, *, raise_defects: bool = False
    ) -> None:
        """``raise_defects``: raise ``FairnessBrokenError`` instead of counting in ``num_defects`` (for tests)."""
        assert limits.max_num_seqs <= limits.max_num_batched_tokens, "decodes must fit a step"
        assert limits.prefix_caching == cache.caching, "cache and limits disagree"
        needed = most_blocks(limits.tables, limits.max_context, limits.max_num_batched_tokens)
        assert needed <= pool.num_blocks, "a request must fit the pool"
        self.limits = limits
        self.num_defects = 0
        """Times that the proved bound was found broken."""
        self._raise_defects = raise_defects
        self._pool = pool
        self._live = LiveRequests(limits, pool, cache)
        self._running = self._live.running
        self._sharing = Sharing(limits, pool, self._running)
        self._admissions = Admissions(limits, pool, cache, self._live, self._sharing)
        self._growth = Growth(pool, self._live, self._sharing)
        self._commits = Commits(limits, cache, self._live)
        self._next_order = 0

    @property
    def num_running(self) -> int:
        """Requests that hold a row."""
        return len(self._running)

    @property
    def running_ids(self) -> dict[int, int]:
        """Ids of the requests that hold a row, by row."""
        return {request.row: request.request_id for request in self._running.held}

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a row or for blocks."""
        return self._live.num_waiting

    @property
    def num_preempted(self) -> int:
        """Preemptions so far."""
        return self._live.num_preempted

    @property
    def has_work(self) -> bool:
        """Whether ``schedule`` would give a plan. Requests that are held give none before their masks have come."""
        return self._has_free_requests or self._pool.contents.has_dirty

    @property
    def _has_free_requests(self) -> bool:
        return len(self._live.by_id) > self._live.num_held

    @property
    def num_available_blocks(self) -> int:
        """Blocks that no request holds."""
        return self._pool.num_available

    def add(self, submit: Submit, *, now_ns: int) -> None:
        """Queue a request.

        Raises:
            RequestRejectedError: it is malformed, can never fit, or too many wait already.
        """
        limits = self.limits
        check_submit(submit, limits)
        ids = range(submit.request, submit.request + submit.choices)
        used = [request_id for request_id in ids if request_id in self._live.by_id]
        if used:
            for request_id in used:
                self.abort(request_id)
            # An id names one request; whoever reuses it loses both, so no token can go to the wrong one.
            raise RequestRejectedError(FailureCode.INVALID, "the request id is in use")
        if self._pool.accounts.bounds and self._fitting_new(submit) <= len(submit.token_ids):
            raise RequestRejectedError(FailureCode.TOO_LONG, "the prompt does not fit the account's blocks")
        if self._live.num_waiting + submit.choices > limits.max_waiting:
            raise RequestRejectedError(FailureCode.OVERLOADED, "too many requests wait")
        make = partial(self._request, now_ns=now_ns)
        if submit.choices == 1:
            self._live.enter(make(submit))
        else:
            self._live.enter(found_family(submit, make, prefix_caching=limits.prefix_caching))

    def set_quotas(self, quotas: Sequence[KvQuota]) -> list[int]:
        """Put another table of quotas in force. Requests end earlier where they no longer fit; gives the ids of those
        that end at once, because their tokens do not."""
        self._pool.set_quotas(list(quotas))
        for account in self._pool.accounts.by_key.values():
            self._live.unpark(account)
        return self.cut_limits()

    def cut_limits(self) -> list[int]:
        """Hold every live request to what its account may need now; gives the ids of those that end at once."""
        ended = []
        for request in list(self._live.by_id.values()):
            limit = self._fitting(request.kv, request.limit)
            if limit > request.num_tokens:
                self._live.shorten(request, limit)
            elif limit < request.limit:
                ended.append(request.request_id)
                self._live.end(request)
        return ended

    def _fitting_new(self, submit: Submit) -> int:
        """Tokens at which a new request ends at the latest."""
        limit = min(len(submit.token_ids) + submit.max_tokens, self.limits.max_context)
        accounts = self._pool.accounts
        if not accounts.bounds:
            return limit
        kv = accounts.by_key.get(submit.group or submit.namespace) or KvAccount(b"", self._pool.num_blocks)
        return self._fitting(kv, limit)

    def _fitting(self, kv: KvAccount, limit: int) -> int:
        """The longest sequence, up to ``limit`` tokens, whose blocks an account can count on."""
        blocks = self._pool.accounts.may_need(kv)
        if blocks >= self._pool.num_blocks:
            return limit
        tables, chunk = self.limits.tables, self.limits.max_num_batched_tokens
        if most_blocks(tables, limit, chunk) <= blocks:
            return limit
        lengths = range(limit + 1)
        return bisect_right(lengths, blocks, key=lambda length: most_blocks(tables, length, chunk)) - 1

    def kv_usage(self) -> KvUsage:
        """What the accounts have: those with a quota, and the largest others."""
        accounts = self._pool.accounts
        others = [account for account in accounts.by_key.values() if account.quota is None]
        others.sort(key=lambda account: account.resident, reverse=True)
        shown = (accounts.bounded + others)[:MAX_KV_USES]
        return KvUsage(tuple(account.use() for account in shown))

    def set_mask(self, request_id: int, position: int, mask: RowMask) -> None:
        """The mask for the request's output token at this position. One that is not waited for is passed over: the
        request has ended, or has a mask already."""
        request = self._live.by_id.get(request_id)
        if request is not None and request.held and request.num_output == position:
            self._live.let_go(request, mask)

    def is_live(self, request_id: int) -> bool:
        """Whether a request waits or runs."""
        return request_id in self._live.by_id

    def abort(self, request_id: int) -> bool:
        """End a request now, between two steps. Says whether it was live."""
        request = self._live.by_id.get(request_id)
        if request is None:
            return False
        self._live.end(request)
        return True

    def expire(self, *, now_ns: int) -> list[int]:
        """End every request whose deadline is at or before ``now_ns``, waiting or running; gives their ids."""
        late = self._live.deadlines.expired(now_ns)
        for request in late:
            self._live.end(request)
        return [request.request_id for request in late]

    def schedule(self, *, now_ns: int) -> StepPlan | None:
        """Plan the next step, or None when there is nothing to do."""
        if not self.has_work:
            return None
        plan = StepPlan()
        live, pace = self._live, self._admissions.pace
        pace.begin(now_ns)
        preempted = live.num_preempted
        crowded = self._growth.grow(plan)
        grown = len(plan.grown_rows)
        if live.num_waiting or self._running.num_prefilling:
            self._admissions.fill(plan, crowded=crowded, now_ns=now_ns)
        if live.num_preempted > preempted:
            self._growth.drop_lost(plan, grown)
        self._running.decoding.refresh()
        plan.decode_rows = self._running.decoding.rows
        self._put_masks(plan)
        if plan.grown_rows:
            plan.grown_stamps = self._running.stamps_of(plan.grown_rows, plan.grown_blocks)
        if self._pool.contents.has_dirty:
            plan.zero_blocks = self._pool.contents.drain_dirty()
            plan.zero_stamps = self._pool.contents.new_stamps(plan.zero_blocks)
        pace.planned(plan.num_tokens)
        return plan

    def commit(self, plan: StepPlan, token_ids: list[int], foreign: frozenset[int] = NO_ROWS) -> StepResult:
        """Take the sampled ids of a plan back: one for each of its ``sample_rows``, ``FAILED`` for a broken row.
        ``foreign``: rows of which nothing was computed, because a block in their tables is not theirs."""
        result = StepResult(starts=self._admissions.take_starts())
        self._commits.take(plan, token_ids, result, foreign)
        if self._running.decoding.step % CHECK_EVERY == 0:
            self.check_fairness()
        if not self._has_free_requests:
            self._admissions.pace.pause()
        return result

    def take_vacated(self) -> list[int]:
        """The rows that are free since the last call and have nobody yet: the runner shall forget theirs."""
        vacated = self._running.vacated
        rows = list(vacated)
        vacated.clear()
        return rows

    def services(self) -> dict[bytes, float]:
        """Service of each active account, by namespace."""
        return {account.key: account.service for account in self._live.accounts}

    def check_fairness(self) -> None:
        """Compare all services with the proved bound.

        Raises:
            FairnessBrokenError: it does not hold, and this scheduler raises defects.
        """
        broken = self._live.accounts.check()
        self.num_defects += broken
        if broken and self._raise_defects:
            raise FairnessBrokenError("services of backlogged accounts are further apart than proved")

    def check_integrity(self) -> None:
        """Assert that queues, rows, tables and pool agree, between two steps; linear in the pool."""
        self._live.check_integrity()

    def _request(self, submit: Submit, *, now_ns: int) -> Request:
        limits = self.limits
        eos = frozenset[int]() if submit.ignore_eos else limits.eos_ids
        request = Request(
            submit,
            order=self._next_order,
            limit=self._fitting_new(submit),
            stop_ids=eos.union(submit.stop_ids) if submit.stop_ids else eos,
            arrival_ns=now_ns,
        )
        self._next_order += 1
        return request

    def _put_masks(self, plan: StepPlan) -> None:
        """Put the masks of structured requests that sample into the plan."""
        for request in self._running.decoding.structured:
            assert request.mask is not None, "a structured request decodes without a mask"
            plan.masks[request.row] = request.mask
        for chunk in plan.prefills:
            mask = self._running.at(chunk.row).mask if chunk.last else None
            if mask is not None:
                plan.masks[chunk.row] = mask
