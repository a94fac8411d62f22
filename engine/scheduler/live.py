"""All live requests, and their ways between queue, row and end."""

from __future__ import annotations

from engine.kv.block_pool import BlockPool
from engine.kv.prefix_cache import Hit, PrefixCache
from engine.kv.quota import KvAccount
from engine.request import Request, Status
from engine.scheduler.account import OUTPUT_COST
from engine.scheduler.deadlines import Deadlines
from engine.scheduler.fairness import Accounts
from engine.scheduler.limits import NUM_PRIORITIES, SchedulerLimits
from engine.scheduler.plan import RowMask
from engine.scheduler.running import Running, owner_of
from engine.scheduler.siblings import Family
from isolation.ipc.wiping import wipe


class LiveRequests:
    """Queues, rows and deadlines, kept in agreement: a live request is in a queue, held or has a row, never two of
    these."""

    def __init__(self, limits: SchedulerLimits, pool: BlockPool, cache: PrefixCache) -> None:
        self._pool = pool
        self._cache = cache
        self.by_id: dict[int, Request] = {}
        self.accounts = Accounts(NUM_PRIORITIES, hold_price=OUTPUT_COST * limits.max_num_seqs / pool.num_blocks)
        self.running = Running(limits, pool)
        self.deadlines = Deadlines()
        self.num_waiting = 0
        self.num_preempted = 0
        """Preemptions so far."""
        self.num_held = 0
        """Live requests that can do nothing before their next mask has come."""

    def enter(self, request: Request) -> None:
        """Queue a new request; its siblings are held until its prompt is computed."""
        self._know(request)
        self._queue(request)
        if request.family is not None:
            for sibling in request.family.held:
                sibling.status = Status.FOLLOWING
                self._know(sibling)

    def release_siblings(self, request: Request) -> None:
        """The request's known tokens are computed: siblings that were held for it may find its prompt."""
        family = request.family
        if family is not None and request is family.leader:
            for sibling in family.release():
                self._queue(sibling)

    def _know(self, request: Request) -> None:
        self.by_id[request.request_id] = request
        request.kv = self._pool.accounts.of(request.kv_key)
        request.kv.num_requests += 1
        self.num_waiting += 1
        self.num_held += request.held
        self.deadlines.add(request, len(self.by_id))

    def _queue(self, request: Request) -> None:
        request.status = Status.WAITING
        self.accounts.lines[request.submit.priority].enter(request, request.submit.weight)

    def admit(self, request: Request, hit: Hit, num_new: int, rights: int) -> None:
        """Give a waiting request a row, the cached blocks of its prefix, ``num_new`` more of whole contexts, and rights
        to blocks of windows, all available."""
        for block in hit.blocks:
            self._pool.hold(block)
        if self.running.windowed:
            # Also held before any block is taken, which may be a cached one.
            self.running.tables.open(request, hit, rights)
        account = request.account
        account.line.unqueue(request)
        self.num_waiting -= 1
        request.pledge = account.pledge_of(request, hit.num_tokens, self.running.tables.mean_blocks(request))
        blocks = hit.blocks + self._pool.take(num_new, owner_of(request), request.kv)
        self.running.occupy(request, hit, blocks)

    def preempt(self, request: Request) -> None:
        """Send a running request back to its queue; its tokens stay, its blocks are computed again later."""
        self.running.vacate(request, Status.WAITING)
        self.unpark(request.kv)
        request.preempted_at = self.running.decoding.step
        self.num_preempted += 1
        self.num_waiting += 1
        request.account.line.queue(request)

    def hold(self, request: Request) -> None:
        """A structured request has its token: pause it until the mask for the next one has come."""
        self.running.pause(request)
        request.mask = None
        request.held = True
        self.num_held += 1

    def let_go(self, request: Request, mask: RowMask) -> None:
        """The mask for a held request's next token has come."""
        request.mask = mask
        request.held = False
        self.num_held -= 1
        if request.status is Status.PAUSED:
            self.running.resume(request)

    def end(self, request: Request, *, poisoned: bool = False) -> None:
        """End a request wherever it is. Blocks of a poisoned one cannot be found again."""
        held = request.status is Status.FOLLOWING
        if held:
            self.num_waiting -= 1
            request.status = Status.FINISHED
        elif request.status is Status.WAITING:
            request.account.line.unqueue(request)
            self.num_waiting -= 1
            request.status = Status.FINISHED
        else:
            self.running.vacate(request, Status.FINISHED, poisoned=poisoned)
            self.unpark(request.kv)
        del self.by_id[request.request_id]
        self.num_held -= request.held
        if not held:
            request.account.line.leave(request)
        self._pool.accounts.leave(request.kv)
        wipe(request.token_ids)
        if request.family is not None:
            self._end_sibling(request.family, request)

    def shorten(self, request: Request, limit: int) -> None:
        """Let a request end earlier than it was to, at more tokens than it has."""
        if limit == request.limit:
            return
        decodes = request.status is Status.DECODING
        if decodes:
            self.running.decoding.remove(request)
        request.limit = limit
        if decodes:
            self.running.decoding.add(request, at_once=True)

    def park(self, request: Request) -> None:
        """The request's account of blocks is at its cap: its queue waits, out of the backlog, until a block of the
        account comes back."""
        account = request.account
        account.line.park(account)
        request.kv.parked[account] = None
        request.kv.waited += 1

    def unpark(self, kv: KvAccount) -> None:
        """Blocks of the account have come back, or its cap has changed: queues that wait for it may try again."""
        while kv.parked:
            account, _ = kv.parked.popitem()
            if account.parked:
                account.line.unpark(account)

    def _end_sibling(self, family: Family, request: Request) -> None:
        leader = family.end(request)
        if leader is not None:
            self._queue(leader)
        if family.over:
            self._cache.forget(family.prompt_ids)

    def check_integrity(self) -> None:
        """Assert that queues, rows, tables and pool agree, between two steps; linear in the pool."""
        self.running.check_integrity()
        waiting = [request for account in self.accounts for request in account.waiting + account.parked]
        num_siblings = sum(request.status is Status.FOLLOWING for request in self.by_id.values())
        assert len(waiting) + num_siblings == self.num_waiting
        assert self.num_waiting + len(self.running) == len(self.by_id), "a live request is nowhere"
        assert sum(request.held for request in self.by_id.values()) == self.num_held
        for account in self.accounts:
            orders = [request.order for request in account.waiting + account.parked]
            assert orders == sorted(orders), "a queue out of order"
            assert account.num_running + len(account.waiting) + len(account.parked) == account.num_live
            assert not (account.waiting and account.parked), "a queue that waits and does not"
            kept = [kv for kv in self._pool.accounts.by_key.values() if account in kv.parked]
            assert not account.parked or kept, "a parked queue that nobody wakes"
            assert (account in account.line.running) == bool(account.num_running)
            assert bool(account.ticket) == (bool(account.waiting) and not account.num_running), "a lost ticket"
        for line in self.accounts.lines:
            assert line.total_weight == sum(account.weight for account in line.active.values())
