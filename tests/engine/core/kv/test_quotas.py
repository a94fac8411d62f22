"""Quotas of KV: what is reserved is kept, what is capped is not exceeded, and what is lent comes back."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from engine.core.kv.block_pool import BlockPool
from engine.core.scheduler.scheduler import Scheduler
from engine.errors import RequestRejectedError
from isolation.ipc.kv import KvQuota
from isolation.ipc.messages import FailureCode
from tests.engine.core.simulation import SimulatedRunner
from tests.engine.support import make_scheduler, namespace, submit

BLOCK = 4
VICTIM, OTHER, GROUP = 1, 2, 9


class Box:
    """A scheduler with checks around every step."""

    def __init__(self, *, quotas: Iterable[KvQuota] = (), num_blocks: int = 40, rows: int = 8) -> None:
        made: tuple[Scheduler, BlockPool] = make_scheduler(
            num_blocks=num_blocks, block_size=BLOCK, max_num_seqs=rows, max_num_batched_tokens=160
        )
        self.scheduler, self.pool = made
        self.runner = SimulatedRunner(self.scheduler, BLOCK)
        self.cached: dict[int, int] = {}
        self.ended: list[int] = []
        assert self.scheduler.set_quotas(list(quotas)) == []

    def ask(self, number: int, length: int, output: int = 1, *, tenant: int = VICTIM, **fields: object) -> None:
        """A request whose prompt is its number, again and again."""
        self.scheduler.add(submit(number, [number] * length, output, tenant=tenant, **fields), now_ns=0)

    def step(self) -> None:
        """One step."""
        plan = self.scheduler.schedule(now_ns=0)
        if plan is None:
            return
        result = self.scheduler.commit(plan, self.runner.execute(plan))
        self.cached |= {started.request: started.cached_tokens for started in result.starts}
        self.ended += [number for number, finish in zip(result.requests, result.finishes, strict=True) if finish]
        self.scheduler.check_integrity()
        self.scheduler._tenancy.check()

    def finish(self, limit: int = 500) -> None:
        """Steps until nothing is left."""
        for _ in range(limit):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("somebody starves")

    def resident(self, tenant: int) -> int:
        """Blocks with the tenant's content."""
        account = self.pool.accounts.by_key.get(namespace(tenant))
        return account.resident if account else 0


def quota(tenant: int, reserved: int, cap: int = 100, *, lends: bool = True) -> KvQuota:
    """A quota in percent."""
    return KvQuota(namespace(tenant), reserved * 100, cap * 100, lends)


@pytest.mark.parametrize("protected", [True, False])
def test_a_flood_evicts_nothing_that_is_reserved(protected: bool) -> None:
    """A neighbour's prompts go through the whole pool: with a reservation the victim's prefix is still found. Without
    one (the control) it is gone."""
    box = Box(quotas=[quota(VICTIM, 25)] if protected else [])
    box.ask(1, 33)
    box.finish()
    for number in range(2, 12):
        box.ask(number, 60, tenant=OTHER)
        box.finish()
    assert box.resident(VICTIM) == (8 if protected else 0)
    box.ask(20, 1, tenant=OTHER)
    box.scheduler.add(submit(21, [1] * 33, 1, tenant=VICTIM), now_ns=0)
    box.finish()
    assert box.cached[21] == (32 if protected else 0)


def test_what_is_lent_comes_back_by_preemption_of_the_borrower_alone() -> None:
    """A borrower fills the pool with running requests; the owner of the reservation gets its blocks in the next step.
    Who gives way holds more than its own reservation."""
    box = Box(quotas=[quota(VICTIM, 50), quota(3, 20)])
    box.ask(1, 20, 10, tenant=3)
    box.step()
    for number in range(2, 6):
        box.ask(number, 40, 7, tenant=OTHER)
    box.step()
    box.step()
    assert box.pool.accounts.by_key[namespace(OTHER)].borrows()
    box.ask(9, 70, 4)
    box.step()
    box.step()
    assert box.cached.keys() >= {1, 9}, "the reservation was not honoured at once"
    accounts = box.pool.accounts.by_key
    assert accounts[namespace(OTHER)].preempted
    assert not accounts[namespace(3)].preempted
    box.finish()
    assert len(box.ended) == 6


def test_a_cap_is_hard_and_holds_nobody_else_up() -> None:
    """A tenant at its cap runs what fits, evicts its own blocks and waits for itself; a neighbour with little is
    served meanwhile, at once."""
    box = Box(quotas=[quota(OTHER, 0, 30)])
    for number in range(2, 12):
        box.ask(number, 20, 12, tenant=OTHER)
    most = 0
    for number in range(20, 26):
        box.step()
        most = max(most, box.resident(OTHER))
        box.ask(number, 5, 1)
        box.step()
        assert number in box.ended
    box.finish()
    assert most <= 12
    assert box.pool.accounts.by_key[namespace(OTHER)].waited
    assert len(box.ended) == 16


def test_a_partition_neither_lends_nor_borrows() -> None:
    """What a partition leaves free is nobody's, and it has nothing of what others leave."""
    box = Box(quotas=[quota(VICTIM, 50, 50, lends=False)])
    for number in range(2, 8):
        box.ask(number, 60, tenant=OTHER)
        box.finish()
    assert box.resident(OTHER) <= 20
    for number in range(12, 18):
        box.ask(number, 60)
        box.finish()
    assert box.resident(VICTIM) <= 20
    assert box.pool.accounts.by_key[namespace(OTHER)].lost == 0


def test_a_request_that_can_never_fit_is_refused_at_once() -> None:
    """Prompts are held against the cap, and against what the others' reservations leave; outputs end there."""
    box = Box(quotas=[quota(OTHER, 0, 10), quota(VICTIM, 60)])
    for tenant, blocks in ((OTHER, 4), (3, 16), (VICTIM, 40)):
        if blocks < 40:
            with pytest.raises(RequestRejectedError) as caught:
                box.ask(1, blocks * BLOCK, tenant=tenant)
            assert caught.value.code is FailureCode.TOO_LONG
        box.ask(2 + tenant, blocks * BLOCK - 3, 50, tenant=tenant)
        box.finish()
        request_tokens = blocks * BLOCK
        assert box.runner.known[0][: request_tokens + 1].count(1) <= 4
    assert len(box.ended) == 3


def test_a_smaller_quota_ends_what_no_longer_fits_and_keeps_the_rest() -> None:
    """After a reload a running request ends at the length that fits now; one that is longer already ends at once."""
    box = Box()
    box.ask(1, 30, 100, tenant=OTHER)
    box.ask(2, 60, 60, tenant=3)
    box.step()
    assert box.scheduler.set_quotas([quota(OTHER, 0, 25), quota(3, 0, 25)]) == [2]
    box.finish()
    assert box.ended == [1]
    assert len(box.runner.known[0]) == 40


def test_members_of_a_group_share_blocks_under_the_groups_account_and_nothing_else() -> None:
    """A member's prefix is found by another member, not by the same tenants outside the group, and service is charged
    to each tenant."""
    box = Box(quotas=[quota(GROUP, 30)])
    prompt = [7] * 21
    for number, tenant, group in ((1, 1, GROUP), (2, 2, GROUP), (3, 1, 0), (4, 3, 0)):
        key = namespace(group) if group else b""
        box.scheduler.add(submit(number, prompt, 2, tenant=tenant, group=key), now_ns=0)
        box.finish()
    assert box.cached == {1: 0, 2: 20, 3: 0, 4: 0}
    assert box.resident(GROUP) == 5
    usage = {use.namespace[0]: use for use in box.scheduler.kv_usage().uses}
    assert usage[GROUP].reserved == 12
    assert usage.keys() == {GROUP, 1, 3}


def test_reservations_larger_than_the_pool_are_no_message() -> None:
    """The sum is checked where the table enters; the scheduler's own sum rounds down."""
    box = Box(quotas=[quota(tenant, 33, 34) for tenant in (1, 2, 3)], num_blocks=41)
    assert box.pool.accounts.total_reserved == 39
