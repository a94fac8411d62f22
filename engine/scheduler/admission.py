"""Who is admitted, and how a step's tokens are handed out to prompts.

The rest of the token budget goes, chunk by chunk, to the account with the least service of the most urgent priority.
A request is admitted when a row is free, the blocks for all its known tokens are there, and the forecast says that
all running requests, with it, can grow to their ends (``forecast``). Where one of these fails:

* An account below its share of rows and blocks takes what it lacks from those above theirs (``sharing``), and needs
  no forecast then: should memory run out, it is they who give way. So nobody waits for a neighbour's requests to end.
* Otherwise others may pass it, a few in one step, and only until they are ahead of it by what the request itself
  costs; then memory is left to drain. So a large request cannot starve, nor hold everybody up at once. Lower
  priorities do not pass.
* When nothing runs, the forecast is not asked: one request alone always fits.
* At its own cap of blocks (``engine.kv.quota``) an account's queue is *parked*: it holds nobody up, and is owed
  nothing, until a block of its own comes back.
* Within its reservation an account needs neither forecast nor patience. What of a step's tokens the turns above leave
  goes to such requests (``_fill_claims``): memory that is reserved does not wait for memory that is not.

Inside an account the request with the longest cached prefix goes first, of the oldest ``WINDOW`` ones; the oldest is
passed at most ``MAX_PASSED`` times. Block ids are keyed by namespace, so no other tenant's cache has a say in this.
"""

from __future__ import annotations

from math import inf

from engine.kv.block_pool import BlockPool
from engine.kv.prefix_cache import Hit, PrefixCache
from engine.request import Request
from engine.scheduler.account import Account
from engine.scheduler.budget import StepBudget
from engine.scheduler.fairness import Line, Turns, turn_of
from engine.scheduler.limits import SCORED_ROWS, SchedulerLimits
from engine.scheduler.live import LiveRequests
from engine.scheduler.pace import Pace
from engine.scheduler.plan import Chunk, StepPlan
from engine.scheduler.running import admission_of
from engine.scheduler.sharing import Sharing
from isolation.ipc.messages import Started

WINDOW = 8
"""Oldest waiting requests of an account among which the longest cached prefix is looked for."""

MAX_PASSED = 8
"""Requests of the account that may be admitted before its oldest."""

MAX_STUCK = 4
"""Accounts whose request did not fit in this step before no more are tried: bounds the work of a step."""

LIGHT_PART = 8
"""A tenant is light while somebody who runs has so many times its live requests. Among equals nobody is."""

SLACK = 32
"""One part in so many of the pool that the forecast leaves free, for what it does not see (rounding of blocks)."""


class Admissions:
    """Fills steps with prompts, and tells which requests were scheduled for the first time."""

    def __init__(
        self, limits: SchedulerLimits, pool: BlockPool, cache: PrefixCache, live: LiveRequests, sharing: Sharing
    ) -> None:
        self._limits = limits
        self._pool = pool
        self._cache = cache
        self._live = live
        self._running = live.running
        self._sharing = sharing
        self._tables = live.running.tables
        self._windowed = live.running.windowed
        self.pace = Pace()
        self._heaviest = 0
        """Most live requests of an account with running ones, in this step."""
        self._light_only = False
        """Whether this step completes a light tenant's prompt: then no other's is put beside it."""
        self._starts: list[Started] = []

    def take_starts(self) -> list[Started]:
        """Start events since the last call."""
        starts, self._starts = self._starts, []
        return starts

    def fill(self, plan: StepPlan, *, crowded: bool, now_ns: int) -> None:
        """Hand out what the decoding requests leave of the budget. ``crowded``: memory has just run out, so only
        accounts below their share may have any."""
        num_decodes = len(self._running.decoding)
        self._light_only = False
        self._heaviest = max(
            (account.num_live for line in self._live.accounts.lines for account in line.running), default=0
        )
        budget = StepBudget(self._limits.max_num_batched_tokens, SCORED_ROWS)
        budget.spend(num_decodes)
        most = self.pace.prompt_tokens(num_decodes, now_ns)
        if most is not None:
            budget.cut(most)
        admit = bool(self._live.num_waiting)
        for line in self._live.accounts.lines:
            if not budget.tokens:
                return
            if line.active:
                admit = self._fill_line(line, plan, budget, admit=admit, crowded=crowded, now_ns=now_ns) and admit
        if budget.tokens and not self._light_only and self._live.num_waiting and self._pool.accounts.total_reserved:
            self._fill_claims(plan, budget, now_ns=now_ns)

    def _fill_line(
        self, line: Line, plan: StepPlan, budget: StepBudget, *, admit: bool, crowded: bool, now_ns: int
    ) -> bool:
        """Serve one priority. Says whether everybody who had a turn was admitted."""
        if not self._running.has_free_row and not self._sharing.has_rich(line):
            admit = False
        if not admit and not self._running.num_prefilling:
            return False
        turns = Turns(line, admit=admit)
        patience, stuck = inf, 0
        while budget.tokens and (account := turns.next(admit=admit)) is not None:
            if self._light_only and not self._is_light(account):
                # Left out of this step, but nobody served more than it may be admitted meanwhile.
                patience = min(patience, account.service)
                continue
            if account.prefilling is None:
                if not admit or account.service > patience:
                    admit = False
                    continue
                request = self._choose(account)
                if request is None:
                    continue
                if not self._admit(request, crowded=crowded):
                    if account.parked:
                        continue
                    cost = account.cost_of(request)
                    line.allowance = max(line.allowance, cost)
                    patience = min(patience, account.service + cost)
                    stuck += 1
                    admit = stuck < MAX_STUCK
                    continue
                self._note(request, plan, now_ns)
                if self._is_light(account):
                    self.pace.note_light(now_ns)
            self._advance(account, plan, budget)
            if account.prefilling is None and account.waiting:
                turns.again(account)
        turns.close()
        return not stuck

    def _fill_claims(self, plan: StepPlan, budget: StepBudget, *, now_ns: int) -> None:
        """Admit what stays within its account's reservation and had no turn, the least served first. By how much such
        an account is ahead of the backlog is passed, as the cost of a request that did not fit is: it is part of the
        bound in ``fairness``."""
        for line in self._live.accounts.lines:
            claiming = [
                account
                for account in line.active.values()
                if account.waiting and account.prefilling is None and account.waiting[0].kv.reserved
            ]
            for account in sorted(claiming, key=turn_of):
                request = self._choose(account) if budget.tokens else None
                if request is None or not self._admit(request, crowded=True, claim_only=True):
                    continue
                line.allowance = max(line.allowance, account.service - line.least())
                self._note(request, plan, now_ns)
                self._advance(account, plan, budget)

    def _advance(self, account: Account, plan: StepPlan, budget: StepBudget) -> None:
        """Put the next part of the account's prompt into the step."""
        request = account.prefilling
        assert request is not None
        left = request.num_tokens - request.num_prefilled
        start, score_from = request.num_prefilled, request.num_scored
        wanted = left
        if request.scored_by(start + left) > budget.scores:
            wanted = max(0, min(left, score_from - 1 + budget.scores - start))
        length = budget.chunk(wanted)
        if not length:
            return
        num_scored = request.scored_by(start + length)
        budget.scores -= num_scored
        request.num_scored += num_scored
        request.planned_at = self._running.decoding.step
        account.charge_chunk(request, start + length)
        if self._windowed:
            plan.grow(request.row, self._running.cover(request, start + length))
        score_from = score_from if num_scored else 0
        plan.prefills.append(Chunk(request.row, start, length, length == left, score_from, num_scored))
        if length == left:
            self._running.end_prefill(request)
            self._light_only |= self._is_light(account)

    def _is_light(self, account: Account) -> bool:
        """Whether the account has few requests, and some other has many."""
        return account.num_live * LIGHT_PART <= self._heaviest

    def _choose(self, account: Account) -> Request | None:
        """The account's request to admit next; None when all of them wait for their masks."""
        waiting = account.waiting
        if self._live.num_held:
            waiting = [request for request in waiting if not request.held]
            if not waiting:
                return None
        if len(waiting) == 1 or account.passed >= MAX_PASSED or not self._limits.prefix_caching:
            return waiting[0]
        return self._cache.longest(waiting[:WINDOW])

    def _admit(self, request: Request, *, crowded: bool, claim_only: bool = False) -> bool:
        """Give a request a row and all blocks that its known tokens need, if they can be had; with ``claim_only`` only
        within its account's reservation. At its account's cap it is parked instead."""
        step = self._running.decoding.step
        if request.preempted_at == step:
            return False
        account = request.account
        hit = self._cache.match(request)
        tables = self._tables
        num_new = tables.full_blocks(request.num_tokens) - len(hit.blocks)
        rights = tables.rights(request, hit.num_tokens) if self._windowed else 0
        idle = self._pool.num_idle(hit.blocks)
        wanted = num_new + idle + rights
        kv = request.kv
        if kv.quota is not None and not self._sharing.fits_cap(request, wanted, tables.unit):
            self._live.park(request)
            return False
        new = wanted - idle
        bounded = bool(self._pool.accounts.bounded)
        if claim_only and not kv.claims(new):
            return False
        sharing = self._sharing
        short = sharing.short(kv, wanted, new) if bounded else wanted - self._pool.num_available
        if short > 0 or not self._running.has_free_row:
            givers = sharing.givers(request, wanted, new)
            if givers is None:
                return False
            for giver in givers:
                giver.kv.preempted += giver.kv is not kv
                self._live.preempt(giver)
            if self._pool.available_for(kv) < wanted:
                return False
        elif crowded or not self._fits(request, hit, idle, rights):
            # Memory that is there is not kept from a light tenant for the outputs of others, who have not come to it.
            light = self._is_light(account) and sharing.is_modest(account, wanted)
            if not light and not sharing.can_claim(request, wanted, new):
                return False
        if account.waiting[0] is not request:
            account.passed += 1
        self._live.admit(request, hit, num_new, rights)
        return True

    def _fits(self, request: Request, hit: Hit, num_idle: int, rights: int) -> bool:
        """Whether all running requests and this one are expected to find memory to their ends.

        ``num_idle`` of its cached blocks of whole contexts are held by nobody yet; ``rights`` to blocks of windows.
        """
        running = self._running
        if not len(running):
            return True
        size, step = self._tables.unit, running.decoding.step
        num_blocks = self._pool.num_blocks
        held = num_blocks - self._pool.num_available
        common = max(0, held - running.forecast.private(step) // size)
        aside = self._pool.accounts.set_aside - request.kv.aside
        room = (num_blocks - num_blocks // SLACK - common - num_idle - aside) * size
        return running.forecast.fits(request, len(hit.blocks), rights, step=step, room=room)

    def _note(self, request: Request, plan: StepPlan, now_ns: int) -> None:
        """Tell runner and host of an admission."""
        plan.admissions.append(admission_of(request, self._pool))
        request.account.line.widen(request.account)
        if not request.started:
            request.started = True
            if request.public is not None:
                request.public.hits += 1
            if request.silent:
                return
            queue_us = max(0, now_ns - request.arrival_ns) // 1_000
            self._starts.append(Started(request.request_id, request.num_prefilled, queue_us))
