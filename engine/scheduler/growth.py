"""Gives the decoding requests of a step the blocks that their next tokens need, and makes room where there is none.

The oldest comes first and a request only ever takes from what its account may have (``sharing``), so whoever is
preempted here is computed again later, and the oldest always goes on.
"""

from __future__ import annotations

from engine.kv.block_pool import BlockPool
from engine.request import Request, Status
from engine.scheduler.live import LiveRequests
from engine.scheduler.plan import StepPlan
from engine.scheduler.running import age
from engine.scheduler.sharing import Sharing


class Growth:
    """The block tables of decoding requests, one step further."""

    def __init__(self, pool: BlockPool, live: LiveRequests, sharing: Sharing) -> None:
        self._pool = pool
        self._live = live
        self._running = live.running
        self._sharing = sharing

    def grow(self, plan: StepPlan) -> bool:
        """Give a block to every decoding request that needs one, the oldest first. Says whether one had to be
        preempted because the pool, not only its account, was short of blocks."""
        return self._windowed_tables(plan) if self._running.windowed else self._one_table(plan)

    def drop_lost(self, plan: StepPlan, count: int) -> None:
        """Take the new blocks of rows that were vacated after they had grown out of the first ``count`` in the plan;
        those behind are of prompts in this step, which nobody takes the rows of."""
        rows = self._running.rows
        kept = [
            place
            for place, row in enumerate(plan.grown_rows)
            if place >= count or ((request := rows[row]) is not None and request.status is Status.DECODING)
        ]
        for grown in (plan.grown_rows, plan.grown_indices, plan.grown_blocks, plan.grown_tables):
            if grown:
                grown[:] = [grown[place] for place in kept]

    def _one_table(self, plan: StepPlan) -> bool:
        running = self._running
        needy = running.decoding.needing_blocks()
        if not needy:
            return False
        pool = self._pool
        crowded = len(needy) > pool.num_available
        scarce = crowded or bool(pool.accounts.bounded)
        for request in sorted(needy, key=age) if scarce else list(needy):
            while scarce and request.status is Status.DECODING and pool.room_for(request.kv, 1) < 1:
                crowded |= self._make_room(request, 1)
            if request.status is Status.DECODING:
                plan.grown_rows.append(request.row)
                plan.grown_indices.append(len(request.blocks))
                plan.grown_blocks.append(running.grow(request))
        return crowded

    def _windowed_tables(self, plan: StepPlan) -> bool:
        """The same where layers keep windows: what lies behind them is given back first."""
        running = self._running
        needy = list(running.decoding.needing_blocks())
        for request in needy:
            running.trim(request)
        crowded = sum(map(running.tables.missing, needy)) > self._pool.num_available
        for request in sorted(needy, key=age) if crowded or self._pool.accounts.bounded else needy:
            while request.status is Status.DECODING:
                missing = running.tables.missing(request)
                if missing <= self._pool.room_for(request.kv, missing):
                    break
                crowded |= self._make_room(request, missing)
            if request.status is Status.DECODING:
                plan.grow(request.row, running.extend(request))
        return crowded

    def _make_room(self, request: Request, missing: int) -> bool:
        """Preempt somebody for a decoding request that lacks blocks. Says whether the pool is short of them, and not
        only its account."""
        kv = request.kv
        short = kv.used + missing <= kv.cap
        giver = self._sharing.for_memory(request, missing)
        giver.kv.preempted += giver.kv is not kv
        self._live.preempt(giver)
        return short
