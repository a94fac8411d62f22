"""Accounts: lifting, debts, weights, and the bound on how far backlogged namespaces drift apart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.request import Request
from engine.scheduler.fairness import INPUT_COST, MAX_IDLE_ACCOUNTS, OUTPUT_COST, Account, Accounts
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


ROWS = 8
OUTPUT = 4
LONGEST = 40


def largest_gap(weights: tuple[int, int], prompts: tuple[list[int], list[int]]) -> float:
    """Keep two tenants backlogged for 150 steps; the largest difference of their services at any time."""
    scheduler, _ = make_scheduler(num_blocks=400, max_num_seqs=ROWS, max_num_batched_tokens=32, prefix_caching=False)
    live = {1: set[int](), 2: set[int]()}
    number, gap = 0, 0.0
    for _ in range(150):
        for tenant, weight, lengths in zip((1, 2), weights, prompts, strict=True):
            while len(live[tenant]) < 2 * ROWS:
                number += 1
                live[tenant].add(number)
                prompt = [number % 9] * lengths[number % len(lengths)]
                scheduler.add(submit(number, prompt, OUTPUT, tenant=tenant, weight=weight), now_ns=0)
        services = [account.service for account in scheduler._accounts]
        gap = max(gap, abs(services[0] - services[1]))
        plan = scheduler.schedule(now_ns=0)
        assert plan is not None
        result = scheduler.commit(plan, [1] * len(plan.sample_rows))
        for request, finish in zip(result.requests, result.finishes, strict=True):
            if finish:
                live[1].discard(request)
                live[2].discard(request)
    return gap


lengths = st.lists(st.integers(1, LONGEST), min_size=1, max_size=3)


@given(st.tuples(st.integers(1, 4), st.integers(1, 4)), st.tuples(lengths, lengths))
def test_backlogged_namespaces_stay_within_the_proved_bound(
    weights: tuple[int, int], prompts: tuple[list[int], list[int]]
) -> None:
    """Two namespaces that always have work never drift apart by more than twice the larger of one prompt and one full
    batch of outputs (theorem 4.4 of the paper), whatever they send."""
    bound = 2 * max(INPUT_COST * LONGEST, OUTPUT_COST * ROWS * OUTPUT) / min(weights)
    assert largest_gap(weights, prompts) <= bound


def test_without_the_counters_the_bound_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positive control: served by order of arrival, a tenant of long prompts gets far ahead of one of short ones."""

    def oldest_first(self: Accounts, *, waiting: bool, without: object = ()) -> Account | None:
        able = [one for one in self if one.prefilling is not None or (waiting and one.waiting)]
        return min(able, key=lambda one: one.prefilling.order if one.prefilling else one.waiting[0].order, default=None)

    bound = 2 * max(INPUT_COST * LONGEST, OUTPUT_COST * ROWS * OUTPUT)
    assert largest_gap((1, 1), ([LONGEST], [1])) <= bound
    monkeypatch.setattr(Accounts, "least_served", oldest_first)
    assert largest_gap((1, 1), ([LONGEST], [1])) > 5 * bound
