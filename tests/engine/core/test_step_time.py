"""Steps beside decoding requests have a budget of time, on a simulated clock."""

from __future__ import annotations

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


def learned(base_ns: int, token_ns: int) -> Pace:
    """A pace that has seen steps of different sizes."""
    pace, now = Pace(), 0
    for number in range(200):
        pace.begin(now)
        tokens = 1 + 37 * number % 64
        pace.planned(tokens)
        now += base_ns + token_ns * tokens
    return pace


@pytest.mark.parametrize(("base_ms", "token_ms"), [(7.0, 2.5), (80.0, 9.0), (400.0, 3.0), (7.0, 0.04)])
def test_the_budget_is_time_or_a_part_of_what_a_step_costs_anyway(base_ms: float, token_ms: float) -> None:
    """While requests decode, prompts have what fits into the budget, and twice what the step costs without them where
    that is more. While none decodes, or nothing was learned, a step is full."""
    pace = learned(int(base_ms * 1e6), int(token_ms * 1e6))
    found = pace.prompt_tokens(4, 0)
    assert found is not None
    fits = (STEP_NS / 1e6 - base_ms) / token_ms - 4
    least = STRETCH * (max(base_ms / token_ms, pace_module.MIN_FIXED_TOKENS) + 4)
    assert found == pytest.approx(max(fits, least), rel=0.02, abs=1.5)
    assert pace.prompt_tokens(0, 0) is None and Pace().prompt_tokens(4, 0) is None
