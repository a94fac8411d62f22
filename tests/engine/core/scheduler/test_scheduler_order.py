"""Who goes first and who is ended: priorities, deadlines, cached prefixes, and what a small tenant may claim."""

from __future__ import annotations

import gc

import pytest

from engine.core.backend import Samples
from engine.core.engine import Engine
from engine.core.offline import Answer, collect
from engine.core.scheduler import deadlines
from engine.core.scheduler.plan import StepPlan
from engine.core.scheduler.planner import MAX_PASSED, WINDOW
from engine.core.scheduler.scheduler import Scheduler
from engine.model.layers.decoder import Decoder
from isolation.ipc.messages import FailureCode, Priority
from tests.engine.core.simulation import SimulatedRunner
from tests.engine.support import make_engine, make_scheduler, model_config, random_model, submit


def run_step(scheduler: Scheduler, runner: SimulatedRunner, now_ns: int = 0) -> list[int]:
    """One step; gives the requests that were scheduled for the first time."""
    plan = scheduler.schedule(now_ns=now_ns)
    assert plan is not None
    result = scheduler.commit(plan, runner.execute(plan))
    scheduler.check_integrity()
    return [started.request for started in result.starts]


def start_order(scheduler: Scheduler, runner: SimulatedRunner | None = None) -> list[int]:
    """Run everything to its end; requests in the order of their start."""
    runner = runner or SimulatedRunner(scheduler, 4)
    order: list[int] = []
    while scheduler.has_work:
        order += run_step(scheduler, runner)
    return order


@pytest.mark.parametrize("tenants", [1, 3])
def test_more_urgent_requests_start_first(tenants: int) -> None:
    """Inside a tenant and between tenants the priority decides, then arrival and service."""
    scheduler, _ = make_scheduler(max_num_seqs=1, num_blocks=64)
    levels = [Priority.LOW, Priority.NORMAL, Priority.LOW, Priority.HIGH, Priority.NORMAL, Priority.HIGH]
    for number, priority in enumerate(levels):
        scheduler.add(submit(number, [number] * 5, 2, tenant=1 + number % tenants, priority=priority), now_ns=0)
    assert start_order(scheduler) == [3, 5, 1, 4, 0, 2]


def test_a_more_urgent_request_takes_row_and_memory_at_once() -> None:
    """All rows and nearly all blocks are held by low priority: a high one starts with the very next step; the oldest
    running request is left alone, and everything ends."""
    scheduler, pool = make_scheduler(max_num_seqs=4, num_blocks=40, max_num_batched_tokens=64)
    runner = SimulatedRunner(scheduler, 4)
    for number in range(4):
        scheduler.add(submit(number, [number] * 20, 16, tenant=1, priority=Priority.LOW), now_ns=0)
    for _ in range(6):
        run_step(scheduler, runner)
    assert scheduler.num_running == 4
    scheduler.add(submit(9, [9] * 60, 4, tenant=2, priority=Priority.HIGH), now_ns=0)
    assert run_step(scheduler, runner) == [9]
    assert scheduler._live.by_id[0].row >= 0
    while scheduler.has_work:
        run_step(scheduler, runner)
    assert pool.num_available == 40


def test_equal_priority_takes_nothing_from_those_within_their_share() -> None:
    """Positive control: the same large request of the same priority waits, as it is beyond its own share."""
    scheduler, _ = make_scheduler(max_num_seqs=4, num_blocks=40, max_num_batched_tokens=64)
    runner = SimulatedRunner(scheduler, 4)
    for number in range(4):
        scheduler.add(submit(number, [number] * 20, 16, tenant=1), now_ns=0)
    for _ in range(6):
        run_step(scheduler, runner)
    scheduler.add(submit(9, [9] * 60, 4, tenant=2), now_ns=0)
    assert run_step(scheduler, runner) == []


@pytest.mark.parametrize("long_prompts", [True, False])
def test_a_small_request_starts_in_the_next_step_whatever_a_flood_holds(long_prompts: bool) -> None:
    """A tenant has filled all rows, or all memory, or is in the middle of a long prompt, and has 40 more waiting: a
    neighbour's short request gets its whole prompt into the next step, each time."""
    scheduler, _ = make_scheduler(
        max_num_seqs=8, num_blocks=128, max_num_batched_tokens=32, max_waiting=200, max_context=400
    )
    runner = SimulatedRunner(scheduler, 4)
    flood = iter(range(1_000, 10_000))
    for number in range(60):
        while scheduler.num_waiting < 40:
            length, output = (300, 4) if long_prompts else (4, 60)
            scheduler.add(submit(next(flood), [1] * length, output, tenant=1, retain=False), now_ns=0)
        for _ in range(5):
            run_step(scheduler, runner)
        scheduler.add(submit(number, [2] * 12, 3, tenant=2), now_ns=0)
        plan = scheduler.schedule(now_ns=0)
        assert plan is not None
        result = scheduler.commit(plan, runner.execute(plan))
        assert number in result.requests, "no first token after one step"
    assert scheduler.num_preempted <= 150


def test_prompts_of_equal_tenants_share_a_step() -> None:
    """Ten tenants with a request each: all their prompts are in one step, as none of them is light beside the
    others. Beside a heavy tenant's long prompt they still are, and its prompt sits that step out."""
    scheduler, _ = make_scheduler(max_num_seqs=16, num_blocks=256, max_num_batched_tokens=128)
    runner = SimulatedRunner(scheduler, 4)
    for number in range(10):
        scheduler.add(submit(number, [number] * 6, 2, tenant=number), now_ns=0)
    assert len(run_step(scheduler, runner)) == 10
    for number in range(100, 120):
        scheduler.add(submit(number, [1] * 300, 2, tenant=100), now_ns=0)
    for _ in range(3):
        run_step(scheduler, runner)
    for number in range(10):
        scheduler.add(submit(200 + number, [50 + number] * 6, 2, tenant=number), now_ns=0)
    plan = scheduler.schedule(now_ns=0)
    assert plan is not None
    assert [chunk.length for chunk in plan.prefills] == [6] * 10
    scheduler.commit(plan, runner.execute(plan))
    after = scheduler.schedule(now_ns=0)
    assert after is not None
    assert after.prefills, "the heavy tenant goes on"


def test_a_deadline_ends_a_request_wherever_it_is() -> None:
    """Waiting or running, a request whose time is over is gone with its blocks; one with time left goes on."""
    scheduler, pool = make_scheduler(max_num_seqs=1, prefix_caching=False)
    runner = SimulatedRunner(scheduler, 4)
    scheduler.add(submit(1, [1] * 4, 50, deadline_us=3), now_ns=1_000)
    scheduler.add(submit(2, [2] * 4, 5, deadline_us=2), now_ns=1_000)
    scheduler.add(submit(3, [3] * 4, 5), now_ns=1_000)
    run_step(scheduler, runner)
    assert scheduler.expire(now_ns=2_999) == []
    assert scheduler.expire(now_ns=3_000) == [2]
    run_step(scheduler, runner)
    assert scheduler.expire(now_ns=4_000) == [1]
    assert scheduler.expire(now_ns=9_000) == []
    scheduler.check_integrity()
    assert run_step(scheduler, runner) == [3]
    while scheduler.has_work:
        run_step(scheduler, runner)
    assert pool.num_available == pool.num_blocks


def test_deadlines_of_ended_requests_are_forgotten() -> None:
    """A thousand requests that ended long before their deadlines leave a bounded list behind."""
    scheduler, _ = make_scheduler()
    runner = SimulatedRunner(scheduler, 4)
    for number in range(1_000):
        scheduler.add(submit(number, [1], 1, deadline_us=10**9), now_ns=0)
        run_step(scheduler, runner)
    assert len(scheduler._live.deadlines) <= deadlines.MAX_ENDED + 3


@pytest.fixture(scope="module")
def model() -> Decoder:
    """A small random model."""
    return random_model(model_config())


def test_the_engine_answers_an_expired_request_with_a_typed_failure(model: Decoder) -> None:
    """The failure comes with the next step's output, after the tokens that were sent, and neighbours go on."""
    engine: Engine = make_engine(model)
    now = [0]
    engine._clock_ns = lambda: now[0]
    engine.add(submit(1, [1, 2, 3], 30, deadline_us=1_000))
    engine.add(submit(2, [4, 5], 6))
    answers: dict[int, Answer] = {}
    for _ in range(3):
        collect(engine, answers)
    now[0] = 1_000_000
    while engine.has_work:
        collect(engine, answers)
    assert answers[1].failure is FailureCode.DEADLINE
    assert 0 < len(answers[1].token_ids) < 6
    assert (answers[2].failure, len(answers[2].token_ids)) == (None, 6)


def warm_prefix(scheduler: Scheduler, tenant: int, prompt: list[int]) -> SimulatedRunner:
    """Leave a prompt's blocks in the cache; gives the runner that holds their content."""
    runner = SimulatedRunner(scheduler, 4)
    scheduler.add(submit(10_000 + tenant, prompt, 1, tenant=tenant), now_ns=0)
    run_step(scheduler, runner)
    return runner


def prefix_order(*, warm: int | None) -> list[int]:
    """Start order of tenant 1's requests, the third of which has a prefix that tenant ``warm`` computed before."""
    scheduler, _ = make_scheduler(max_num_seqs=1, num_blocks=256, max_num_batched_tokens=64)
    known = list(range(50, 70))
    runner = warm_prefix(scheduler, warm, known) if warm is not None else None
    for number in range(4):
        prompt = [*known, 1] if number == 2 else [number] * 21
        scheduler.add(submit(number, prompt, 2, tenant=1), now_ns=0)
    return start_order(scheduler, runner)


def test_inside_a_tenant_the_longest_cached_prefix_goes_first() -> None:
    """A request that finds its prefix in its own tenant's cache passes older ones that find nothing."""
    assert prefix_order(warm=1) == [2, 0, 1, 3]
    assert prefix_order(warm=None) == [0, 1, 2, 3]


def test_another_tenants_cache_cannot_change_my_order() -> None:
    """The very same tokens in another tenant's cache move nothing."""
    assert prefix_order(warm=2) == prefix_order(warm=None)


def test_the_oldest_is_passed_a_bounded_number_of_times() -> None:
    """However many requests with cached prefixes arrive, the oldest without one starts after ``MAX_PASSED``, and
    requests far behind in the queue are not looked at."""
    scheduler, _ = make_scheduler(max_num_seqs=1, num_blocks=256, max_num_batched_tokens=64)
    known = list(range(50, 70))
    runner = warm_prefix(scheduler, 1, known)
    scheduler.add(submit(0, [7] * 21, 1), now_ns=0)
    for number in range(1, 40):
        scheduler.add(submit(number, [*known, number], 1), now_ns=0)
    order = start_order(scheduler, runner)
    assert order.index(0) == MAX_PASSED
    assert order[:MAX_PASSED] == list(range(1, MAX_PASSED + 1))

    far, _ = make_scheduler(max_num_seqs=1, num_blocks=256, max_num_batched_tokens=64)
    runner = warm_prefix(far, 1, known)
    for number in range(WINDOW):
        far.add(submit(number, [number] * 21, 1), now_ns=0)
    far.add(submit(WINDOW, [*known, 1], 1), now_ns=0)
    assert start_order(far, runner)[:2] == [0, WINDOW]


class NullRunner:
    """A model that answers the same token to everybody."""

    def execute(self, plan: StepPlan) -> Samples:
        """One token for each row that samples."""
        return Samples([1] * len(plan.sample_rows))

    def forget(self, rows: list[int]) -> None:
        """Nothing is kept."""


def test_steady_steps_leave_no_object_for_the_collector() -> None:
    """Sixty-four requests decode for four hundred steps: what the interpreter's collector would have to look at does
    not grow with steps or tokens. Only tables and block ids grow, a few entries in sixteen steps."""
    scheduler, _ = make_scheduler(num_blocks=4_000, block_size=16, max_num_seqs=64, max_num_batched_tokens=256)
    engine = Engine(scheduler, NullRunner())
    for number in range(64):
        engine.add(submit(number, [number] * 8, 900, tenant=number % 5))
    for _ in range(50):
        engine.step()
    assert scheduler.num_running == 64
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        tracked = len(gc.get_objects())
        for _ in range(400):
            engine.step()
        # 25,600 tokens later: one entry of the forecast a request at most.
        assert len(gc.get_objects()) - tracked < 100
    finally:
        if enabled:
            gc.enable()
