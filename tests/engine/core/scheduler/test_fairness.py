"""Accounts: lifting, debts, weights, what is charged, and the bound on how far backlogged namespaces drift apart."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.fairness import fairness
from engine.core.fairness.fairness import MAX_IDLE_ACCOUNTS, PriorityClass
from engine.core.fairness.prices import OUTPUT_COST, Prices, charge_input
from engine.core.fairness.tenancy import FairnessBrokenError
from engine.core.request import Request
from engine.core.scheduler.scheduler import Scheduler
from isolation.ipc.messages import Priority
from tests.engine.core.traffic import Arrival, azure, backlog, bursts, simulate
from tests.engine.support import make_scheduler, submit

HOLD_PRICE = 0.5


def one_class() -> PriorityClass:
    """A priority without accounts."""
    return PriorityClass(0, Prices(HOLD_PRICE))


def queued(one: PriorityClass, order: int, tenant: int, *, key: bytes | None = None, weight: int = 1) -> Request:
    """A request that has just been queued, as the scheduler does it."""
    asked = submit(order, [1], tenant=tenant, weight=weight)
    asked = asked if key is None else replace(asked, namespace=key)
    request = Request.of(asked, order=order, limit=9, stop_ids=frozenset(), arrival_ns=0)
    one.enter(request)
    request.account.num_live += 1
    if not (request.account.waiting or request.account.suspended):
        one.join_backlog(request)
    request.account.push(request)
    return request


def running(one: PriorityClass, request: Request) -> None:
    """One more request of the account runs."""
    request.account.num_running += 1
    one.running[request.account] = None
    request.account.ticket = 0


def unqueued(one: PriorityClass, request: Request) -> None:
    """The request leaves the queue."""
    if len(request.account.waiting) == 1:
        one.leave_backlog(request.account)
    request.account.remove(request)


def gone(one: PriorityClass, request: Request) -> None:
    """The request leaves queue and account."""
    unqueued(one, request)
    request.account.num_live -= 1
    if not request.account.num_live:
        one.make_idle(request.account)


def test_a_namespace_that_was_idle_starts_level_with_the_least_served() -> None:
    """Time not used is not saved up: the newcomer is not ahead of those who worked."""
    line = one_class()
    for order, service in enumerate((100.0, 300.0)):
        request = queued(line, order, order)
        request.account.service = service
        running(line, request)
    assert queued(line, 2, 3).account.service == 100


def test_a_namespace_without_waiting_requests_saves_nothing_either() -> None:
    """Running with an empty queue is no claim on the past: with its next request the account is lifted as well."""
    line = one_class()
    busy, light = queued(line, 0, 1), queued(line, 1, 2)
    for request in (busy, light):
        running(line, request)
    unqueued(line, light)
    busy.account.service = 1_000.0
    assert queued(line, 2, 2).account is light.account
    assert light.account.service == 1_000


def test_a_debt_survives_idleness() -> None:
    """A namespace cannot get rid of its service by leaving for a moment."""
    line = one_class()
    other = queued(line, 0, 1)
    spender = queued(line, 1, 2)
    charge_input(spender.account, 500)
    gone(line, spender)
    assert queued(line, 2, 2).account.service == 500
    first = line.first_cold()
    assert first is not None
    assert first[4] is other.account


def test_after_a_pause_of_everybody_nobody_is_ahead() -> None:
    """When all were idle, newcomers start where the last one stopped."""
    line = one_class()
    last = queued(line, 0, 1)
    charge_input(last.account, 400)
    gone(line, last)
    assert queued(line, 1, 2).account.service == 400


def test_service_counts_by_weight() -> None:
    """A namespace of weight 4 is charged a quarter, of its prompts and of its outputs."""
    line = one_class()
    request = queued(line, 0, 1, weight=4)
    charge_input(request.account, 100)
    assert request.account.service == 25
    request.kv.blocks = [1, 2]
    request.account.num_decoding, request.account.num_decoding_blocks = 1, request.kv.num_blocks
    line.prices.reprice(request)
    assert request.account.step_charge == (OUTPUT_COST + 2 * HOLD_PRICE) / 4


def test_a_long_context_costs_more_for_each_token() -> None:
    """With an average share of memory a token costs twice its bare price; with twice that, three times."""
    scheduler, _ = make_scheduler(num_blocks=256, max_num_seqs=4, max_num_batched_tokens=800, prefix_caching=False)
    scheduler.add(submit(1, [1] * 255, 8, tenant=1), now_ns=0)
    scheduler.add(submit(2, [2] * 511, 8, tenant=2), now_ns=0)
    for _ in range(2):
        plan = scheduler.schedule(now_ns=0)
        assert plan is not None
        scheduler.commit(plan, [1] * len(plan.sample_rows))
    charges = {account.key[0]: account.step_charge for account in scheduler._tenancy}
    assert charges == {1: OUTPUT_COST * 2, 2: OUTPUT_COST * 3}


def test_remembered_debts_are_bounded() -> None:
    """However many namespaces come and go, only the largest debts are kept."""
    line = one_class()
    keeper = queued(line, 0, 0)
    for number in range(MAX_IDLE_ACCOUNTS + 10):
        request = queued(line, number + 1, 0, key=number.to_bytes(32, "little"))
        charge_input(request.account, number)
        gone(line, request)
    assert len(line._idle) <= MAX_IDLE_ACCOUNTS
    assert max(service for service, _ in line._idle.values()) == MAX_IDLE_ACCOUNTS + 9
    assert keeper.account.service == 0


def test_entries_of_accounts_that_stopped_waiting_are_bounded() -> None:
    """A namespace that queues and aborts again and again leaves nothing behind."""
    line = one_class()
    queued(line, 0, 0)
    for number in range(1, 2_000):
        request = queued(line, number, 1 + number % 7)
        request.account.service += number
        gone(line, request)
    assert len(line._cold) <= 2 * len(line.active) + fairness.MAX_STALE_TICKETS


ROWS = 8
OUTPUT = 4
LONGEST = 40


def small(**changes: object) -> Scheduler:
    """A scheduler in which everything is scarce."""
    values = {"num_blocks": 60, "max_num_seqs": ROWS, "max_num_batched_tokens": 32, "prefix_caching": False, **changes}
    return make_scheduler(**values)[0]


def largest_spread(scheduler: Scheduler, arrivals: Iterator[Arrival], steps: int) -> float:
    """Run a backlog; the largest difference of services of backlogged accounts at any time. The bound is held in
    every step."""
    line = scheduler._tenancy.classes[Priority.NORMAL]
    worst = 0.0

    def watch(_plan: object) -> None:
        nonlocal worst
        worst = max(worst, line.spread())
        scheduler._tenancy.check()

    simulate(scheduler, arrivals, max_steps=steps, watch=watch)
    return worst


shapes = st.lists(st.tuples(st.integers(1, LONGEST), st.integers(1, 2 * OUTPUT)), min_size=1, max_size=3)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    weights=st.lists(st.integers(1, 4), min_size=2, max_size=4),
    choices=st.lists(shapes, min_size=4, max_size=4),
    blocks=st.integers(14, 120),
)
def test_backlogged_namespaces_stay_within_the_proved_bound(
    weights: list[int], choices: list[list[tuple[int, int]]], blocks: int
) -> None:
    """Whatever tenants of any weights send and however scarce memory is: in every step the services of those that
    always have work lie within the bound, which itself is what one prompt and one full batch of outputs can cost."""
    tenants = {number + 1: choices[number] for number in range(len(weights))}
    scheduler = small(num_blocks=blocks)
    arrivals = backlog(tenants, {number + 1: weight for number, weight in enumerate(weights)})
    largest_spread(scheduler, arrivals, 150)
    line = scheduler._tenancy.classes[Priority.NORMAL]
    hold = OUTPUT_COST * ROWS / blocks
    dearest = OUTPUT_COST + hold * ((LONGEST + 2 * OUTPUT) / 4 + 2)
    assert line.bound <= (LONGEST + ROWS * 2 * OUTPUT * dearest) / min(weights)
    assert line.allowance <= LONGEST + 2 * OUTPUT


def oldest_first(self: PriorityClass, *, admit: bool) -> list[fairness.Turn]:
    """Turns by order of arrival, as in a server without fairness."""
    able = [one for one in self.active.values() if one.prefilling or (admit and one.waiting)]
    return [(float(fairness.turn_of(one)[2]), 0, 0, number, one) for number, one in enumerate(able)]


def test_without_the_counters_the_bound_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positive control: served by order of arrival, a tenant of long requests gets far ahead of one of short ones,
    and the scheduler's own check finds it."""
    tenants = {1: [(LONGEST, 4 * OUTPUT)], 2: [(1, 1)]}
    fair = small()
    largest_spread(fair, backlog(tenants, {}), 400)
    monkeypatch.setattr(PriorityClass, "hot_turns", oldest_first)
    monkeypatch.setattr(PriorityClass, "first_cold", lambda self: None)
    monkeypatch.setattr(PriorityClass, "least", lambda self: 0.0)
    with pytest.raises(FairnessBrokenError):
        largest_spread(small(), backlog(tenants, {}), 400)


def test_a_defect_is_counted_where_it_does_not_raise() -> None:
    """In service a broken bound is counted and told to the host, and serving goes on."""
    scheduler = small()
    scheduler._tenancy._raise_defects = False
    simulate(scheduler, backlog({1: [(8, 4)], 2: [(8, 4)]}, {}), max_steps=20)
    assert scheduler.num_defects == 0
    account = next(iter(scheduler._tenancy))
    account.service += 1e6
    scheduler._tenancy.check()
    assert scheduler.num_defects == 1


def jain(values: list[float]) -> float:
    """Jain's index: 1 when all are equal, 1/n when one has everything."""
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))


def served(scheduler: Scheduler) -> list[float]:
    """Service that each account has had."""
    return [account.service for account in scheduler._tenancy]


def test_equal_tenants_are_served_equally() -> None:
    """Eight backlogged tenants with prompts from 8 to 400 tokens and outputs from 200 to 4: Jain's index of what they
    were charged is above 0.99, and with the shares of weights 1 to 4 as well."""
    kinds = {tenant: [(8 * tenant * tenant % 401 + 1, 200 // tenant)] for tenant in range(1, 9)}
    for weights in ({}, {1: 4, 2: 3, 3: 2}):
        scheduler, _ = make_scheduler(
            num_blocks=1_000,
            block_size=16,
            max_num_seqs=32,
            max_num_batched_tokens=256,
            prefix_caching=False,
            max_waiting=160,
            max_context=1_000,
        )
        simulate(scheduler, backlog(kinds, weights), max_steps=4_000)
        assert len(served(scheduler)) == 8
        assert jain(served(scheduler)) >= 0.99


def traces(shared_data: Path, requests: int) -> Iterator[Arrival]:
    """Four tenants of the Azure conversation trace and two of bursts, in order of time, sped up to saturation; the
    whole again and again."""
    conversation = azure(
        shared_data / "traces" / "AzureLLMInferenceTrace_conv.csv", tenants=4, limit=requests, speed=20.0
    )
    code = bursts(tenants=2, count=requests // 2, first_tenant=5)
    span = max(conversation[-1].at, 1.0)
    both = sorted((*conversation, *code), key=lambda one: one.at)
    for turn in itertools.count():
        for one in both:
            yield Arrival(one.at + turn * span, one.tenant, one.prompt, one.output, 1 + one.tenant % 3)


@pytest.mark.parametrize(
    ("steps", "requests"), [(10_000, 1_000), pytest.param(100_000, 10_000, marks=pytest.mark.full)]
)
def test_the_bound_holds_on_real_traffic(shared_data: Path, steps: int, requests: int) -> None:
    """Azure's conversations beside bursts of code completions, far beyond what the engine can serve, memory scarce:
    the check in every 16th step finds nothing, and preemption stays rare."""
    scheduler, pool = make_scheduler(
        num_blocks=4_000,
        block_size=16,
        max_num_seqs=64,
        max_num_batched_tokens=512,
        max_waiting=1_024,
        prefix_caching=False,
        max_context=8_192,
    )
    counter = itertools.count()

    def watch(_plan: object) -> None:
        if next(counter) % 16 == 0:
            scheduler._tenancy.check()

    run = simulate(scheduler, traces(shared_data, requests), max_steps=steps, watch=watch)
    assert run.steps == steps
    assert scheduler.num_waiting > 100
    ended = sum(1 for one in run.seen.values() if one.end is not None)
    assert scheduler.num_preempted <= ended / 20
    scheduler.check_integrity()
    assert pool.num_available < pool.num_blocks
