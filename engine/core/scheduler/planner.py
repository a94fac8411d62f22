"""Plans a step: blocks for requests that decode, then prompts, chunk by chunk, with what is left of the token budget.

Decoding requests get blocks in order of age, and one only ever takes from what its account may have
(``Tenancy.victims``). So a request that is preempted is computed again later, and the oldest always goes on.

A request is admitted when a row is free, the blocks for all its known tokens are there, and the forecast says that
all running requests, with it, can grow to their ends (``forecast``); or when its tenancy lets it do without. When
nothing runs, the forecast is not asked: one request alone always fits.

Inside an account the request with the longest cached prefix goes first, of the oldest ``WINDOW`` ones; the oldest is
passed at most ``MAX_PASSED`` times. Block ids are keyed by namespace, so no other tenant's cache has a say in this.
"""

from __future__ import annotations

from engine.core.kv.block_pool import BlockPool
from engine.core.kv.prefix_cache import Hit, PrefixCache
from engine.core.request import Account, Request, Status, age
from engine.core.scheduler.limits import SCORED_ROWS, SchedulerLimits
from engine.core.scheduler.live import LiveRequests
from engine.core.scheduler.pace import Pace
from engine.core.scheduler.plan import Chunk, StepPlan
from engine.core.scheduler.running import admission_of
from engine.core.scheduler.tenancy import Change, Need, StepBudget, Tenancy
from isolation.ipc.engine import Started

WINDOW = 8
"""Oldest waiting requests of an account among which the longest cached prefix is looked for."""

MAX_PASSED = 8
"""Requests of the account that may be admitted before its oldest."""

SLACK = 32
"""One part in so many of the pool that the forecast leaves free, for what it does not see (rounding of blocks)."""


class Planner:
    """Plans steps, and tells which requests were scheduled for the first time."""

    def __init__(
        self, limits: SchedulerLimits, pool: BlockPool, cache: PrefixCache, live: LiveRequests, tenancy: Tenancy
    ) -> None:
        self._limits = limits
        self._pool = pool
        self._cache = cache
        self._live = live
        self._running = live.running
        self._tenancy = tenancy
        self._charge_chunk = tenancy.charge(Change.CHUNK)
        self.pace = Pace()
        self.starts: list[Started] = []
        """Start events since the last result."""

    def plan(self, now_ns: int) -> StepPlan:
        """Plan the next step."""
        plan = StepPlan()
        live, running, contents = self._live, self._running, self._pool.contents
        self.pace.begin(now_ns)
        preempted = live.num_preempted
        crowded = self._grow(plan)
        grown = len(plan.grown_rows)
        if live.num_waiting or running.num_prefilling:
            self._add_prompts(plan, crowded=crowded, now_ns=now_ns)
        if live.num_preempted > preempted:
            self._drop_lost(plan, grown)
        running.decoding.refresh()
        plan.decode_rows = running.decoding.rows
        for request in running.decoding.structured:
            assert request.mask is not None, "a structured request decodes without a mask"
            plan.masks[request.row] = request.mask
        if plan.grown_rows:
            plan.grown_stamps = running.stamps_of(plan.grown_rows, plan.grown_blocks)
        if contents.has_dirty:
            plan.zero_blocks = contents.drain_dirty()
            plan.zero_stamps = contents.new_stamps(plan.zero_blocks)
        self.pace.planned(plan.num_tokens, sum(chunk.length for chunk in plan.prefills))
        return plan

    def _grow(self, plan: StepPlan) -> bool:
        """Give a block to every decoding request that needs one, the oldest first. Says whether one had to be
        preempted because the pool, not only its account, was short of blocks."""
        running, pool = self._running, self._pool
        needy = running.decoding.needing_blocks()
        if not needy:
            return False
        windowed, missing = running.windowed, running.tables.missing
        several = windowed or running.decoding.ahead > 0 or bool(running.decoding.placed)
        if windowed:
            for request in needy:
                running.trim(request)
        crowded = (sum(map(missing, needy)) if several else len(needy)) > pool.num_available
        scarce = crowded or bool(pool.accounts.bounded)
        for request in sorted(needy, key=age) if scarce else list(needy):
            wanted = missing(request) if several and request.status is Status.DECODING else 1
            if not wanted and not windowed:
                continue
            while scarce and request.status is Status.DECODING and pool.room_for(request.kv.account, wanted) < wanted:
                crowded |= self._make_room(request, wanted)
            if request.status is Status.DECODING:
                if windowed:
                    plan.grow(request.row, running.extend(request))
                else:
                    plan.grown_rows.append(request.row)
                    plan.grown_indices.append(len(request.kv.blocks))
                    plan.grown_blocks.append(running.grow(request))
        running.decoding.placed.clear()
        return crowded

    def _drop_lost(self, plan: StepPlan, count: int) -> None:
        """Take the new blocks of rows that were vacated after they had grown out of the first ``count`` in the plan;
        those behind are of prompts in this step, whose rows are not taken."""
        rows = self._running.rows
        kept = [
            place
            for place, row in enumerate(plan.grown_rows)
            if place >= count or ((request := rows[row]) is not None and request.status is Status.DECODING)
        ]
        for grown in (plan.grown_rows, plan.grown_indices, plan.grown_blocks, plan.grown_tables):
            if grown:
                grown[:] = [grown[place] for place in kept]

    def _make_room(self, request: Request, missing: int) -> bool:
        """Preempt a request for a decoding one that lacks blocks. Says whether the pool is short of them, and not only
        the account."""
        kv = request.kv.account
        pool_short = kv.used + missing <= kv.cap
        need = Need(self._running.step, row=False, wanted=missing, new=missing, short=missing)
        for victim in self._tenancy.victims(request, need) or (request,):
            self._live.preempt(victim, request)
        return pool_short

    def _add_prompts(self, plan: StepPlan, *, crowded: bool, now_ns: int) -> None:
        """Hand out what the decoding requests leave of the budget."""
        num_decodes = len(self._running.decoding)
        tokens = self._limits.max_num_batched_tokens - num_decodes * self._limits.max_row_tokens
        most = self.pace.prompt_tokens(num_decodes, now_ns)
        tokens = tokens if most is None else min(tokens, most)
        step = StepBudget(tokens, SCORED_ROWS, now_ns, crowded, self._running.num_prefilling)
        for account in self._tenancy.next_accounts(step):
            if account.prefilling is not None or self._start_one(account, plan, step):
                self._add_chunk(account, plan, step)
            step.num_prefilling = self._running.num_prefilling

    def _start_one(self, account: Account, plan: StepPlan, step: StepBudget) -> bool:
        """Admit a request of the account, if one may be."""
        request = self._choose(account)
        if request is None:
            return False
        if not self._admit(request, step):
            step.refused = request
            return False
        plan.admissions.append(admission_of(request, self._pool))
        if step.light:
            self.pace.note_light(step.now_ns)
        if not request.started:
            request.started = True
            if request.kv.public is not None:
                request.kv.public.hits += 1
            if not request.spec.silent:
                queue_us = max(0, step.now_ns - request.spec.arrival_ns) // 1_000
                self.starts.append(Started(request.spec.request_id, request.num_prefilled, queue_us))
        return True

    def _choose(self, account: Account) -> Request | None:
        """Find the account's request to admit next; None when all of them wait for their masks."""
        waiting = account.waiting
        if self._live.num_lacking_masks:
            waiting = [request for request in waiting if not request.lacks_mask]
            if not waiting:
                return None
        if len(waiting) == 1 or account.passed >= MAX_PASSED or not self._limits.prefix_caching:
            return waiting[0]
        return self._cache.longest(waiting[:WINDOW])

    def _admit(self, request: Request, step: StepBudget) -> bool:
        """Give a request a row and all blocks that its known tokens need, if they can be had."""
        pool, tables, kv, number = self._pool, self._running.tables, request.kv.account, self._running.step
        if request.preempted_at == number:
            return False
        hit = self._cache.match(request)
        num_new = tables.full_blocks(request.num_tokens) - len(hit.blocks)
        rights = tables.rights(request, hit.num_tokens)
        idle = pool.num_idle(hit.blocks)
        wanted, new = num_new + idle + rights, num_new + rights
        short, row = pool.lacking(kv, wanted, new), not self._running.has_free_row
        at_hand = short <= 0 and not row
        secure = at_hand and not step.crowded and self._fits(request, hit, idle, rights)
        need = Need(number, row, wanted, new, short, secure)
        if not self._tenancy.may_admit(request, need):
            return False
        if not at_hand:
            victims = self._tenancy.victims(request, need)
            if victims is None:
                return False
            for victim in victims:
                self._live.preempt(victim, request)
            if pool.available_for(kv) < wanted:
                return False
        if request.account.waiting[0] is not request:
            request.account.passed += 1
        self._live.admit(request, hit, num_new, rights)
        return True

    def _fits(self, request: Request, hit: Hit, num_idle: int, rights: int) -> bool:
        """Whether all running requests and this one are expected to find memory to their ends.

        ``num_idle`` of its cached blocks of whole contexts are held by nothing yet; ``rights`` to blocks of windows.
        """
        running = self._running
        if not len(running):
            return True
        size, step = running.tables.unit, running.step
        num_blocks = self._pool.num_blocks
        common = max(0, num_blocks - self._pool.num_available - running.forecast.private(step) // size)
        protected = self._pool.accounts.protected - request.kv.account.protected
        room = (num_blocks - num_blocks // SLACK - common - num_idle - protected) * size
        return running.forecast.fits(request, len(hit.blocks), rights, step=step, room=room)

    def _add_chunk(self, account: Account, plan: StepPlan, step: StepBudget) -> None:
        """Put the next part of the account's prompt into the step."""
        request, running = account.prefilling, self._running
        assert request is not None
        step.served = True
        start, score_from = request.num_prefilled, request.num_scored
        left = wanted = request.num_tokens - start
        if request.scored_by(start + left) > step.scores:
            wanted = max(0, min(left, score_from - 1 + step.scores - start))
        length = min(wanted, step.tokens)
        if not length:
            return
        step.tokens -= length
        num_scored = request.scored_by(start + length)
        step.scores -= num_scored
        request.num_scored += num_scored
        request.planned_at = running.step
        self._charge_chunk(request, start + length)
        if running.windowed:
            plan.grow(request.row, running.tables.cover(request, start + length))
        last = length == left
        plan.prefills.append(Chunk(request.row, start, length, last, score_from if num_scored else 0, num_scored))
        if last:
            running.end_prefill(request)
            if request.mask is not None:
                plan.masks[request.row] = request.mask
