"""Steps beside decoding requests have a budget of time, on a simulated clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from engine.core.scheduler import pace as pace_module
from engine.core.scheduler.pace import STEP_NS, STRETCH, Pace
from engine.core.scheduler.plan import StepPlan
from engine.core.scheduler.scheduler import Scheduler
from tests.engine.core.traffic import Arrival, Clock, Closed, Run, simulate
from tests.engine.support import make_scheduler

PROCESSOR = Clock(base=0.007, token=0.0025)
"""A step of 512 tokens takes 1.3 s, as of a small model on a processor."""

CARD = Clock(base=0.008, token=0.00004)

STREAMS = [Arrival(0.0, tenant, 16, 600) for tenant in (2, 3, 4, 5)]
"""Streams of four tenants with one request each."""

LONG = Closed(tenant=1, concurrency=1, prompt=2_000, output=4)


def scheduler() -> Scheduler:
    """A scheduler with an appliance's defaults on a processor."""
    return make_scheduler(
        num_blocks=2_000,
        block_size=16,
        max_num_seqs=128,
        max_num_batched_tokens=512,
        max_waiting=64,
        max_context=8_192,
        prefix_caching=False,
    )[0]


def steps(clock: Clock) -> tuple[Run, list[float], list[int]]:
    """Streams beside long prompts: the run, seconds of each step in which something decoded, and prompt tokens of those
    with prompts."""
    took, prompts = list[float](), list[int]()

    def watch(plan: StepPlan) -> None:
        if plan.decode_rows:
            took.append(clock.base + clock.token * plan.num_tokens)
            if plan.prefills:
                prompts.append(sum(chunk.length for chunk in plan.prefills))

    return simulate(scheduler(), STREAMS, clock=clock, closed=(LONG,), max_steps=600, watch=watch), took, prompts


def test_streams_beside_long_prompts_wait_for_short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a processor no step beside streams takes longer than the budget, once the first ones have said what a token
    costs. Control: without the budget most of the steps with prompts take 1.3 s."""
    _, took, _ = steps(PROCESSOR)
    budget_s = STEP_NS / 1e9
    assert len(took) > 500 and sum(one > 1.1 * budget_s for one in took) <= 2
    monkeypatch.setattr(pace_module, "STEP_NS", 10**15)
    _, took, prompts = steps(PROCESSOR)
    assert sum(one > 1.0 for one in took) > 0.5 * len(prompts) > 20


def test_prompts_keep_most_of_their_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long prompts beside streams are computed at nine tenths of their speed in full steps at least."""
    short, _, _ = steps(PROCESSOR)
    monkeypatch.setattr(pace_module, "STEP_NS", 10**15)
    full, _, _ = steps(PROCESSOR)
    assert short.tokens / short.seconds >= 0.9 * full.tokens / full.seconds


def test_a_card_has_full_steps() -> None:
    """Where a full step takes less than the budget, nothing is changed."""
    _, _, prompts = steps(CARD)
    assert max(prompts) > 500


def test_a_backlog_from_the_first_moment_says_what_a_token_costs() -> None:
    """An engine that begins with more prompts than it can take has steps of one size alone; they say enough: only its
    first steps take longer than the budget."""
    backlog = [Arrival(0.0, tenant, 2_000, 50) for tenant in (1, 2, 3, 4) for _ in range(8)]
    took = list[float]()

    def watch(plan: StepPlan) -> None:
        if plan.decode_rows:
            took.append(PROCESSOR.base + PROCESSOR.token * plan.num_tokens)

    simulate(scheduler(), backlog, clock=PROCESSOR, max_steps=600, watch=watch)
    assert len(took) > 300 and sum(one > 1.1 * STEP_NS / 1e9 for one in took) <= 2


def played(cost_ns: Callable[[int], int], prompts: Sequence[int], plain: int) -> tuple[Pace, list[int]]:
    """A pace and the duration of each step with prompts: prompts of these tokens beside four decoding requests, with
    so many steps of those alone before each. ``cost_ns``: of a step, by its tokens."""
    pace, now, took = Pace(), 0, list[int]()

    def step(tokens: int) -> None:
        nonlocal now
        pace.begin(now)
        pace.planned(4 + tokens, tokens)
        now += cost_ns(4 + tokens)

    for prompt in prompts:
        for _ in range(plain):
            step(0)
        left = prompt
        while left > 0:
            most = pace.prompt_tokens(4, now)
            tokens = left if most is None else min(left, most)
            step(tokens)
            left -= tokens
            took.append(cost_ns(4 + tokens))
    pace.begin(now)
    return pace, took


def test_long_stretches_without_prompts_teach_nothing_of_them() -> None:
    """Where rows cost nothing until the weights' time is filled, as on a card, each of the next prompts begins with a
    step within the budget: only the very first ones have to say what a token costs."""
    _, took = played(lambda tokens: max(30_000_000, 2_500_000 * tokens), [1_000] * 20, 500)
    assert sum(one > 1.4 * STEP_NS for one in took) <= 2
    _, took = played(lambda tokens: max(30_000_000, 200_000 * tokens), [12, 8_000, 12, 12, 6_000, 12, 8_000] * 4, 500)
    assert sum(one > 1.4 * STEP_NS for one in took) <= 4


def test_a_machine_that_stood_still_shortens_no_step_for_long() -> None:
    """One step of a minute among others: the next prompts have the steps that they had, by a fifth."""
    pauses = iter([0] * 40 + [60_000_000_000] + [0] * 10_000)
    pace, _ = played(
        lambda tokens: 7_000_000 + 2_500_000 * tokens + (next(pauses) if tokens > 4 else 0), [2_000] * 6, 20
    )
    undisturbed, _ = played(lambda tokens: 7_000_000 + 2_500_000 * tokens, [2_000] * 6, 20)
    found, usual = pace.prompt_tokens(4, 0), undisturbed.prompt_tokens(4, 0)
    assert found is not None and usual is not None and found > 0.8 * usual


@pytest.mark.parametrize(("base_ms", "token_ms"), [(7.0, 2.5), (80.0, 9.0), (400.0, 3.0), (7.0, 0.04)])
def test_the_budget_is_time_or_a_part_of_what_a_step_costs_anyway(base_ms: float, token_ms: float) -> None:
    """While requests decode, prompts have what fits into the budget, and twice what the step costs without them where
    that is more, or a few tokens. Where none decodes, a step is full; before anything was learned it is short."""
    pace, _ = played(lambda tokens: int(1e6 * (base_ms + token_ms * tokens)), [500] * 50, 5)
    found, plain_ms = pace.prompt_tokens(4, 0), base_ms + 4 * token_ms
    expected = max(STEP_NS / 1e6 - plain_ms, STRETCH * plain_ms) / token_ms
    expected = max(expected, STRETCH * pace_module.MIN_FIXED_TOKENS)
    assert found == pytest.approx(expected, rel=0.02, abs=1.5)
    assert pace.prompt_tokens(0, 0) is None
    assert Pace().prompt_tokens(4, 0) == STRETCH * (pace_module.START_FIXED_TOKENS + 4)
