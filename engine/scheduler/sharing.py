"""Who must give way when rows or blocks are short: what each account may count on, and who has more than that.

Rows and blocks are shared out by weight among the active accounts of one priority. An account that would stay within
its share may take from one that is above its own share and was served no less; as nobody is both, two accounts cannot
pass a row to and fro. A lower priority gives way to a higher one whatever it holds. The oldest running request of all
is never taken: it always ends, and then the next one is the oldest, so nothing starves.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.kv.block_pool import BlockPool
from engine.request import Request
from engine.scheduler.account import Account
from engine.scheduler.fairness import Line
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

    def givers(self, poor: Account, wanted: int) -> list[Request] | None:
        """Running requests to preempt so that ``poor`` gets a row and ``wanted`` available blocks: those of the
        lowest priority first, then of the account served most, then the youngest. None when that cannot be done
        within the rules."""
        need_row, short = not self._running.has_free_row, wanted - self._pool.num_available
        need = _Need(rows=need_row, blocks=short > 0)
        given: list[Request] = []
        left: dict[Account, tuple[int, int]] = {}
        for request in self._able(poor, wanted, need):
            account = request.account
            rows, blocks = left.get(account, (account.num_running, account.num_blocks))
            if account.line is poor.line and not self._is_above(account, rows, blocks, need):
                continue
            left[account] = (rows - 1, blocks - request.num_blocks)
            given.append(request)
            short -= self._pool.num_private(request.blocks) + request.rights
            if short <= 0:
                return given
        return None

    def can_claim(self, poor: Account, wanted: int) -> bool:
        """Whether somebody would have to give way to ``poor`` should its request, with so many blocks, run short of
        memory later."""
        return bool(self._able(poor, wanted, _Need(rows=False, blocks=True)))

    def for_memory(self) -> Request:
        """Whom to preempt when a decoding request needs a block and none is available."""
        held = self._running.held
        assert len(held) > 1, "the oldest request fits the pool alone"
        oldest = min(held, key=age)
        return max((request for request in held if request is not oldest), key=give_way_key)

    def _able(self, poor: Account, wanted: int, need: _Need) -> list[Request]:
        """Requests that could be preempted for ``poor``, in the order in which they are."""
        within = (not need.rows or poor.num_running < self.row_share(poor)) and (
            not need.blocks or (poor.num_blocks + wanted) * MODEST <= self.block_share(poor)
        )
        if not within and not any(line.running for line in poor.line.below):
            return []
        held = self._running.held
        yields = {
            account: self._must_yield(account, poor, need, within=within)
            for account in {request.account for request in held}
        }
        if not any(yields.values()):
            return []
        oldest = min(held, key=age)
        step = self._running.decoding.step
        able = [
            request
            for request in held
            if yields[request.account] and request is not oldest and request.planned_at != step
        ]
        able.sort(key=give_way_key, reverse=True)
        return able

    def _must_yield(self, rich: Account, poor: Account, need: _Need, *, within: bool) -> bool:
        """Whether ``rich`` gives way; ``within``: whether ``poor`` stays within its shares."""
        rank, other = rich.line.priority, poor.line.priority
        if rank != other:
            return rank > other
        return within and rich.service >= poor.service and self._is_above(rich, rich.num_running, rich.num_blocks, need)

    def _is_above(self, account: Account, rows: int, blocks: int, need: _Need) -> bool:
        """Whether an account with so many rows and blocks is above its share of what is needed."""
        return (need.rows and rows > self.row_share(account)) or (need.blocks and blocks > self.block_share(account))


def give_way_key(request: Request) -> tuple[int, float, int]:
    """Rank for giving way: the highest goes first."""
    account = request.account
    return (account.line.priority, account.service, request.order)
