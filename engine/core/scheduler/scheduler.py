"""Chooses what the next step runs, and takes its tokens back.

Between two calls the scheduler is plain state: ``schedule`` turns it into a ``StepPlan``, ``commit`` takes the sampled
ids. No IO, no clock (times are arguments), no tensors. What a step costs here does not grow with the tokens known or
with the requests waiting, and with the requests running only by a few list operations in C (``decoding``, ``commit``).

One step, in this order:

1. *Decodes.* Every request with one token left to compute gets it (``max_num_seqs`` never exceeds the token budget).
   When a block is needed and none is available, a request is preempted (``Tenancy.victims``). Its blocks go back, and
   it is computed again later.
2. *Prefills* fill what is left of the budget, in chunks, for one account after the other in the order of its tenancy
   (``planner``, ``Tenancy.next_accounts``).

Progress. The oldest running request is never preempted and, since no request is admitted that is longer than the
whole pool, it always gets its next block; so the oldest always ends, and then the next is the oldest. A request
preempted in a step is not admitted again in that step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import partial

from engine.core.kv.block_pool import BlockPool
from engine.core.kv.layout import most_blocks
from engine.core.kv.prefix_cache import PrefixCache
from engine.core.kv.quota import KvAccount
from engine.core.request import Request
from engine.core.scheduler.commit import Commits
from engine.core.scheduler.limits import SchedulerLimits, check_submit
from engine.core.scheduler.live import LiveRequests
from engine.core.scheduler.plan import NO_ROWS, RowMask, StepPlan, StepResult
from engine.core.scheduler.planner import Planner
from engine.core.scheduler.siblings import make_siblings
from engine.core.scheduler.tenancy import Change, Tenancy
from engine.core.specification import kv_key_of
from engine.errors import RequestRejectedError
from isolation.ipc.engine import Submit
from isolation.ipc.kv import MAX_KV_USES, KvQuota, KvUsage
from isolation.ipc.messages import FailureCode

CHECK_EVERY = 256
"""Steps between two comparisons of the services with the proved bound: its cost is then below a microsecond a step."""


class Scheduler:
    """Continuous batching with chunked prefill, fair between namespaces."""

    def __init__(self, limits: SchedulerLimits, pool: BlockPool, cache: PrefixCache, tenancy: Tenancy) -> None:
        most = limits.max_num_seqs * limits.max_row_tokens
        assert most <= limits.max_num_batched_tokens, "decodes must fit a step"
        assert 1 <= limits.max_row_tokens <= limits.block_size, "a step takes at most one block a row"
        assert limits.prefix_caching == cache.caching, "cache and limits disagree"
        needed = most_blocks(limits.tables, limits.max_context, limits.max_num_batched_tokens)
        assert needed <= pool.num_blocks, "a request must fit the pool"
        self.limits = limits
        self._tenancy = tenancy
        self._pool = pool
        self._live = LiveRequests(limits, pool, cache, tenancy)
        self._running = self._live.running
        self._planner = Planner(limits, pool, cache, self._live, tenancy)
        self._commits = Commits(limits, cache, self._live, tenancy)
        self._next_order = 0

    @property
    def num_running(self) -> int:
        """Requests that hold a row."""
        return len(self._running)

    @property
    def running_ids(self) -> dict[int, int]:
        """Ids of the requests that hold a row, by row."""
        return {request.row: request.spec.request_id for request in self._running.requests}

    @property
    def num_defects(self) -> int:
        """Times that the tenancy broke its own promise."""
        return self._tenancy.num_defects

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
        """Whether ``schedule`` would give a plan. Requests that lack their masks give none."""
        return self._has_free_requests or self._pool.contents.has_dirty

    @property
    def _has_free_requests(self) -> bool:
        return len(self._live.by_id) > self._live.num_lacking_masks

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
            # An id names one request; one that is used again ends both, so no token can go to the wrong one.
            raise RequestRejectedError(FailureCode.INVALID, "the request id is in use")
        if self._pool.accounts.bounds and self._fitting_new(submit) <= len(submit.token_ids):
            raise RequestRejectedError(FailureCode.TOO_LONG, "the prompt does not fit the account's blocks")
        if self._live.num_waiting + submit.choices > limits.max_waiting:
            raise RequestRejectedError(FailureCode.OVERLOADED, "too many requests wait")
        make = partial(self._request, now_ns=now_ns)
        if submit.choices == 1:
            self._live.enter(make(submit))
        else:
            self._live.enter_siblings(make_siblings(submit, make, prefix_caching=limits.prefix_caching))

    def set_quotas(self, quotas: Sequence[KvQuota]) -> list[int]:
        """Put another table of quotas in force. Requests end earlier where they no longer fit; gives the ids of those
        that end at once, because their tokens do not."""
        self._pool.set_quotas(list(quotas))
        self._tenancy.charge(Change.QUOTAS)()
        return self.cut_limits()

    def cut_limits(self) -> list[int]:
        """Hold every live request to what its account may need now; gives the ids of those that end at once."""
        ended = []
        for request in list(self._live.by_id.values()):
            limit = self._fitting(request.kv.account, request.limit)
            if limit > request.num_tokens:
                self._live.shorten(request, limit)
            elif limit < request.limit:
                ended.append(request.spec.request_id)
                self._live.end(request)
        return ended

    def _fitting_new(self, submit: Submit) -> int:
        """Tokens at which a new request ends at the latest."""
        limit = min(len(submit.token_ids) + submit.max_tokens, self.limits.max_context)
        accounts = self._pool.accounts
        if not accounts.bounds:
            return limit
        kv = accounts.by_key.get(kv_key_of(submit)) or KvAccount(b"", self._pool.num_blocks)
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
        if request is not None and request.lacks_mask and request.num_output == position:
            self._live.resume(request, mask)

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
        return [request.spec.request_id for request in late]

    @property
    def next_deadline_ns(self) -> int:
        """The next deadline of a live request; ``NEVER_NS`` when none has one."""
        return self._live.deadlines.next_ns

    def schedule(self, *, now_ns: int) -> StepPlan | None:
        """Plan the next step, or None when there is nothing to do."""
        if not self.has_work:
            return None
        return self._planner.plan(now_ns)

    def commit(
        self, plan: StepPlan, token_ids: list[int], foreign: frozenset[int] = NO_ROWS, counts: Sequence[int] = ()
    ) -> StepResult:
        """Take the tokens of a step.

        Args:
            plan: what ``schedule`` gave.
            token_ids: ids for its ``sample_rows``, row after row; ``FAILED`` for a broken row.
            foreign: rows of which nothing was computed, because a block in their tables is not theirs.
            counts: number of ids of each row, at most 1 where a prompt ends; empty: one each.
        """
        result = StepResult(starts=self._planner.starts)
        self._planner.starts = []
        self._commits.take(plan, token_ids, result, foreign, counts)
        if self._running.decoding.step % CHECK_EVERY == 0:
            self._tenancy.check()
        if not self._has_free_requests:
            self._planner.pace.pause()
        return result

    def take_vacated(self) -> list[int]:
        """Rows that became free since the last call and are free still: the runner must forget what it keeps of
        them."""
        vacated = self._running.vacated
        rows = list(vacated)
        vacated.clear()
        return rows

    def services(self) -> dict[bytes, float]:
        """Service of each active account, by namespace."""
        return {account.key: account.service for account in self._live.accounts()}

    def check_integrity(self) -> None:
        """Assert that queues, rows, tables and pool agree, between two steps; linear in the pool."""
        self._live.check_integrity()
        self._tenancy.check_integrity()

    def _request(self, submit: Submit, *, now_ns: int) -> Request:
        limits = self.limits
        eos = frozenset[int]() if submit.ignore_eos else limits.eos_ids
        request = Request.of(
            submit,
            order=self._next_order,
            limit=self._fitting_new(submit),
            stop_ids=eos.union(submit.stop_ids) if submit.stop_ids else eos,
            arrival_ns=now_ns,
            adapter=limits.adapters.get(submit.adapter, 0),
        )
        self._next_order += 1
        return request
