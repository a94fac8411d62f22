"""Accounts: lifting, debts, weights, and the bound on how far backlogged namespaces drift apart."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.request import Request
from engine.scheduler.fairness import MAX_IDLE_ACCOUNTS, OUTPUT_COST, Accounts
from tests.engine.support import make_scheduler, submit


def queued(accounts: Accounts, order: int, tenant: int, *, weight: int = 1) -> Request:
    """A request that has just been queued."""
    request = Request(submit(order, [1], tenant=tenant), order=order, limit=9, stop_ids=frozenset(), arrival_ns=0)
    accounts.enter(request, weight)
    return request


def test_a_namespace_that_was_idle_starts_level_with_the_least_served() -> None:
    """Time not used is not saved up: the newcomer is not ahead of those who worked."""
    accounts = Accounts()
    busy, busier = queued(accounts, 0, 1), queued(accounts, 1, 2)
    busy.account.charge_input(100)
    busier.account.charge_input(300)
    late = queued(accounts, 2, 3)
    assert late.account.service == 100


def test_a_debt_survives_idleness() -> None:
    """A namespace cannot get rid of its service by leaving for a moment."""
    accounts = Accounts()
    other = queued(accounts, 0, 1)
    spender = queued(accounts, 1, 2)
    spender.account.charge_input(500)
    spender.account.waiting.clear()
    accounts.leave(spender)
    again = queued(accounts, 2, 2)
    assert again.account.service == 500
    assert accounts.least_served(waiting=True) is other.account


def test_after_a_pause_of_everybody_nobody_is_ahead() -> None:
    """When all were idle, newcomers start where the last one stopped."""
    accounts = Accounts()
    last = queued(accounts, 0, 1)
    last.account.charge_input(400)
    last.account.waiting.clear()
    accounts.leave(last)
    assert queued(accounts, 1, 2).account.service == 400


def test_service_counts_by_weight() -> None:
    """A namespace of weight 4 is charged a quarter."""
    accounts = Accounts()
    request = queued(accounts, 0, 1, weight=4)
    request.account.charge_input(100)
    assert request.account.service == 25
    assert request.account.charge_output == OUTPUT_COST / 4


def test_remembered_debts_are_bounded() -> None:
    """However many namespaces come and go, only the largest debts are kept."""
    accounts = Accounts()
    keeper = queued(accounts, 0, 0)
    for number in range(MAX_IDLE_ACCOUNTS + 10):
        request = Request(submit(number + 1, [1]), order=number + 1, limit=9, stop_ids=frozenset(), arrival_ns=0)
        request.namespace = number.to_bytes(32, "little")
        accounts.enter(request, 1)
        request.account.charge_input(number)
        request.account.waiting.clear()
        accounts.leave(request)
    assert len(accounts._idle) <= MAX_IDLE_ACCOUNTS
    assert max(accounts._idle.values()) == MAX_IDLE_ACCOUNTS + 9
    assert keeper.account.service == 0


def serve_backlog(weights: dict[int, int], prompts: dict[int, list[int]], steps: int) -> dict[int, float]:
    """Keep every tenant backlogged for some steps; gives tokens served (input and output cost) by tenant."""
    scheduler, _ = make_scheduler(num_blocks=400, max_num_seqs=8, max_num_batched_tokens=32, prefix_caching=False)
    served = dict.fromkeys(weights, 0.0)
    owners: dict[int, int] = {}
    number = 0
    for step in range(steps):
        for tenant in weights:
            while sum(1 for one in owners.values() if one == tenant) < 10:
                number += 1
                owners[number] = tenant
                size = prompts[tenant][number % len(prompts[tenant])]
                scheduler.add(submit(number, [step % 9] * size, 4, tenant=tenant, weight=weights[tenant]), now_ns=0)
        plan = scheduler.schedule(now_ns=0)
        assert plan is not None
        result = scheduler.commit(plan, [1] * len(plan.sample_rows))
        for request, finish in zip(result.requests, result.finishes, strict=True):
            served[owners[request]] += OUTPUT_COST
            if finish:
                del owners[request]
        live = {request.row: request for request in scheduler._live.values() if request.row >= 0}
        for chunk in plan.prefills:
            if chunk.row in live:
                served[owners[live[chunk.row].request_id]] += chunk.length
    return served


@given(
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.lists(st.integers(1, 40), min_size=1, max_size=3),
    st.lists(st.integers(1, 40), min_size=1, max_size=3),
)
def test_backlogged_namespaces_are_served_by_weight(
    weights: tuple[int, int], prompts_one: list[int], prompts_two: list[int]
) -> None:
    """Two namespaces that always have work get service in proportion to their weights, whatever their prompts."""
    served = serve_backlog(dict(enumerate(weights, 1)), {1: prompts_one, 2: prompts_two}, 150)
    shares = [served[tenant] / weight for tenant, weight in enumerate(weights, 1)]
    assert abs(shares[0] - shares[1]) <= 0.25 * max(shares) + 150
