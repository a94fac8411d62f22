"""All live requests, and their ways between queue, row and end."""

from __future__ import annotations

from collections.abc import Iterator

from engine.core.kv.block_pool import BlockPool
from engine.core.kv.prefix_cache import Hit, PrefixCache
from engine.core.request import Account, Request, Status
from engine.core.scheduler.deadlines import Deadlines
from engine.core.scheduler.limits import SchedulerLimits
from engine.core.scheduler.plan import RowMask
from engine.core.scheduler.running import Running
from engine.core.scheduler.siblings import Siblings
from engine.core.scheduler.tenancy import Change, Tenancy
from isolation.ipc.wiping import wipe


class LiveRequests:
    """Queues, rows and deadlines, kept in agreement: a live request is in a queue, follows a sibling or has a row,
    never two of these."""

    def __init__(self, limits: SchedulerLimits, pool: BlockPool, cache: PrefixCache, tenancy: Tenancy) -> None:
        self._pool = pool
        self._cache = cache
        self._entered, self._left = tenancy.charge(Change.ENTERED), tenancy.charge(Change.LEFT)
        self._queued, self._unqueued = tenancy.charge(Change.QUEUED), tenancy.charge(Change.UNQUEUED)
        self.by_id: dict[int, Request] = {}
        self.running = Running(limits, pool, tenancy)
        self.deadlines = Deadlines()
        self._siblings: dict[Request, Siblings] = {}
        """Siblings by live request, for each request that has some."""
        self.num_waiting = 0
        self.num_preempted = 0
        """Preemptions so far."""
        self.num_lacking_masks = 0
        """Live requests that can do nothing before their next mask has come."""

    def accounts(self) -> Iterator[Account]:
        """Accounts with live requests."""
        queued = (one for one in self.by_id.values() if one.status is not Status.FOLLOWING)
        yield from {request.account: None for request in queued}

    def enter(self, request: Request) -> None:
        """Queue a new request."""
        self._know(request)
        self._queue_new(request)

    def enter_siblings(self, siblings: Siblings) -> None:
        """Queue the leader of new siblings; the others follow when its prompt is computed."""
        self._siblings[siblings.leader] = siblings
        self.enter(siblings.leader)
        for request in siblings.following:
            self._siblings[request] = siblings
            request.status = Status.FOLLOWING
            self._know(request)

    def release_siblings(self, request: Request) -> None:
        """Queue the siblings that wait for this request's prompt, which is computed."""
        siblings = self._siblings.get(request)
        if siblings is not None and request is siblings.leader:
            for sibling in siblings.release():
                self._queue_new(sibling)

    def _know(self, request: Request) -> None:
        self.by_id[request.spec.request_id] = request
        request.kv.account = self._pool.accounts.of(request.spec.kv_key)
        request.kv.account.num_requests += 1
        self.num_waiting += 1
        self.num_lacking_masks += request.lacks_mask
        self.deadlines.add(request, len(self.by_id))

    def _queue_new(self, request: Request) -> None:
        self._entered(request)
        request.account.num_live += 1
        self._queue(request)

    def _queue(self, request: Request) -> None:
        request.status = Status.WAITING
        self._queued(request)
        request.account.push(request)

    def _unqueue(self, request: Request) -> None:
        self._unqueued(request)
        request.account.remove(request)
        self.num_waiting -= 1

    def admit(self, request: Request, hit: Hit, num_new: int, rights: int) -> None:
        """Give a waiting request a row, the cached blocks of its prefix, ``num_new`` more of whole contexts, and rights
        to blocks of windows, all available."""
        for block in hit.blocks:
            self._pool.hold(block)
        if self.running.windowed:
            # Also held before any block is taken, which may be a cached one.
            self.running.tables.open(request, hit, rights)
        self._unqueue(request)
        self.running.occupy(request, hit, hit.blocks + self._pool.take(num_new, request.kv.owner, request.kv.account))

    def preempt(self, victim: Request, taker: Request) -> None:
        """Send a running request back to its queue for another's sake; its tokens stay, its blocks are computed again
        later."""
        victim.kv.account.preempted += victim.kv.account is not taker.kv.account
        self.running.vacate(victim)
        victim.preempted_at = self.running.step
        self.num_preempted += 1
        self.num_waiting += 1
        self._queue(victim)

    def pause(self, request: Request) -> None:
        """A structured request has its token: it takes part in no step until the mask for the next one has come."""
        self.running.pause(request)
        request.mask = None
        request.lacks_mask = True
        self.num_lacking_masks += 1

    def resume(self, request: Request, mask: RowMask) -> None:
        """Take the mask for the next token of a request that lacks it."""
        request.mask = mask
        request.lacks_mask = False
        self.num_lacking_masks -= 1
        if request.status is Status.PAUSED:
            self.running.resume(request)

    def end(self, request: Request, *, poisoned: bool = False) -> None:
        """End a request wherever it is. Blocks of a poisoned one cannot be found again."""
        queued = request.status is not Status.FOLLOWING
        if request.status is Status.WAITING:
            self._unqueue(request)
        elif queued:
            self.running.vacate(request, poisoned=poisoned)
        else:
            self.num_waiting -= 1
        request.status = Status.FINISHED
        del self.by_id[request.spec.request_id]
        self.num_lacking_masks -= request.lacks_mask
        self._pool.accounts.leave(request.kv.account)
        if queued:
            request.account.num_live -= 1
            self._left(request)
        wipe(request.token_ids)
        siblings = self._siblings.pop(request, None)
        if siblings is not None:
            self._end_sibling(siblings, request)

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

    def _end_sibling(self, siblings: Siblings, request: Request) -> None:
        leader = siblings.end(request)
        if leader is not None:
            self._queue_new(leader)
        if siblings.over:
            self._cache.forget(siblings.prompt_ids)

    def check_integrity(self) -> None:
        """Assert that queues, rows, tables and pool agree, between two steps; linear in the pool."""
        self.running.check_integrity()
        accounts = list(self.accounts())
        waiting = [request for account in accounts for request in account.waiting + account.suspended]
        num_siblings = sum(request.status is Status.FOLLOWING for request in self.by_id.values())
        assert len(waiting) + num_siblings == self.num_waiting
        assert self.num_waiting + len(self.running) == len(self.by_id), "a live request is nowhere"
        assert sum(request.lacks_mask for request in self.by_id.values()) == self.num_lacking_masks
        for account in accounts:
            orders = [request.spec.order for request in account.waiting + account.suspended]
            assert orders == sorted(orders), "a queue out of order"
            assert account.num_running + len(account.waiting) + len(account.suspended) == account.num_live
            assert not (account.waiting and account.suspended), "a queue that waits and does not"
