"""The mechanics of the scheduler with a tenancy of one tenant: what decides the next step reads in one sitting, and
runs real requests."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.core.kv.block_pool import BlockPool
from engine.core.kv.prefix_cache import PrefixCache
from engine.core.request import Account, Request, age
from engine.core.scheduler.limits import SchedulerLimits
from engine.core.scheduler.scheduler import Scheduler
from engine.core.scheduler.tenancy import Change, Need, StepBudget, Tenancy
from tests.engine.core.simulation import SimulatedRunner
from tests.engine.support import submit

MECHANICS = ("planner.py", "tenancy.py")
"""Modules that decide what runs next, below ``engine/core/scheduler``."""

MOST_LINES = 350


class OneTenant:
    """All requests in one account, in order of arrival; the youngest gives way."""

    num_defects = 0

    def __init__(self) -> None:
        self.account = Account(0, b"")
        self.running: list[Request] = []

    def next_accounts(self, step: StepBudget) -> Iterator[Account]:
        """The account, while its requests can be served."""
        served = True
        while served and step.tokens and (self.account.prefilling or self.account.waiting):
            step.served = False
            yield self.account
            served = step.served

    def may_admit(self, request: Request, need: Need) -> bool:
        """Admit what the forecast finds memory for."""
        return need.secure

    def victims(self, request: Request, need: Need) -> list[Request]:
        """The youngest request, when one that decodes runs out of memory."""
        return [max(self.running, key=age)]

    def charge(self, change: Change) -> Callable[..., None]:
        """Know the account and the running requests."""
        return {Change.ENTERED: self._enter, Change.ADMITTED: self._admitted, Change.VACATED: self.running.remove}.get(
            change, lambda *_: None
        )

    def _enter(self, request: Request) -> None:
        request.account = self.account

    def _admitted(self, request: Request, _: float) -> None:
        self.running.append(request)

    def check(self) -> None:
        """Nothing is promised."""

    def check_integrity(self) -> None:
        """Compare the requests with rows with the account."""
        assert self.account.num_running == len(self.running)


def test_what_decides_the_next_step_reads_in_one_sitting(root: Path) -> None:
    """The modules that plan a step, with all that they know of tenants, are few lines; they name no account's price,
    share or quota."""
    texts = [(root / "engine/core/scheduler" / name).read_text() for name in MECHANICS]
    assert sum(text.count("\n") for text in texts) <= MOST_LINES
    assert not any(
        f".{word}" in text for text in texts for word in ("service", "weight", "pledged", "quota", "reserved")
    )


@pytest.mark.parametrize(("blocks", "caching"), [(14, False), (14, True), (60, True)])
def test_the_mechanics_run_with_a_tenancy_of_one_tenant(blocks: int, caching: bool) -> None:
    """Requests of all lengths end with as many tokens as they asked for, memory scarce or not: the runner checks each
    slot that is read, and queues, rows and tables agree after every step."""
    limits = SchedulerLimits(
        max_num_seqs=6,
        max_num_batched_tokens=32,
        max_waiting=100,
        max_context=48,
        block_size=4,
        vocab_size=100,
        prefix_caching=caching,
    )
    pool = BlockPool(blocks)
    cache = PrefixCache(pool, root=bytes(16), block_size=4, caching=caching)
    tenancy: Tenancy = OneTenant()
    scheduler = Scheduler(limits, pool, cache, tenancy)
    runner, draw = SimulatedRunner(scheduler, 4), random.Random(blocks)
    wanted = {number: draw.randint(1, 20) for number in range(40)}
    for number, length in wanted.items():
        prompt = [draw.randrange(3) for _ in range(draw.randint(1, 24))]
        scheduler.add(submit(number, prompt, length, tenant=number % 3), now_ns=0)
    got = dict.fromkeys(wanted, 0)
    admitted: list[int] = []
    while scheduler.has_work:
        plan = scheduler.schedule(now_ns=0)
        assert plan is not None
        result = scheduler.commit(plan, runner.execute(plan))
        scheduler.check_integrity()
        admitted += [start.request for start in result.starts]
        for request in result.requests:
            got[request] += 1
    assert got == wanted
    assert sorted(admitted) == sorted(wanted)
    assert caching or admitted == sorted(admitted), "one account is served in order of arrival"
    assert pool.num_available == blocks
    assert scheduler.num_preempted > 0 or blocks == 60
