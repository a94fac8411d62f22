"""Scheduler: what a step holds, who goes first, who gives way, and what is refused."""

from __future__ import annotations

from array import array

import pytest

from engine.core.scheduler.plan import FAILED, Chunk, StepPlan, StepResult
from engine.core.scheduler.scheduler import Scheduler
from engine.core.scheduler.tenancy import Need
from engine.errors import RequestRejectedError
from isolation.ipc.engine import Submit
from isolation.ipc.messages import FailureCode, Finish
from isolation.ipc.sampling import Sampling
from tests.engine.core.simulation import SimulatedRunner
from tests.engine.support import make_scheduler, namespace, submit


def step(scheduler: Scheduler, runner: SimulatedRunner, **choose: object) -> tuple[StepPlan, StepResult]:
    """One step through the simulated runner."""
    plan = scheduler.schedule(now_ns=0)
    assert plan is not None
    result = scheduler.commit(plan, runner.execute(plan, **choose))
    scheduler.check_integrity()
    return plan, result


def run_out(scheduler: Scheduler, runner: SimulatedRunner) -> dict[int, int]:
    """Step until nothing is left; gives tokens by request."""
    counts: dict[int, int] = {}
    for _ in range(2_000):
        if not scheduler.has_work:
            return counts
        _, result = step(scheduler, runner)
        for request in result.requests:
            counts[request] = counts.get(request, 0) + 1
    raise AssertionError("requests did not end")


def test_decodes_go_first_and_prefill_fills_the_budget() -> None:
    """A step holds every decoding row, and the long prompt gets what is left, in chunks."""
    scheduler, _ = make_scheduler(max_num_batched_tokens=8)
    runner = SimulatedRunner(scheduler, 4)
    scheduler.add(submit(1, [5] * 3), now_ns=0)
    step(scheduler, runner)
    scheduler.add(submit(2, [6] * 20), now_ns=0)
    plans = [step(scheduler, runner)[0] for _ in range(4)]
    assert [len(plan.decode_rows) for plan in plans] == [1, 1, 1, 2]
    assert [[(c.start, c.length, c.last) for c in plan.prefills] for plan in plans] == [
        [(0, 7, False)],
        [(7, 7, False)],
        [(14, 6, True)],
        [],
    ]


def test_several_short_prompts_share_a_step() -> None:
    """Prompts are put together until the budget is spent; the last is cut."""
    scheduler, _ = make_scheduler(max_num_batched_tokens=16)
    runner = SimulatedRunner(scheduler, 4)
    for number in range(3):
        scheduler.add(submit(number, [number] * 6), now_ns=0)
    plan, result = step(scheduler, runner)
    assert [(c.length, c.last) for c in plan.prefills] == [(6, True), (6, True), (4, False)]
    assert list(result.requests) == [0, 1]


def test_one_namespace_is_served_in_order_of_arrival() -> None:
    """Inside a namespace nobody overtakes."""
    scheduler, _ = make_scheduler(max_num_seqs=1)
    runner = SimulatedRunner(scheduler, 4)
    for number in range(5):
        scheduler.add(submit(number, [number] * (9 - number), 2), now_ns=0)
    order = []
    while scheduler.has_work:
        _, result = step(scheduler, runner)
        order += [started.request for started in result.starts]
    assert order == [0, 1, 2, 3, 4]


def test_a_flood_does_not_delay_another_namespace() -> None:
    """A hundred queued requests of one tenant: the other's single request is in the very next admission."""
    scheduler, _ = make_scheduler(max_num_seqs=2, num_blocks=64)
    runner = SimulatedRunner(scheduler, 4)
    for number in range(60):
        scheduler.add(submit(number, [1] * 8, 4, tenant=1), now_ns=0)
    step(scheduler, runner)
    step(scheduler, runner)
    scheduler.add(submit(99, [2] * 8, 4, tenant=2), now_ns=0)
    starts: list[int] = []
    while 99 not in starts:
        starts += [started.request for started in step(scheduler, runner)[1].starts]
    assert len(starts) <= 2


def test_a_namespace_below_its_share_gets_a_row_back() -> None:
    """All rows are held by one tenant's long outputs: a newcomer gets one without waiting for an end, once."""
    scheduler, _ = make_scheduler(max_num_seqs=4, num_blocks=64)
    runner = SimulatedRunner(scheduler, 4)
    for number in range(6):
        scheduler.add(submit(number, [1] * 4, 40, tenant=1), now_ns=0)
    for _ in range(4):
        step(scheduler, runner)
    for number in range(10, 14):
        scheduler.add(submit(number, [2] * 4, 40, tenant=2), now_ns=0)
    for _ in range(4):
        step(scheduler, runner)
    running = [request.spec.namespace for request in scheduler._live.by_id.values() if request.row >= 0]
    assert sorted(running) == [namespace(1)] * 2 + [namespace(2)] * 2
    assert scheduler._live.by_id[0].row >= 0
    counts = run_out(scheduler, runner)
    assert sum(counts.values()) > 0


def test_rows_are_not_passed_to_and_fro() -> None:
    """Two tenants with too many requests for the rows: preemptions stay few, since both hold their share."""
    scheduler, _ = make_scheduler(max_num_seqs=4, num_blocks=128)
    runner = SimulatedRunner(scheduler, 4)
    for number in range(20):
        scheduler.add(submit(number, [1] * 4, 20, tenant=1 + number % 2), now_ns=0)
    admissions = 0
    while scheduler.has_work:
        admissions += len(step(scheduler, runner)[0].admissions)
    assert admissions <= 24


@pytest.mark.parametrize(
    ("rows", "services", "victim"),
    [
        ({1: 3, 2: 1}, {1: 50.0, 2: 10.0}, 1),
        ({1: 3, 2: 1}, {1: 5.0, 2: 10.0}, None),
        ({1: 2, 2: 2}, {1: 50.0, 2: 10.0}, None),
        ({1: 3, 2: 2, 3: 1}, {1: 50.0, 2: 10.0, 3: 10.0}, None),
        ({1: 4, 2: 1, 3: 1}, {1: 50.0, 2: 10.0, 3: 90.0}, 1),
    ],
)
def test_only_the_rich_give_up_a_row_and_only_to_the_poor(
    rows: dict[int, int], services: dict[int, float], victim: int | None
) -> None:
    """A row moves from above its share and better served, to below its share with somebody waiting (tenant 2)."""
    scheduler, _ = make_scheduler(max_num_seqs=sum(rows.values()), max_num_batched_tokens=64, num_blocks=128)
    runner = SimulatedRunner(scheduler, 4)
    number = 0
    for tenant, count in rows.items():
        for _ in range(count):
            number += 1
            scheduler.add(submit(number, [tenant], 40, tenant=tenant), now_ns=0)
    step(scheduler, runner)
    scheduler.add(submit(99, [9], 40, tenant=2), now_ns=0)
    for account in scheduler._tenancy:
        account.service = services[account.key[0]]
    chosen = scheduler._tenancy.victims(scheduler._live.by_id[99], Need(1, row=True, wanted=1, new=1, short=0))
    assert ([one.spec.namespace[0] for one in chosen] if chosen else None) == ([victim] if victim else None)
    if chosen:
        assert chosen[0].spec.order == max(
            one.spec.order for one in scheduler._live.by_id.values() if one.spec.namespace == namespace(1)
        )


@pytest.mark.parametrize(("first", "second", "admitted"), [(10, 4, False), (3, 4, True), (10, 1, True)])
def test_admission_looks_ahead(first: int, second: int, admitted: bool) -> None:
    """Three blocks are free: a request is admitted only if both find memory to their ends, whoever ends first."""
    scheduler, pool = make_scheduler(num_blocks=33, block_size=4, max_num_batched_tokens=128)
    runner = SimulatedRunner(scheduler, 4)
    scheduler.add(submit(1, [1] * 118, first), now_ns=0)
    step(scheduler, runner)
    assert pool.num_available == 3
    scheduler.add(submit(2, [2] * 4, second), now_ns=0)
    assert bool(step(scheduler, runner)[1].starts) == admitted
    assert 1 in run_out(scheduler, runner)
    assert scheduler.num_preempted == 0


def test_the_heaviest_namespace_gives_way_when_blocks_run_out() -> None:
    """Out of blocks, the youngest request of the most served tenant is preempted, and it still ends right."""
    scheduler, _ = make_scheduler(num_blocks=8, block_size=4, max_num_seqs=4, max_context=28)
    runner = SimulatedRunner(scheduler, 4)
    scheduler.add(submit(1, [1] * 4, 20, tenant=1), now_ns=0)
    scheduler.add(submit(2, [2] * 4, 20, tenant=2), now_ns=0)
    scheduler.add(submit(3, [3] * 4, 20, tenant=2), now_ns=0)
    for account in scheduler._tenancy:
        account.typical_output = 1.0  # so that the forecast expects ends that do not come
    preempted = []
    counts: dict[int, int] = {}
    while scheduler.has_work:
        before = {number for number, request in scheduler._live.by_id.items() if request.row >= 0}
        _, result = step(scheduler, runner)
        for request in result.requests:
            counts[request] = counts.get(request, 0) + 1
        live = scheduler._live.by_id
        preempted += [number for number in before if number in live and live[number].row < 0]
    assert preempted
    assert preempted[0] == 3
    assert 1 not in preempted
    assert counts == {1: 20, 2: 20, 3: 20}


def test_a_large_request_is_passed_for_a_while_and_not_for_ever() -> None:
    """A request that needs most of the pool is passed by small ones up to its own cost; then the pool drains for it."""
    scheduler, _ = make_scheduler(num_blocks=8, block_size=4, max_num_seqs=4)
    runner = SimulatedRunner(scheduler, 4)
    scheduler.add(submit(0, [1] * 8, 8, tenant=1), now_ns=0)
    step(scheduler, runner)
    scheduler.add(submit(1, [2] * 27, 4, tenant=2), now_ns=0)
    starts = []
    for number in range(2, 60):
        scheduler.add(submit(number, [3] * 4, 2, tenant=1), now_ns=0)
        starts += [started.request for started in step(scheduler, runner)[1].starts]
        if 1 in starts:
            break
    assert 1 in starts
    assert 1 <= starts.index(1) <= 1 + 27 // 4


def test_inside_a_namespace_a_large_request_is_not_passed() -> None:
    """Order of arrival holds inside a namespace also when the oldest does not fit yet."""
    scheduler, _ = make_scheduler(num_blocks=8, block_size=4, max_num_seqs=4)
    runner = SimulatedRunner(scheduler, 4)
    for number, length in enumerate((8, 27, 4, 4)):
        scheduler.add(submit(number, [number] * length, 4), now_ns=0)
    starts = []
    while scheduler.has_work:
        starts += [started.request for started in step(scheduler, runner)[1].starts]
    assert starts == [0, 1, 2, 3]


def test_prefix_hits_are_reported_and_not_computed_or_charged() -> None:
    """The second request of a namespace starts behind the blocks that the first left; another namespace's does not."""
    scheduler, _ = make_scheduler(num_blocks=64)
    runner = SimulatedRunner(scheduler, 4)
    prompt = list(range(14))
    cached = {}
    for number, tenant in ((1, 1), (2, 1), (3, 2)):
        scheduler.add(submit(number, prompt, 1, tenant=tenant), now_ns=0)
        plan, result = step(scheduler, runner)
        cached[number] = result.starts[0].cached_tokens
        assert plan.prefills == [Chunk(plan.prefills[0].row, cached[number], 14 - cached[number], True)]
    assert cached == {1: 0, 2: 12, 3: 0}


@pytest.mark.parametrize("who", ["first", "second"])
def test_a_request_that_keeps_nothing_neither_gives_nor_takes(who: str) -> None:
    """Without retention there is no reuse in either direction, and the blocks are zeroed right after the end."""
    scheduler, _ = make_scheduler(num_blocks=64)
    runner = SimulatedRunner(scheduler, 4)
    scheduler.add(submit(1, list(range(12)), 1, retain=who != "first"), now_ns=0)
    plan, _ = step(scheduler, runner)
    used = plan.admissions[0].blocks
    if who == "first":
        assert scheduler.has_work
        zeroing, _ = step(scheduler, runner)
        assert sorted(zeroing.zero_blocks) == sorted(used)
        assert not zeroing.num_tokens
    assert not scheduler.has_work
    scheduler.add(submit(2, list(range(12)), 1, retain=who != "second"), now_ns=0)
    assert step(scheduler, runner)[1].starts[0].cached_tokens == 0


def test_stop_ids_end_with_stop_and_the_token_is_sent() -> None:
    """The model's own and the request's stop ids end an output; the id itself is the last token."""
    scheduler, _ = make_scheduler(eos_ids=frozenset({7}))
    runner = SimulatedRunner(scheduler, 4)
    scheduler.add(submit(1, [1], ignore_eos=False), now_ns=0)
    scheduler.add(submit(2, [1], ignore_eos=True), now_ns=0)
    scheduler.add(submit(3, [1], ignore_eos=True, stop_ids=(7,)), now_ns=0)
    _, result = step(scheduler, runner, default=7)
    assert list(result.token_ids) == [7, 7, 7]
    assert list(result.finishes) == [Finish.STOP, Finish.NONE, Finish.STOP]


def test_length_ends_at_the_grant_and_at_the_context() -> None:
    """An output ends with ``LENGTH`` at max_tokens or where the context ends, whichever is first."""
    scheduler, _ = make_scheduler(max_context=12)
    runner = SimulatedRunner(scheduler, 4)
    scheduler.add(submit(1, [1] * 4, 3), now_ns=0)
    scheduler.add(submit(2, [2] * 10, 50), now_ns=0)
    assert run_out(scheduler, runner) == {1: 3, 2: 2}


def test_a_broken_row_fails_alone_and_leaves_nothing() -> None:
    """A row without finite logits ends as INTERNAL; its neighbours go on, and its prefix cannot be found again."""
    scheduler, pool = make_scheduler(num_blocks=64)
    runner = SimulatedRunner(scheduler, 4)
    scheduler.add(submit(1, [1] * 8, 4), now_ns=0)
    scheduler.add(submit(2, [2] * 8, 4), now_ns=0)
    _, result = step(scheduler, runner, choose={1: FAILED})
    assert [(one.request, one.code) for one in result.failures] == [(1, FailureCode.INTERNAL)]
    assert list(result.requests) == [2]
    assert result.broken == [0]
    assert run_out(scheduler, runner) == {2: 3}
    for number, prompt, cached in ((3, [1] * 8, 0), (4, [2] * 8, 4)):
        scheduler.add(submit(number, prompt, 1), now_ns=0)
        assert step(scheduler, runner)[1].starts[0].cached_tokens == cached
    assert pool.num_available == 64


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"token_ids": array("I")}, FailureCode.INVALID),
        ({"token_ids": array("I", [5, 1_000])}, FailureCode.INVALID),
        ({"max_tokens": 0}, FailureCode.INVALID),
        ({"weight": 0}, FailureCode.INVALID),
        ({"namespace": b"short"}, FailureCode.INVALID),
        ({"namespace": b"\x00"}, FailureCode.INVALID),
        ({"token_ids": array("I", [1] * 128)}, FailureCode.TOO_LONG),
        ({"sampling": Sampling(temperature=float("nan"))}, FailureCode.INVALID),
        ({"sampling": Sampling(temperature=-1.0)}, FailureCode.INVALID),
        ({"sampling": Sampling(top_p=0.0)}, FailureCode.INVALID),
        ({"sampling": Sampling(min_p=1.5)}, FailureCode.INVALID),
        ({"sampling": Sampling(top_k=-1)}, FailureCode.INVALID),
        ({"sampling": Sampling(repetition_penalty=0.0)}, FailureCode.INVALID),
        ({"sampling": Sampling(frequency_penalty=float("inf"))}, FailureCode.INVALID),
        ({"sampling": Sampling(seed=1 << 64)}, FailureCode.INVALID),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(change: dict[str, object], code: FailureCode) -> None:
    """A malformed request, or one that can never fit, is refused with its code and leaves no trace."""
    scheduler, _ = make_scheduler()
    fields = {"request": 1, "namespace": namespace(1), "token_ids": array("I", [1]), "max_tokens": 1}
    fields["sampling"] = Sampling()
    with pytest.raises(RequestRejectedError) as caught:
        scheduler.add(Submit(**{**fields, **change}), now_ns=0)
    assert caught.value.code is code
    assert not scheduler.has_work
    scheduler.add(Submit(**fields), now_ns=0)
    assert scheduler.has_work


def test_the_queue_is_bounded() -> None:
    """One request more than may wait is refused as OVERLOADED; after a start there is room again."""
    scheduler, _ = make_scheduler(max_waiting=2)
    scheduler.add(submit(1, [1]), now_ns=0)
    scheduler.add(submit(2, [1]), now_ns=0)
    with pytest.raises(RequestRejectedError) as caught:
        scheduler.add(submit(3, [1]), now_ns=0)
    assert caught.value.code is FailureCode.OVERLOADED
    step(scheduler, SimulatedRunner(scheduler, 4))
    scheduler.add(submit(3, [1]), now_ns=0)


def test_a_reused_id_loses_both_requests() -> None:
    """Two requests with one id could not be told apart, so neither gets tokens."""
    scheduler, _ = make_scheduler()
    scheduler.add(submit(1, [1]), now_ns=0)
    with pytest.raises(RequestRejectedError) as caught:
        scheduler.add(submit(1, [2]), now_ns=0)
    assert caught.value.code is FailureCode.INVALID
    assert not scheduler.has_work


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_abort_works_in_every_phase(steps: int) -> None:
    """Waiting, prefilling or decoding: an aborted request is gone with its blocks, its neighbour is not touched."""
    scheduler, pool = make_scheduler(max_num_batched_tokens=8, prefix_caching=False)
    runner = SimulatedRunner(scheduler, 4)
    scheduler.add(submit(1, [1] * 12, 9), now_ns=0)
    scheduler.add(submit(2, [2] * 2, 3), now_ns=0)
    for _ in range(steps):
        step(scheduler, runner)
    assert scheduler.abort(1)
    assert not scheduler.abort(1)
    scheduler.check_integrity()
    run_out(scheduler, runner)
    assert pool.num_available == pool.num_blocks


def test_queue_time_is_reported_in_microseconds() -> None:
    """The time between receipt and scheduling is in the start event."""
    scheduler, _ = make_scheduler()
    scheduler.add(submit(1, [1]), now_ns=1_000_000)
    plan = scheduler.schedule(now_ns=3_500_000)
    assert plan is not None
    assert scheduler.commit(plan, [1]).starts[0].queue_us == 2_500
