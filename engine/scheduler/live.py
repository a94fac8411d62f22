"""All live requests, and their ways between queue, row and end."""

from __future__ import annotations

from engine.kv.block_pool import BlockPool
from engine.kv.prefix_cache import Hit
from engine.request import Request, Status
from engine.scheduler.account import OUTPUT_COST
from engine.scheduler.deadlines import Deadlines
from engine.scheduler.fairness import Accounts
from engine.scheduler.limits import NUM_PRIORITIES, SchedulerLimits
from engine.scheduler.running import Running, owner_of


class LiveRequests:
    """Queues, rows and deadlines, kept in agreement: a live request is in a queue or has a row, never both."""

    def __init__(self, limits: SchedulerLimits, pool: BlockPool) -> None:
        self._pool = pool
        self.by_id: dict[int, Request] = {}
        self.accounts = Accounts(NUM_PRIORITIES, hold_price=OUTPUT_COST * limits.max_num_seqs / pool.num_blocks)
        self.running = Running(limits, pool)
        self.deadlines = Deadlines()
        self.num_waiting = 0
        self.num_preempted = 0
        """Preemptions so far."""

    def enter(self, request: Request) -> None:
        """Queue a new request."""
        self.by_id[request.request_id] = request
        self.num_waiting += 1
        self.accounts.lines[request.submit.priority].enter(request, request.submit.weight)
        self.deadlines.add(request, len(self.by_id))

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
        blocks = hit.blocks + self._pool.take(num_new, owner_of(request))
        self.running.occupy(request, hit, blocks)

    def preempt(self, request: Request) -> None:
        """Send a running request back to its queue; its tokens stay, its blocks are computed again later."""
        self.running.vacate(request, Status.WAITING)
        request.preempted_at = self.running.decoding.step
        self.num_preempted += 1
        self.num_waiting += 1
        request.account.line.queue(request)

    def end(self, request: Request, *, poisoned: bool = False) -> None:
        """End a request wherever it is. Blocks of a poisoned one cannot be found again."""
        if request.status is Status.WAITING:
            request.account.line.unqueue(request)
            self.num_waiting -= 1
            request.status = Status.FINISHED
        else:
            self.running.vacate(request, Status.FINISHED, poisoned=poisoned)
        del self.by_id[request.request_id]
        request.account.line.leave(request)

    def check_integrity(self) -> None:
        """Assert that queues, rows, tables and pool agree, between two steps; linear in the pool."""
        self.running.check_integrity()
        waiting = [request for account in self.accounts for request in account.waiting]
        assert len(waiting) == self.num_waiting
        assert len(waiting) + len(self.running) == len(self.by_id), "a live request is nowhere"
        for account in self.accounts:
            orders = [request.order for request in account.waiting]
            assert orders == sorted(orders), "a queue out of order"
            assert account.num_running + len(account.waiting) == account.num_live
            assert (account in account.line.running) == bool(account.num_running)
            assert bool(account.ticket) == (bool(account.waiting) and not account.num_running), "a lost ticket"
        for line in self.accounts.lines:
            assert line.total_weight == sum(account.weight for account in line.active.values())
