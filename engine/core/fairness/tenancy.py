"""The tenancy of an appliance: accounts by namespace and priority, served least first, with shares and quotas.

The rest of a step's tokens goes, chunk by chunk, to the account with the least service of the most urgent priority.
Where its request cannot be admitted:

* An account below its share of rows and blocks takes what it lacks from those above theirs (``sharing``), and needs
  no forecast then: should memory run out, those give way. So no tenant waits for a neighbour's requests to
  end.
* Otherwise others may pass it, a few in one step, and only until they are ahead of it by what the request itself
  costs; then memory is left to drain. So a large request cannot starve, nor hold up all others at once. Lower
  priorities do not pass.
* At its own cap of blocks (``engine.core.kv.quota``) an account's queue is *suspended*: it holds no other account up,
  and is owed nothing, until a block of its own comes back.
* Within its reservation an account needs neither forecast nor patience. What of a step's tokens the turns above leave
  goes to such requests (``_claims``): memory that is reserved does not wait for memory that is not.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from heapq import heapify, heappop, heappush
from math import inf

from engine.core.fairness.fairness import PriorityClass, Turn, turn_of
from engine.core.fairness.prices import OUTPUT_COST, Prices, charge_chunk, cost_of
from engine.core.fairness.sharing import Sharing
from engine.core.kv.block_pool import BlockPool
from engine.core.kv.quota import KvAccount
from engine.core.request import Account, Request, Status
from engine.core.scheduler.limits import NUM_PRIORITIES, SchedulerLimits
from engine.core.scheduler.tenancy import Change, Need, StepBudget

MAX_STUCK = 4
"""Accounts whose request did not fit in this step before no more are tried: bounds the work of a step."""

LIGHT_PART = 8
"""A tenant is light while another that runs has so many times its live requests. Among equals none is."""


class FairnessBrokenError(AssertionError):
    """The proved bound on the difference of services does not hold: a defect of this package."""


class Fairness:
    """Weighted fair service between namespaces; a ``engine.core.scheduler.tenancy.Tenancy``."""

    def __init__(self, limits: SchedulerLimits, pool: BlockPool, *, raise_defects: bool = False) -> None:
        """``raise_defects``: raise ``FairnessBrokenError`` instead of counting in ``num_defects`` (for tests)."""
        self.num_defects = 0
        self._raise_defects = raise_defects
        self._limits = limits
        self._pool = pool
        self._prices = Prices(OUTPUT_COST * limits.max_num_seqs / pool.num_blocks)
        self.classes = [PriorityClass(priority, self._prices) for priority in range(NUM_PRIORITIES)]
        """By priority, the first to be served first."""
        for one in self.classes:
            one.below = tuple(self.classes[one.priority + 1 :])
        self._running: dict[Request, None] = {}
        self._sharing = Sharing(self.classes, limits.max_num_seqs, pool, self._running.keys())
        self._at_cap: dict[KvAccount, dict[Account, None]] = {}
        """Suspended queues, by the account of blocks that is at its cap."""
        self._heaviest = 0
        """Most live requests of an account with running ones, in this step."""
        self._light_only = False
        """Whether this step completes a light tenant's prompt: then no other's is put beside it."""
        self._claiming = False
        """Whether turns are given within reservations only."""
        self._charges: dict[Change, Callable[..., None]] = {
            Change.ENTERED: self._enter,
            Change.QUEUED: self._queue,
            Change.UNQUEUED: self._unqueue,
            Change.ADMITTED: self._admitted,
            Change.CHUNK: charge_chunk,
            Change.TOKEN: self._prices.charge_token,
            Change.DECODING: self._prices.reprice,
            Change.VACATED: self._vacated,
            Change.LEFT: self._left,
            Change.STEP: self._charge_step,
            Change.QUOTAS: self._restore_all,
        }

    def __iter__(self) -> Iterator[Account]:
        for one in self.classes:
            yield from one.active.values()

    def next_accounts(self, step: StepBudget) -> Iterator[Account]:
        """Accounts in the order of their turns; see ``Tenancy``."""
        self._light_only = self._claiming = False
        self._heaviest = max((account.num_live for one in self.classes for account in one.running), default=0)
        admit = True
        for one in self.classes:
            if not step.tokens:
                return
            if one.active:
                admit = (yield from self._turns(one, step, admit=admit)) and admit
        if step.tokens and not self._light_only and self._pool.accounts.total_reserved:
            yield from self._claims(step)

    def may_admit(self, request: Request, need: Need) -> bool:
        """Whether a request may start, when it gets what it lacks. At its account's cap the queue is suspended."""
        kv, account = request.kv.account, request.account
        if kv.quota is not None and not self._sharing.fits_cap(request, need.wanted, self._limits.lasting_block_size):
            self._suspend(request)
            return False
        if self._claiming:
            return kv.claims(need.new)
        if need.row or need.short > 0 or need.secure:
            return True
        # Memory that is there is not kept from a light tenant for outputs of others that are not computed yet.
        light = self._is_light(account) and self._sharing.is_modest(account, need.wanted)
        return light or self._sharing.can_claim(request, need)

    def victims(self, request: Request, need: Need) -> list[Request] | None:
        """Running requests to preempt so that this one gets what it lacks; see ``Tenancy``."""
        if request.status is Status.DECODING:
            return [self._sharing.for_memory(request, need.wanted)]
        return self._sharing.victims(request, need)

    def charge(self, change: Change) -> Callable[..., None]:
        """What to call at each such change; see ``Tenancy``."""
        return self._charges[change]

    def check(self) -> None:
        """Compare all services with the proved bound.

        Raises:
            FairnessBrokenError: it does not hold, and this tenancy raises defects.
        """
        broken = sum(not one.check() for one in self.classes)
        self.num_defects += broken
        if broken and self._raise_defects:
            raise FairnessBrokenError("services of backlogged accounts are further apart than proved")

    def check_integrity(self) -> None:
        """Assert that accounts, tickets and requests with rows agree; linear in them."""
        for account in self:
            kept = any(account in queues for queues in self._at_cap.values())
            assert not account.suspended or kept, "a suspended queue that nothing restores"
            assert (account in self.classes[account.priority].running) == bool(account.num_running)
            assert bool(account.ticket) == (bool(account.waiting) and not account.num_running), "a lost ticket"
            running = [request for request in self._running if request.account is account]
            assert account.num_running == len(running), "a row that is not counted"
        for one in self.classes:
            assert one.total_weight == sum(account.weight for account in one.active.values())

    def _turns(self, one: PriorityClass, step: StepBudget, *, admit: bool) -> Generator[Account, None, bool]:
        """Turns of one priority. Returns whether all accounts that had a turn were admitted."""
        if len(self._running) >= self._limits.max_num_seqs and not self._sharing.may_preempt(one):
            admit = False
        if not admit and not step.num_prefilling:
            return False
        hot, taken = one.hot_turns(admit=admit), list[Turn]()
        heapify(hot)
        patience, stuck = inf, 0
        while step.tokens:
            cold = one.first_cold() if admit else None
            if cold is not None and (not hot or cold < hot[0]):
                taken.append(one.take_cold())
                account = cold[4]
            elif hot:
                account = heappop(hot)[4]
            else:
                break
            step.light = self._is_light(account)
            if self._light_only and not step.light:
                # Left out of this step, but no account served more than it may be admitted meanwhile.
                patience = min(patience, account.service)
                continue
            if account.prefilling is None and (not admit or account.service > patience):
                admit = False
                continue
            step.served, step.refused = False, None
            yield account
            if step.refused is not None and not account.suspended:
                cost = cost_of(step.refused)
                one.allowance = max(one.allowance, cost)
                patience = min(patience, account.service + cost)
                stuck += 1
                admit = stuck < MAX_STUCK
            elif step.served and account.prefilling is None:
                self._light_only |= step.light
                if account.waiting:
                    heappush(hot, turn_of(account))
        one.put_back(taken)
        return not stuck

    def _claims(self, step: StepBudget) -> Iterator[Account]:
        """Turns of requests that stay within their account's reservation and had none, the least served first. By how
        much such an account is ahead of the backlog is passed, as the cost of a request that did not fit is: it is
        part of the bound in ``fairness``."""
        self._claiming = step.crowded = True
        step.light = False
        for one in self.classes:
            claiming = [
                account
                for account in one.active.values()
                if account.waiting and account.prefilling is None and account.waiting[0].kv.account.reserved
            ]
            for account in sorted(claiming, key=turn_of):
                if not step.tokens:
                    return
                yield account

    def _is_light(self, account: Account) -> bool:
        """Whether the account has few requests, and some other has many."""
        return account.num_live * LIGHT_PART <= self._heaviest

    def _charge_step(self) -> None:
        for one in self.classes:
            for account in one.running:
                account.service += account.step_charge

    def _restore_all(self) -> None:
        for kv in self._pool.accounts.by_key.values():
            self._restore(kv)

    def _enter(self, request: Request) -> None:
        self.classes[request.spec.priority].enter(request)

    def _queue(self, request: Request) -> None:
        account = request.account
        if not (account.waiting or account.suspended):
            self.classes[account.priority].join_backlog(request)

    def _unqueue(self, request: Request) -> None:
        account = request.account
        if len(account.waiting) == 1:
            self.classes[account.priority].leave_backlog(account)

    def _admitted(self, request: Request, blocks: float) -> None:
        account = request.account
        one = self.classes[account.priority]
        self._running[request] = one.running[account] = None
        account.ticket = 0
        request.pledge = self._prices.pledge(request, blocks)
        account.pledged += request.pledge
        if self._claiming:
            one.allowance = max(one.allowance, account.service - one.least())
        one.widen(account)

    def _vacated(self, request: Request) -> None:
        account = request.account
        del self._running[request]
        self._prices.reprice(request)
        account.pledged -= request.pledge
        if not account.num_running:
            self.classes[account.priority].end_running(account)
        if self._at_cap:
            self._restore(request.kv.account)

    def _left(self, request: Request) -> None:
        account = request.account
        if not account.num_live:
            self.classes[account.priority].make_idle(account)
        kv = request.kv.account
        if self._at_cap and not kv.num_requests:
            self._at_cap.pop(kv, None)

    def _suspend(self, request: Request) -> None:
        """Suspend the queue of a request whose account of blocks is at its cap."""
        kv, account = request.kv.account, request.account
        self.classes[account.priority].suspend(account)
        self._at_cap.setdefault(kv, {})[account] = None
        kv.waited += 1

    def _restore(self, kv: KvAccount) -> None:
        """Let queues that wait for an account of blocks try again: blocks have come back, or its cap has changed."""
        for account in reversed(self._at_cap.pop(kv, ())):
            if account.suspended:
                self.classes[account.priority].restore(account)
