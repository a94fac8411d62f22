"""All live requests, and their ways between queue, row and end."""

from __future__ import annotations

from engine.kv.block_pool import BlockPool
from engine.request import Request, Status
from engine.scheduler.account import OUTPUT_COST
from engine.scheduler.deadlines import Deadlines
from engine.scheduler.fairness import Accounts
from engine.scheduler.limits import NUM_PRIORITIES, SchedulerLimits
from engine.scheduler.plan import RowMask
from engine.scheduler.running import Running, owner_of


class LiveRequests:
    """Queues, rows and deadlines, kept in agreement: a live request is in a queue or has a row, never both."""

    def __init__(self, limits: SchedulerLimits, pool: BlockPool) -> None:
        self._limits = limits
        self._pool = pool
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
        """Queue a new request."""
        self.by_id[request.request_id] = request
        self.num_waiting += 1
        self.num_held += request.held
        self.accounts.lines[request.submit.priority].enter(request, request.submit.weight)
        self.deadlines.add(request, len(self.by_id))

    def admit(self, request: Request, shared: list[int], num_new: int) -> None:
        """Give a waiting request a row, the cached blocks of its prefix, and ``num_new`` more, all available."""
        for block in shared:
            self._pool.hold(block)
        account = request.account
        account.line.unqueue(request)
        self.num_waiting -= 1
        size = self._limits.block_size
        request.pledge = account.pledge_of(request, len(shared) * size, size)
        self.running.occupy(request, shared + self._pool.take(num_new, owner_of(request)), len(shared))

    def preempt(self, request: Request) -> None:
        """Send a running request back to its queue; its tokens stay, its blocks are computed again later."""
        self.running.vacate(request, Status.WAITING)
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
        if request.status is Status.WAITING:
            request.account.line.unqueue(request)
            self.num_waiting -= 1
            request.status = Status.FINISHED
        else:
            self.running.vacate(request, Status.FINISHED, poisoned=poisoned)
        del self.by_id[request.request_id]
        self.num_held -= request.held
        request.account.line.leave(request)

    def check_integrity(self) -> None:
        """Assert that queues, rows, tables and pool agree, between two steps; linear in the pool."""
        self.running.check_integrity()
        waiting = [request for account in self.accounts for request in account.waiting]
        assert len(waiting) == self.num_waiting
        assert len(waiting) + len(self.running) == len(self.by_id), "a live request is nowhere"
        assert sum(request.held for request in self.by_id.values()) == self.num_held
        for account in self.accounts:
            orders = [request.order for request in account.waiting]
            assert orders == sorted(orders), "a queue out of order"
            assert account.num_running + len(account.waiting) == account.num_live
            assert (account in account.line.running) == bool(account.num_running)
            assert bool(account.ticket) == (bool(account.waiting) and not account.num_running), "a lost ticket"
        for line in self.accounts.lines:
            assert line.total_weight == sum(account.weight for account in line.active.values())
