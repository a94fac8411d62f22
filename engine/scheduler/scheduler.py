"""Chooses what the next step runs, and takes its tokens back.

Between two calls the scheduler is plain state: ``schedule`` turns it into a ``StepPlan``, ``commit`` takes the sampled
ids. No IO, no clock (times are arguments), no tensors.

One step, in this order:

1. *Decodes.* Every request with one token left to compute gets it (``max_num_seqs`` never exceeds the token budget).
   When a block is needed and none is available, a request is preempted: the youngest of the namespace with the most
   service. Its blocks go back, and it is computed again later.
2. *Prefills* fill what is left of the budget, in chunks, always for the account with the least service. A request is
   admitted when a row is free and the blocks for all its known tokens are there. When the request of the account
   whose turn it is does not fit, others may pass it, but only until they are ahead of it by what the request itself
   costs; then memory is left to drain. So a large request cannot starve, nor hold everybody up at once.

Progress. The oldest running request is never preempted and, since no request is admitted that is longer than the
whole pool, it always gets its next block; so the oldest always ends, and then the next is the oldest. A request
preempted in a step is not admitted again in that step.

Seats. When all rows are taken, an account with fewer rows than its weighted share may take one back from an account
with more than its own share and more service. The test is strict on both sides, so two accounts cannot pass a row to
and fro.
"""

from __future__ import annotations

from math import inf

from engine.errors import RequestRejectedError
from engine.kv.block_pool import BlockPool
from engine.kv.prefix_cache import PrefixCache
from engine.request import Request, Status
from engine.scheduler.budget import StepBudget
from engine.scheduler.fairness import Account, Accounts
from engine.scheduler.limits import SchedulerLimits, check_submit
from engine.scheduler.plan import Chunk, StepPlan, StepResult
from engine.scheduler.running import Running, admission_of, age, owner_of
from isolation.ipc.messages import FailureCode, Finish, RequestFailure, Started, Submit

RESERVE_FRACTION = 16
"""One block a decoding request is kept free at admission, but at most this fraction of the pool: so that a request
just admitted is not preempted a few tokens later."""

FAILED = -1
"""In place of a sampled id: the row's logits were not finite."""


class Scheduler:
    """Continuous batching with chunked prefill, fair between namespaces."""

    def __init__(self, limits: SchedulerLimits, pool: BlockPool, cache: PrefixCache) -> None:
        assert limits.max_num_seqs <= limits.max_num_batched_tokens, "decodes must fit a step"
        assert limits.max_context <= pool.num_blocks * limits.block_size, "a request must fit the pool"
        self.limits = limits
        self._pool = pool
        self._cache = cache
        self._accounts = Accounts()
        self._running = Running(limits, pool)
        self._live: dict[int, Request] = {}
        self._num_waiting = 0
        self._next_order = 0
        self._starts: list[Started] = []

    @property
    def num_running(self) -> int:
        """Requests that hold a row."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a row or for blocks."""
        return self._num_waiting

    @property
    def has_work(self) -> bool:
        """Whether ``schedule`` would give a plan."""
        return bool(self._live) or self._pool.has_dirty

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
        if submit.request in self._live:
            # An id names one request; whoever reuses it loses both, so no token can go to the wrong one.
            self.abort(submit.request)
            raise RequestRejectedError(FailureCode.INVALID, "the request id is in use")
        if self._num_waiting >= limits.max_waiting:
            raise RequestRejectedError(FailureCode.OVERLOADED, "too many requests wait")
        eos = frozenset() if submit.ignore_eos else limits.eos_ids
        request = Request(
            submit,
            order=self._next_order,
            limit=min(len(submit.token_ids) + submit.max_tokens, limits.max_context),
            stop_ids=eos.union(submit.stop_ids),
            arrival_ns=now_ns,
        )
        self._next_order += 1
        self._live[request.request_id] = request
        self._num_waiting += 1
        self._accounts.enter(request, submit.weight)

    def abort(self, request_id: int) -> bool:
        """End a request now, between two steps. Says whether it was live."""
        request = self._live.get(request_id)
        if request is None:
            return False
        if request.status is Status.WAITING:
            request.account.waiting.remove(request)
            self._num_waiting -= 1
            request.status = Status.FINISHED
        else:
            self._running.vacate(request, Status.FINISHED)
            self._running.sweep()
        self._leave(request)
        return True

    def schedule(self, *, now_ns: int) -> StepPlan | None:
        """Plan the next step, or None when there is nothing to do."""
        if not self.has_work:
            return None
        plan = StepPlan()
        running = self._running
        if self._num_waiting and not running.has_free_row:
            victim = running.choose_for_seat(self._accounts)
            if victim is not None:
                self._preempt(victim)
        crowded = self._grow_decodes(plan)
        plan.decode_rows = [request.row for request in running.decoding]
        if self._num_waiting or running.num_prefilling:
            budget = StepBudget(self.limits.max_num_batched_tokens)
            budget.spend(len(plan.decode_rows))
            self._fill_with_prefills(plan, budget, admit=not crowded, now_ns=now_ns)
        plan.zero_blocks = self._pool.drain_dirty()
        return plan

    def commit(self, plan: StepPlan, token_ids: list[int]) -> StepResult:
        """Take the sampled ids of a plan back: one for each of its ``sample_rows``, ``FAILED`` for a broken row."""
        result = StepResult(starts=self._starts)
        self._starts = []
        ended = self._commit_decodes(plan.decode_rows, token_ids, result)
        place = len(plan.decode_rows)
        for chunk in plan.prefills:
            request = self._running.at(chunk.row)
            request.num_computed += chunk.length
            self._register(request)
            if chunk.last:
                self._running.decoding.append(request)
                ended |= self._take_token(request, token_ids[place], place, result)
                place += 1
        assert place == len(token_ids), "one token for each row that samples"
        if ended:
            self._running.sweep()
        return result

    def check_integrity(self) -> None:
        """Assert that queues, rows, tables and pool agree, between two steps; linear in the pool."""
        self._running.check_integrity()
        waiting = [request for account in self._accounts for request in account.waiting]
        assert len(waiting) == self._num_waiting
        assert len(waiting) + len(self._running) == len(self._live), "a live request is nowhere"
        for account in self._accounts:
            orders = [request.order for request in account.waiting]
            assert orders == sorted(orders), "a queue out of order"
            assert account.num_running + len(account.waiting) == account.num_live

    def _grow_decodes(self, plan: StepPlan) -> bool:
        """Give a block to every decoding request that needs one, the oldest first. Says whether one had to be
        preempted."""
        running = self._running
        needy = [request for request in running.decoding if request.num_computed == request.capacity]
        crowded = len(needy) > self._pool.num_available
        if crowded:
            needy.sort(key=age)
        for request in needy:
            while request.status is Status.RUNNING and not self._pool.num_available:
                self._preempt(running.choose_for_blocks())
            if request.status is Status.RUNNING:
                plan.grown_rows.append(request.row)
                plan.grown_indices.append(len(request.blocks))
                plan.grown_blocks.append(running.grow(request))
        return crowded

    def _preempt(self, request: Request) -> None:
        """Send a running request back to its queue; its tokens stay, its blocks are computed again later."""
        self._running.vacate(request, Status.WAITING)
        self._running.sweep()
        self._num_waiting += 1
        request.account.push(request)

    def _fill_with_prefills(self, plan: StepPlan, budget: StepBudget, *, admit: bool, now_ns: int) -> None:
        """Hand out the rest of the budget, chunk by chunk, to the account with the least service."""
        stuck: list[Account] = []
        patience = inf
        while budget.tokens:
            account = self._accounts.least_served(waiting=admit, without=stuck)
            if account is None:
                return
            if account.prefilling is None:
                if account.service > patience or not self._running.has_free_row:
                    admit = False
                    continue
                if not self._admit(account, plan, now_ns):
                    stuck.append(account)
                    patience = min(patience, account.service + account.cost_of(account.waiting[0]))
                    continue
            request = account.prefilling
            assert request is not None
            left = request.num_uncomputed
            length = budget.chunk(left)
            plan.prefills.append(Chunk(request.row, request.num_computed, length, length == left))
            if length == left:
                self._running.end_prefill(request)

    def _admit(self, account: Account, plan: StepPlan, now_ns: int) -> bool:
        """Give the account's oldest waiting request a row and all blocks that its known tokens need, if they are
        there."""
        request = account.waiting[0]
        shared = self._cache.match(request) if self._may_share(request) else []
        wanted = -(-request.num_tokens // self.limits.block_size) - len(shared)
        revived = sum(1 for block in shared if self._pool.refs(block) == 0)
        reserve = min(len(self._running.decoding), self._pool.num_blocks // RESERVE_FRACTION)
        if wanted + revived + reserve > self._pool.num_available:
            return False
        for block in shared:
            self._pool.hold(block)
        account.waiting.popleft()
        self._num_waiting -= 1
        self._running.occupy(request, shared + self._pool.take(wanted, owner_of(request)), len(shared))
        plan.admissions.append(admission_of(request))
        if not request.started:
            self._start(request, now_ns)
        return True

    def _start(self, request: Request, now_ns: int) -> None:
        request.started = True
        request.account.charge_input(request.num_uncomputed)
        queue_us = max(0, now_ns - request.arrival_ns) // 1_000
        self._starts.append(Started(request.request_id, request.num_computed, queue_us))

    def _commit_decodes(self, rows: list[int], token_ids: list[int], result: StepResult) -> bool:
        """Advance every decoding request by its token. Says whether some request ended."""
        held = self._running.rows
        ended = False
        for place, row in enumerate(rows):
            request = held[row]
            assert request is not None, "a planned row is empty"
            request.num_computed += 1
            if request.num_computed == request.capacity:
                self._register(request)
            if self._take_token(request, token_ids[place], place, result):
                ended = True
        return ended

    def _take_token(self, request: Request, token_id: int, place: int, result: StepResult) -> bool:
        """Append one sampled id and report it. Says whether the request ended."""
        if token_id == FAILED:
            result.failures.append(RequestFailure(request.request_id, FailureCode.INTERNAL))
            self._running.vacate(request, Status.FINISHED, poisoned=True)
            self._leave(request)
            return True
        tokens = request.token_ids
        tokens.append(token_id)
        account = request.account
        account.service += account.charge_output
        result.requests.append(request.request_id)
        result.token_ids.append(token_id)
        result.indices.append(place)
        if token_id in request.stop_ids:
            result.finishes.append(Finish.STOP)
        elif len(tokens) >= request.limit:
            result.finishes.append(Finish.LENGTH)
        else:
            result.finishes.append(Finish.NONE)
            return False
        self._running.vacate(request, Status.FINISHED)
        self._leave(request)
        return True

    def _register(self, request: Request) -> None:
        if self._may_share(request):
            self._cache.register(request)

    def _may_share(self, request: Request) -> bool:
        return request.retain and self.limits.prefix_caching

    def _leave(self, request: Request) -> None:
        del self._live[request.request_id]
        self._accounts.leave(request)
