"""A light tenant beside a flood, on a simulated clock: its time to first token, what the flood keeps, how that is
learned, and preemptions on real traffic."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from engine.core.fairness.tenancy import Fairness
from engine.core.scheduler import pace as pace_module
from engine.core.scheduler.forecast import Forecast
from engine.core.scheduler.pace import MAX_FIXED_TOKENS, MIN_FIXED_TOKENS, START_FIXED_TOKENS, Pace
from engine.core.scheduler.scheduler import Scheduler
from tests.engine.core.traffic import Arrival, Clock, Closed, Run, azure, simulate
from tests.engine.support import make_scheduler

CLOCK = Clock(base=0.003, token=0.00003)
"""A step without tokens takes as long as a hundred tokens, as on published accelerators."""

PERIOD_S = 0.25
VICTIMS = 80
ATTACKS = {
    "flood": Closed(tenant=1, concurrency=48, prompt=20, output=64),
    "long prompts": Closed(tenant=1, concurrency=48, prompt=2_000, output=8),
    "long outputs": Closed(tenant=1, concurrency=48, prompt=64, output=4_000),
}


def engine_like() -> Scheduler:
    """A scheduler with an appliance's defaults."""
    return make_scheduler(
        num_blocks=4_000,
        block_size=16,
        max_num_seqs=128,
        max_num_batched_tokens=512,
        max_waiting=1_024,
        max_context=8_192,
        prefix_caching=False,
    )[0]


@functools.cache
def victim_beside(attack: str = "", *, full_steps: bool = False) -> Run:
    """Four short requests a second of tenant 2, at moments that drift against the steps; alone, or beside an attack.
    ``full_steps``: none is shortened for the light tenant. On a simulated clock, so each is run once."""
    arrivals = [Arrival(PERIOD_S * (number + 0.04 * (number % 23)), 2, 20, 16) for number in range(VICTIMS)]
    closed = (ATTACKS[attack],) if attack else ()
    most = int(PERIOD_S * VICTIMS / CLOCK.base)
    with pytest.MonkeyPatch.context() as patch:
        if full_steps:
            patch.setattr(Fairness, "_is_light", lambda *_: False)
        return simulate(engine_like(), arrivals, clock=CLOCK, closed=closed, max_steps=most)


def p99(values: list[float]) -> float:
    """The 99th percentile of sorted values."""
    return values[int(len(values) * 0.99)]


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_light_tenant_keeps_its_time_to_first_token(attack: str) -> None:
    """Beside 48 requests at once of another tenant, of any shape, the 99th percentile is at most five times that of
    the same requests alone."""
    alone, beside = victim_beside().ttfts(2), victim_beside(attack).ttfts(2)
    assert len(alone) == VICTIMS
    assert len(beside) >= VICTIMS // 2
    assert p99(beside) <= 5 * p99(alone)


def test_without_short_steps_long_prompts_are_felt() -> None:
    """Positive control: with full steps at all times the same flood of long prompts breaks the bar."""
    alone, beside = victim_beside().ttfts(2), victim_beside("long prompts", full_steps=True).ttfts(2)
    assert p99(beside) > 5 * p99(alone)


def test_the_flood_keeps_most_of_its_speed() -> None:
    """A flood of long prompts beside the light tenant computes at least 60 % of what full steps would have."""
    short, full = victim_beside("long prompts"), victim_beside("long prompts", full_steps=True)
    assert short.tokens / short.seconds >= 0.6 * full.tokens / full.seconds


@pytest.mark.parametrize("fixed", [20, 100, 300])
def test_the_cost_of_a_step_is_learned_whatever_the_machine(fixed: int) -> None:
    """From steps of different sizes, ten nanoseconds or a millisecond a token: how many tokens an empty step is
    worth. Equal steps tell nothing and change nothing."""
    for token_ns in (10, 1_000_000):
        pace, now = Pace(), 0
        for number in range(200):
            pace.begin(now)
            tokens = 1 + 37 * number % 64
            pace.planned(tokens, 0)
            now += token_ns * (fixed + tokens)
        assert pace.fixed_tokens == pytest.approx(fixed, rel=0.01)
    equal, now = Pace(), 0
    for _ in range(200):
        equal.begin(now)
        equal.planned(32, 0)
        now += 1_000
    assert equal.fixed_tokens == START_FIXED_TOKENS


def test_odd_clocks_do_no_harm() -> None:
    """A clock that stands still or jumps gives a value inside the range, and a pause counts for nothing."""
    pace, now = Pace(), 0
    for number in range(300):
        pace.begin(now)
        pace.planned(1 + number % 50, number % 50)
        now += (0, 5, 10**12)[number % 3]
        if number % 7 == 0:
            pace.pause()
    assert MIN_FIXED_TOKENS <= pace.fixed_tokens <= MAX_FIXED_TOKENS


def test_steps_are_short_only_after_a_light_request() -> None:
    """The bound holds for a while after such a request, also where none decodes, and grows with those that do."""
    pace = Pace()
    assert pace.prompt_tokens(0, 0) is None
    pace.note_light(0)
    for decodes in (0, 10):
        assert pace.prompt_tokens(decodes, 1) == pace_module.STRETCH * (START_FIXED_TOKENS + decodes)
    assert pace.prompt_tokens(0, pace_module.LIGHT_MEMORY_NS + 1) is None


@pytest.mark.full
@pytest.mark.parametrize("requests", [1_000, 10_000])
def test_preemption_is_rare_on_real_traffic(shared_data: Path, monkeypatch: pytest.MonkeyPatch, requests: int) -> None:
    """Azure's conversations at twenty times their speed, a pool for about 20 of them, ends unknown to the scheduler:
    at most 15 preemptions for 1,000 requests, and the whole takes no longer than when memory is handed out as it is
    asked for (the control, which preempts at least three times as often)."""

    def run() -> tuple[Scheduler, Run]:
        arrivals = [
            Arrival(one.at, one.tenant, one.prompt, one.output, grant=max(1_024, one.output))
            for one in azure(
                shared_data / "traces" / "AzureLLMInferenceTrace_conv.csv", tenants=4, limit=requests, speed=20.0
            )
        ]
        scheduler, _ = make_scheduler(
            num_blocks=2_000,
            block_size=16,
            max_num_seqs=128,
            max_num_batched_tokens=512,
            max_waiting=1_024,
            prefix_caching=False,
            max_context=8_192,
        )
        return scheduler, simulate(scheduler, arrivals, max_steps=1_000_000)

    careful, done = run()
    monkeypatch.setattr(Forecast, "fits", lambda *_args, **_named: True)
    careless, control = run()
    assert len(done.seen) == len(control.seen) == requests
    assert all(one.end is not None for one in done.seen.values())
    assert careful.num_preempted <= 15 * requests / 1_000
    assert careless.num_preempted >= 3 * careful.num_preempted
    assert done.seconds <= control.seconds
