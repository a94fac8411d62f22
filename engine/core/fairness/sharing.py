"""Which running requests give way when rows or blocks are short: what each account may count on, and which have more.

Rows and blocks are shared out by weight among the active accounts of one priority. An account that would stay within
its share may take from one that is above its own share and was served no less; as no account is both, two accounts
cannot pass a row to and fro. A lower priority gives way to a higher one whatever it holds. The oldest running request
of all is never taken: it always ends, and then the next one is the oldest, so nothing starves.

Quotas of blocks (``engine.core.kv.quota``) come before shares. A request that stays within its reservation *claims*:
any account that holds more than its own reservation gives way to it, whatever its priority and service. No account has
to give what lies within its reservation; and one at its cap gives way to itself. The oldest request is still never
taken: no request needs more than its account's reservation and all that is not reserved, and so much is there once all
other borrowers have given way.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from engine.core.fairness.fairness import PriorityClass
from engine.core.kv.block_pool import BlockPool
from engine.core.kv.quota import KvAccount
from engine.core.request import Account, Request, age
from engine.core.scheduler.tenancy import Need

MODEST = 2
"""An account may take blocks from others only up to this part of its share. Accounts that all have much to do hold
about their shares, a little more or less from step to step; blocks taken to and fro between them would be computed
again and again, so the right to take them is for accounts that ask for little."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """Decides about preemption; changes nothing."""

    classes: Sequence[PriorityClass]
    num_rows: int
    pool: BlockPool
    running: Collection[Request]
    """Requests that hold rows."""

    def row_share(self, account: Account) -> int:
        """Rows that an account may count on; at least one."""
        return max(1, self.num_rows * account.weight // self.classes[account.priority].total_weight)

    def block_share(self, account: Account) -> int:
        """Blocks that an account may count on; at least one."""
        return max(1, self.pool.num_blocks * account.weight // self.classes[account.priority].total_weight)

    def may_preempt(self, priority: PriorityClass) -> bool:
        """Whether any request might have to give way to an account of this priority: cheap, asked before anything
        else."""
        if any(below.running for below in priority.below):
            return True
        rows, blocks = self.num_rows / priority.total_weight, self.pool.num_blocks / priority.total_weight
        return any(
            account.num_running > max(1.0, rows * account.weight) or account.num_blocks > blocks * account.weight
            for account in priority.running
        )

    def is_modest(self, account: Account, wanted: int) -> bool:
        """Whether so many more blocks leave the account at a small part of its share."""
        return (account.num_blocks + wanted) * MODEST <= self.block_share(account)

    def victims(self, request: Request, need: Need) -> list[Request] | None:
        """Running requests to preempt so that this one gets what it lacks, within its account's cap: those of the
        lowest priority first, then of the account served most, then the youngest. None when that cannot be done within
        the rules."""
        requester, kv, short = request.account, request.kv.account, need.short
        claims = kv.claims(need.new)
        given: list[Request] = []
        left: dict[Account, tuple[int, int]] = {}
        spare: dict[KvAccount, int] = {}
        for other in self._able(request, need, claims=claims):
            account = other.account
            rows, blocks = left.get(account, (account.num_running, account.num_blocks))
            above = claims or self._is_above(account, rows, blocks, need)
            if account.priority == requester.priority and not above:
                continue
            gain = self.pool.num_private(other.kv.blocks) + other.kv.rights
            theirs = other.kv.account
            left_of_it = spare.get(theirs, theirs.used - theirs.reserved)
            if theirs is not kv:
                gain = min(gain, left_of_it)
            if gain <= 0 and not (need.row and not given):
                continue
            left[account] = (rows - 1, blocks - other.kv.num_blocks)
            spare[theirs] = left_of_it - max(0, gain)
            given.append(other)
            short -= max(0, gain)
            if short <= 0:
                return given
        return None

    def can_claim(self, request: Request, need: Need) -> bool:
        """Whether some request would have to give way to this one, should it run short of memory later."""
        later = Need(need.step, row=False, wanted=need.wanted, new=need.new, short=1)
        claims = request.kv.account.claims(need.new)
        return claims or bool(self._able(request, later, claims=claims))

    def fits_cap(self, request: Request, wanted: int, block_size: int) -> bool:
        """Whether the account's cap leaves room for ``wanted`` more blocks and for half of what its running requests
        are expected to grow by yet (they do not all end at once). One request alone always has its room."""
        kv = request.kv.account
        if kv.cap >= self.pool.num_blocks or not kv.used:
            return True
        growth = sum(-(-other.expected // block_size) for other in self.running if other.kv.account is kv)
        return kv.used + wanted + growth // 2 <= kv.cap

    def for_memory(self, request: Request, missing: int) -> Request:
        """Find the request to preempt when a decoding one lacks so many blocks and fewer are available to it."""
        kv = request.kv.account
        own = [other for other in self.running if other.kv.account is kv]
        if kv.used + missing > kv.cap:
            first = min(own, key=age)
            return max((other for other in own if other is not first), key=give_way_key, default=request)
        oldest = min(self.running, key=age)
        own = [other for other in own if other is not oldest]
        borrowers = [other for other in self.running if other.kv.account is not kv and other.kv.account.borrows()]
        others = [other for other in borrowers if other is not oldest]
        if kv.claims(missing):
            return max(others or own, key=give_way_key, default=request)
        return max(others + own, key=give_way_key, default=request)

    def _able(self, request: Request, need: Need, *, claims: bool) -> list[Request]:
        """Requests that could be preempted for this one, in the order in which they are."""
        requester = request.account
        within = (not need.row or requester.num_running < self.row_share(requester)) and (
            need.short <= 0 or claims or self.is_modest(requester, need.wanted)
        )
        if not within and not claims and not any(below.running for below in self.classes[requester.priority].below):
            return []
        yields = {
            pair: self._must_yield(pair, request, need, claims=claims, within=within)
            for pair in {(other.account, other.kv.account) for other in self.running}
        }
        if not any(yields.values()):
            return []
        oldest = min(self.running, key=age)
        able = [
            other
            for other in self.running
            if yields[other.account, other.kv.account] and other is not oldest and other.planned_at != need.step
        ]
        able.sort(key=give_way_key, reverse=True)
        return able

    def _must_yield(
        self, pair: tuple[Account, KvAccount], requester: Request, need: Need, *, claims: bool, within: bool
    ) -> bool:
        """Whether requests of ``pair`` give way; ``within``: whether ``requester`` stays within its shares."""
        candidate, kv = pair
        if candidate is requester.account:
            return False
        if need.short > 0 and kv is not requester.kv.account:
            if not kv.borrows():
                return False
            if claims and (not need.row or within):
                return True
        rank, other = candidate.priority, requester.account.priority
        if rank != other:
            return rank > other
        if not within or candidate.service < requester.account.service:
            return False
        return self._is_above(candidate, candidate.num_running, candidate.num_blocks, need)

    def _is_above(self, account: Account, rows: int, blocks: int, need: Need) -> bool:
        """Whether an account with so many rows and blocks is above its share of what is needed."""
        if need.row and rows > 1 and rows > self.row_share(account):  # a share is one row at least
            return True
        return need.short > 0 and blocks > self.block_share(account)


def give_way_key(request: Request) -> tuple[int, float, int]:
    """Rank for giving way: the highest goes first."""
    account = request.account
    return (account.priority, account.service, request.spec.order)
