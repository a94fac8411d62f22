"""Who must give way when rows or blocks are short: what each account may count on, and who has more than that.

Rows and blocks are shared out by weight among the active accounts of one priority. An account that would stay within
its share may take from one that is above its own share and was served no less; as nobody is both, two accounts cannot
pass a row to and fro. A lower priority gives way to a higher one whatever it holds. The oldest running request of all
is never taken: it always ends, and then the next one is the oldest, so nothing starves.

Quotas of blocks (``engine.kv.quota``) come before shares. A request that stays within its reservation *claims*: any
account that holds more than its own reservation gives way to it, whatever its priority and service. Nobody else is ever
made to give what lies within his reservation; and who is at his cap gives way to himself. The oldest request is still
never taken: no request needs more than its account's reservation and all that nobody has reserved, and so much is there
once all other borrowers have given way.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.kv.block_pool import BlockPool
from engine.kv.quota import KvAccount
from engine.request import Request
from engine.scheduler.account import Account
from engine.scheduler.fairness import Line
from engine.scheduler.forecast import remaining
from engine.scheduler.limits import SchedulerLimits
from engine.scheduler.running import Running, age

MODEST = 2
"""An account may take blocks from others only up to this part of its share. Accounts that all have much to do hold
about their shares, a little more or less from step to step; blocks taken to and fro between them would be computed
again and again, so the right to take them is for those who ask for little."""


@dataclass(frozen=True, slots=True)
class _Need:
    """What is short."""

    rows: bool
    blocks: bool
    claims: bool = False
    """Whether the blocks are within the account's reservation."""


class Sharing:
    """Decides about preemption; changes nothing."""

    def __init__(self, limits: SchedulerLimits, pool: BlockPool, running: Running) -> None:
        self._max_num_seqs = limits.max_num_seqs
        self._pool = pool
        self._running = running

    def row_share(self, account: Account) -> int:
        """Rows that an account may count on; at least one."""
        return max(1, self._max_num_seqs * account.weight // account.line.total_weight)

    def block_share(self, account: Account) -> int:
        """Blocks that an account may count on; at least one."""
        return max(1, self._pool.num_blocks * account.weight // account.line.total_weight)

    def has_rich(self, line: Line) -> bool:
        """Whether anybody might have to give way to an account of this line: cheap, asked before anything else."""
        if any(below.running for below in line.below):
            return True
        rows, blocks = self._max_num_seqs / line.total_weight, self._pool.num_blocks / line.total_weight
        return any(
            account.num_running > max(1.0, rows * account.weight) or account.num_blocks > blocks * account.weight
            for account in line.running
        )

    def is_modest(self, account: Account, wanted: int) -> bool:
        """Whether so many more blocks leave the account at a part of its share that nobody would mind."""
        return (account.num_blocks + wanted) * MODEST <= self.block_share(account)

    def short(self, kv: KvAccount, wanted: int, new: int) -> int:
        """How many of ``wanted`` blocks, ``new`` of which are not yet the account's, somebody would have to give."""
        if kv.claims(new):
            return new - self._pool.room_for(kv, new)
        return wanted - self._pool.available_for(kv)

    def givers(self, request: Request, wanted: int, new: int) -> list[Request] | None:
        """Running requests to preempt so that this one gets a row and ``wanted`` blocks, ``new`` of them not yet its
        account's, within its account's cap: those of the lowest priority first, then of the account served most, then
        the youngest. None when that cannot be done within the rules."""
        poor, kv = request.account, request.kv
        need_row, short = not self._running.has_free_row, self.short(kv, wanted, new)
        need = _Need(rows=need_row, blocks=short > 0, claims=kv.claims(new))
        given: list[Request] = []
        left: dict[Account, tuple[int, int]] = {}
        spare: dict[KvAccount, int] = {}
        for other in self._able(request, wanted, need):
            account = other.account
            rows, blocks = left.get(account, (account.num_running, account.num_blocks))
            above = need.claims or self._is_above(account, rows, blocks, need)
            if account.line is poor.line and not above:
                continue
            gain = self._pool.num_private(other.blocks) + other.rights
            if other.kv is not kv:
                gain = min(gain, spare.get(other.kv, other.kv.used - other.kv.reserved))
            if gain <= 0 and not (need.rows and not given):
                continue
            left[account] = (rows - 1, blocks - other.num_blocks)
            spare[other.kv] = spare.get(other.kv, other.kv.used - other.kv.reserved) - max(0, gain)
            given.append(other)
            short -= max(0, gain)
            if short <= 0:
                return given
        return None

    def can_claim(self, request: Request, wanted: int, new: int) -> bool:
        """Whether somebody would have to give way to this request, with so many blocks, should it run short of memory
        later."""
        need = _Need(rows=False, blocks=True, claims=request.kv.claims(new))
        return need.claims or bool(self._able(request, wanted, need))

    def fits_cap(self, request: Request, wanted: int, unit: int) -> bool:
        """Whether the account's cap leaves room for ``wanted`` more blocks and for half of what its running requests
        are expected to grow by yet (they do not all end at once). One request alone always has its room."""
        kv = request.kv
        if kv.cap >= self._pool.num_blocks or not kv.used:
            return True
        growth = sum(-(-remaining(other) // unit) for other in self._running.held if other.kv is kv)
        return kv.used + wanted + growth // 2 <= kv.cap

    def for_memory(self, needy: Request, missing: int) -> Request:
        """Whom to preempt when a decoding request lacks so many blocks and fewer are available to it."""
        held, kv = self._running.held, needy.kv
        own = [request for request in held if request.kv is kv]
        if kv.used + missing > kv.cap:
            first = min(own, key=age)
            return max((request for request in own if request is not first), key=give_way_key, default=needy)
        oldest = min(held, key=age)
        own = [request for request in own if request is not oldest]
        rich = [request for request in held if request.kv is not kv and request.kv.borrows()]
        others = [request for request in rich if request is not oldest]
        if kv.claims(missing):
            return max(others or own, key=give_way_key, default=needy)
        return max(others + own, key=give_way_key, default=needy)

    def _able(self, request: Request, wanted: int, need: _Need) -> list[Request]:
        """Requests that could be preempted for this one, in the order in which they are."""
        poor = request.account
        within = (not need.rows or poor.num_running < self.row_share(poor)) and (
            not need.blocks or need.claims or self.is_modest(poor, wanted)
        )
        if not within and not need.claims and not any(line.running for line in poor.line.below):
            return []
        held = self._running.held
        yields = {
            pair: self._must_yield(pair, request, need, within=within)
            for pair in {(other.account, other.kv) for other in held}
        }
        if not any(yields.values()):
            return []
        oldest = min(held, key=age)
        step = self._running.decoding.step
        able = [
            other
            for other in held
            if yields[other.account, other.kv] and other is not oldest and other.planned_at != step
        ]
        able.sort(key=give_way_key, reverse=True)
        return able

    def _must_yield(self, pair: tuple[Account, KvAccount], poor: Request, need: _Need, *, within: bool) -> bool:
        """Whether requests of ``pair`` give way; ``within``: whether ``poor`` stays within its shares."""
        rich, kv = pair
        if rich is poor.account:
            return False
        if need.blocks and kv is not poor.kv:
            if not kv.borrows():
                return False
            if need.claims and (not need.rows or within):
                return True
        rank, other = rich.line.priority, poor.account.line.priority
        if rank != other:
            return rank > other
        above = self._is_above(rich, rich.num_running, rich.num_blocks, need)
        return within and rich.service >= poor.account.service and above

    def _is_above(self, account: Account, rows: int, blocks: int, need: _Need) -> bool:
        """Whether an account with so many rows and blocks is above its share of what is needed."""
        return (need.rows and rows > self.row_share(account)) or (need.blocks and blocks > self.block_share(account))


def give_way_key(request: Request) -> tuple[int, float, int]:
    """Rank for giving way: the highest goes first."""
    account = request.account
    return (account.line.priority, account.service, request.order)
