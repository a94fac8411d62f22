"""Accounts: lifting, debts, weights, what is charged, and the bound on how far backlogged namespaces drift apart."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import Request
from engine.scheduler import fairness
from engine.scheduler.account import OUTPUT_COST
from engine.scheduler.fairness import MAX_IDLE_ACCOUNTS, Accounts, Line
from engine.scheduler.scheduler import FairnessBrokenError, Scheduler
from isolation.ipc.messages import Priority
from tests.engine.support import make_scheduler, submit
from tests.engine.traffic import Arrival, azure, backlog, bursts, simulate

HOLD_PRICE = 0.5


def one_line() -> Line:
    """A line without accounts."""
    return Accounts(1, hold_price=HOLD_PRICE).lines[0]


def queued(line: Line, order: int, tenant: int, *, weight: int = 1) -> Request:
    """A request that has just been queued."""
    request = Request(submit(order, [1], tenant=tenant), order=order, limit=9, stop_ids=frozenset(), arrival_ns=0)
    line.enter(request, weight)
    return request


def gone(line: Line, request: Request) -> None:
    """The request leaves queue and account."""
    line.unqueue(request)
    line.leave(request)


def test_a_namespace_that_was_idle_starts_level_with_the_least_served() -> None:
    """Time not used is not saved up: the newcomer is not ahead of those who worked."""
    line = one_line()
    for order, service in enumerate((100.0, 300.0)):
        line.enter(request := Request(
            submit(order, [1], tenant=order), order=order, limit=9, stop_ids=frozenset(), arrival_ns=0
        ), 1)  # fmt: skip
        request.account.service = service
        line.begin_running(request.account)
    assert queued(line, 2, 3).account.service == 100


def test_a_namespace_without_waiting_requests_saves_nothing_either() -> None:
    """Running with an empty queue is no claim on the past: with its next request the account is lifted as well."""
    line = one_line()
    busy, light = queued(line, 0, 1), queued(line, 1, 2)
    for request in (busy, light):
        line.begin_running(request.account)
    line.unqueue(light)
    busy.account.service = 1_000.0
    assert queued(line, 2, 2).account is light.account
    assert light.account.service == 1_000


def test_a_debt_survives_idleness() -> None:
    """A namespace cannot get rid of its service by leaving for a moment."""
    line = one_line()
    other = queued(line, 0, 1)
    spender = queued(line, 1, 2)
    spender.account.charge_input(500)
    gone(line, spender)
    assert queued(line, 2, 2).account.service == 500
    turns = fairness.Turns(line, admit=True)
    assert turns.next(admit=True) is other.account


def test_after_a_pause_of_everybody_nobody_is_ahead() -> None:
    """When all were idle, newcomers start where the last one stopped."""
    line = one_line()
    last = queued(line, 0, 1)
    last.account.charge_input(400)
    gone(line, last)
    assert queued(line, 1, 2).account.service == 400


def test_service_counts_by_weight() -> None:
    """A namespace of weight 4 is charged a quarter, of its prompts and of its outputs."""
    line = one_line()
    request = queued(line, 0, 1, weight=4)
    request.account.charge_input(100)
    assert request.account.service == 25
    request.blocks = [1, 2]
    request.account.begin_decoding(request)
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
    charges = {account.key[0]: account.step_charge for account in scheduler._live.accounts}
    assert charges == {1: OUTPUT_COST * 2, 2: OUTPUT_COST * 3}


def test_remembered_debts_are_bounded() -> None:
    """However many namespaces come and go, only the largest debts are kept."""
    line = one_line()
    keeper = queued(line, 0, 0)
    for number in range(MAX_IDLE_ACCOUNTS + 10):
        request = Request(submit(number + 1, [1]), order=number + 1, limit=9, stop_ids=frozenset(), arrival_ns=0)
        request.namespace = number.to_bytes(32, "little")
        line.enter(request, 1)
        request.account.charge_input(number)
        gone(line, request)
    assert len(line._idle) <= MAX_IDLE_ACCOUNTS
    assert max(service for service, _ in line._idle.values()) == MAX_IDLE_ACCOUNTS + 9
    assert keeper.account.service == 0


def test_entries_of_accounts_that_stopped_waiting_are_bounded() -> None:
    """A namespace that queues and aborts again and again leaves nothing behind."""
    line = one_line()
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
    line = scheduler._live.accounts.lines[Priority.NORMAL]
    worst = 0.0

    def watch(_plan: object) -> None:
        nonlocal worst
        worst = max(worst, line.spread())
        scheduler.check_fairness()

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
    line = scheduler._live.accounts.lines[Priority.NORMAL]
    hold = OUTPUT_COST * ROWS / blocks
    dearest = OUTPUT_COST + hold * ((LONGEST + 2 * OUTPUT) / 4 + 2)
    assert line.bound <= (LONGEST + ROWS * 2 * OUTPUT * dearest) / min(weights)
    assert line.allowance <= LONGEST + 2 * OUTPUT


def oldest_first(self: Line, *, admit: bool) -> list[fairness.Turn]:
    """Turns by order of arrival, as in a server without fairness."""
    able = [one for one in self.active.values() if one.prefilling or (admit and one.waiting)]
    return [(float(fairness.turn_of(one)[2]), 0, 0, number, one) for number, one in enumerate(able)]


def test_without_the_counters_the_bound_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positive control: served by order of arrival, a tenant of long requests gets far ahead of one of short ones,
    and the scheduler's own check finds it."""
    tenants = {1: [(LONGEST, 4 * OUTPUT)], 2: [(1, 1)]}
    fair = small()
    largest_spread(fair, backlog(tenants, {}), 400)
    monkeypatch.setattr(Line, "hot_turns", oldest_first)
    monkeypatch.setattr(Line, "first_cold", lambda self: None)
    monkeypatch.setattr(Line, "least", lambda self: 0.0)
    with pytest.raises(FairnessBrokenError):
        largest_spread(small(), backlog(tenants, {}), 400)


def test_a_defect_is_counted_where_it_does_not_raise() -> None:
    """In service a broken bound is counted and told to the host, and serving goes on."""
    scheduler = small()
    scheduler._raise_defects = False
    simulate(scheduler, backlog({1: [(8, 4)], 2: [(8, 4)]}, {}), max_steps=20)
    assert scheduler.num_defects == 0
    account = next(iter(scheduler._live.accounts))
    account.service += 1e6
    scheduler.check_fairness()
    assert scheduler.num_defects == 1


def jain(values: list[float]) -> float:
    """Jain's index: 1 when all are equal, 1/n when one has everything."""
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))


def served(scheduler: Scheduler) -> list[float]:
    """Service that each account has had."""
    return [account.service for account in scheduler._live.accounts]


def test_equal_tenants_are_served_equally() -> None:
    """Eight backlogged tenants with prompts from 8 to 400 tokens and outputs from 200 to 4: Jain's index of what they
    were charged is above 0.99, and with the shares of weights 1 to 4 as well."""
    kinds = {tenant: [(8 * tenant * tenant % 401 + 1, 200 // tenant)] for tenant in range(1, 9)}
    for weights in ({}, {1: 4, 2: 3, 3: 2}):
        scheduler, _ = make_scheduler(
            num_blocks=1_000, block_size=16, max_num_seqs=32, max_num_batched_tokens=256, prefix_caching=False,
            max_waiting=160, max_context=1_000,
        )  # fmt: skip
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
        num_blocks=4_000, block_size=16, max_num_seqs=64, max_num_batched_tokens=512, max_waiting=1_024,
        prefix_caching=False, max_context=8_192,
    )  # fmt: skip
    counter = itertools.count()

    def watch(_plan: object) -> None:
        if next(counter) % 16 == 0:
            scheduler.check_fairness()

    run = simulate(scheduler, traces(shared_data, requests), max_steps=steps, watch=watch)
    assert run.steps == steps
    assert scheduler.num_waiting > 100
    ended = sum(1 for one in run.seen.values() if one.end is not None)
    assert scheduler.num_preempted <= ended / 20
    scheduler.check_integrity()
    assert pool.num_available < pool.num_blocks
