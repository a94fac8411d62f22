"""Models with windows and chunks: they give back what lies behind, and answer as if everything were kept."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from engine.core.engine import Engine
from engine.core.kv.block_pool import BlockPool
from engine.core.kv.contents import CLEAN
from engine.core.kv.layout import FULL, NULL_BLOCK, KvGroup, Reach, uniform_layers
from engine.core.offline import Answer, generate
from engine.core.scheduler.plan import FAILED, StepPlan
from engine.core.scheduler.scheduler import Scheduler
from engine.model.layers.decoder import Decoder
from isolation.ipc.engine import Submit
from tests.engine.core.simulation import SimulatedRunner
from tests.engine.support import make_engine, make_scheduler, model_config, namespace, random_model, submit

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK = 4
WINDOW = Reach("window", 10)
TABLES = (KvGroup(FULL, 2 * BLOCK), KvGroup(WINDOW, BLOCK))
REACHES = {
    "half": (FULL, Reach("window", 6)),
    "one of four": (FULL, *(Reach("window", 9),) * 3),
    "all windows": (Reach("window", 5),) * 2,
    "a window of one": (Reach("window", 1), FULL),
    "chunks": (*(Reach("chunk", 8),) * 3, FULL),
    "all chunks": (Reach("chunk", 10),),
    "three": (FULL, Reach("window", 3), Reach("chunk", 7)),
}


def model_of(reaches: tuple[Reach, ...]) -> Decoder:
    """A random model whose layers look so far back."""
    layers = tuple(layer for reach in reaches for layer in uniform_layers(1, 2, 8, reach))
    return random_model(model_config(num_layers=len(reaches), layers=layers))


def poison(engine: Engine) -> None:
    """Before every step, fill the KV of all blocks that no request holds and nobody may find with NaN."""
    execute, pool, storage = engine.runner.execute, engine.scheduler._pool, engine.runner.storage

    def poisoned(plan: StepPlan) -> object:
        for block in pool._free:
            for tensor in storage.tensors:
                tensor[block].fill_(torch.nan)
        return execute(plan)

    engine.runner.execute = poisoned


def submissions() -> list[Submit]:
    """Two turns of two tenants, prompts short and long, kept and not, with logprobs."""
    prompts = [list(range(1, 4)), [5] * 41, [*range(60), 9], list(range(60))]
    return [
        submit(number, prompt[tenant:], 30, tenant=tenant, logprobs=2, retain=number % 5 != 0)
        for number, (prompt, tenant) in enumerate(itertools.product(prompts, (1, 2)), start=1)
    ]


def same(one: dict[int, Answer], other: dict[int, Answer]) -> bool:
    """Whether all ids are equal, and logprobs to 1e-4."""
    for number, answer in one.items():
        if answer.failure is not None or answer.token_ids != other[number].token_ids:
            return False
        for left, right in zip(answer.logprobs, other[number].logprobs, strict=True):
            if abs(left.logprob - right.logprob) > 1e-4:
                return False
    return True


def run_poisoned(model: Decoder, num_blocks: int) -> tuple[dict[int, Answer], Engine]:
    """Answers of an engine with the memory of so many blocks in which everything is kept, and the engine. Outputs of
    one token before make it expect such, so that it admits more requests than can be run to their ends."""
    engine = make_engine(model, max_context=128, max_num_batched_tokens=13, max_num_seqs=6, num_blocks=num_blocks)
    poison(engine)
    generate(engine, [submit(900 + tenant, [1], 1, tenant=tenant) for tenant in (1, 2)])
    return generate(engine, submissions()), engine


EVERY_RUN = ("a window of one", "all chunks", "three")
"""Between them no layer, some and all that keep everything, and both kinds of layers that do not."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in EVERY_RUN else pytest.mark.full) for name in REACHES]
)
def test_answers_are_those_of_a_model_that_keeps_everything(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks beside decoding rows, memory short enough for preemptions, unheld blocks full of NaN: the ids
    and logprobs are those of one table for all layers with memory for all."""
    model = model_of(REACHES[name])
    answers, engine = run_poisoned(model, 60)
    assert engine.scheduler.limits.groups
    monkeypatch.setattr("engine.backends.common.loading.divide", lambda *_: ())
    expected = generate(make_engine(model, max_context=128, max_num_batched_tokens=64, num_blocks=512), submissions())
    assert all(len(answer.token_ids) == 30 for answer in expected.values())
    assert same(answers, expected)
    monkeypatch.undo()
    if Reach("window", 1) in REACHES[name]:
        return  # one token is in one block: there is none too few
    monkeypatch.setattr(KvGroup, "first_block", too_far)
    assert not same(run_poisoned(model, 60)[0], expected), "a block too few would not be seen"


def too_far(group: KvGroup, position: int) -> int:
    """A rule that gives back one block too many."""
    seen = group.reach.first_seen(position)
    return min(seen // group.block_size + 1, position // group.block_size)


def test_memory_short_enough_for_preemption_gives_the_same_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same where running requests have to give way to each other."""
    model = model_of(REACHES["half"])
    answers, engine = run_poisoned(model, 26)
    assert engine.scheduler.num_preempted
    monkeypatch.setattr("engine.backends.common.loading.divide", lambda *_: ())
    expected = generate(make_engine(model, max_context=128, num_blocks=512), submissions())
    assert same(answers, expected)


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.full) for name in ("half", "one of four", "all chunks")), "three"]
)
def test_deterministic_requests_and_outputs_of_one_prompt(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deterministic requests, ordinary ones and three outputs of each prompt, beside each other in little memory with
    NaN in every unheld block: the answers are those of one table for all layers, and the deterministic ones are the
    same bits as in much memory."""
    model = model_of(REACHES[name])
    loads = [
        replace(one, request=10 * one.request, choices=3, deterministic=bool(one.request % 2)) for one in submissions()
    ]
    engine = make_engine(model, max_context=128, max_num_batched_tokens=13, max_num_seqs=6, num_blocks=40)
    poison(engine)
    answers = generate(engine, loads)
    assert engine.scheduler.limits.groups
    assert engine.scheduler.num_available_blocks == engine.runner.storage.layout.num_blocks
    roomy = make_engine(model, max_context=128, max_num_batched_tokens=90, num_blocks=512, prefix_caching=False)
    exact = generate(roomy, [one for one in loads if one.deterministic])
    assert len(exact) == 12
    for number, answer in exact.items():
        assert answers[number].token_ids == answer.token_ids
        assert [one.logprob for one in answers[number].logprobs] == [one.logprob for one in answer.logprobs]
    monkeypatch.setattr("engine.backends.common.loading.divide", lambda *_: ())
    expected = generate(make_engine(model, max_context=128, max_num_batched_tokens=64, num_blocks=512), loads)
    assert len(expected) == 24
    assert same(answers, expected)


def run(scheduler: Scheduler, runner: SimulatedRunner, steps: int, token: int = 1) -> None:
    """So many steps, of which the last gives the token."""
    for left in range(steps, 0, -1):
        plan = scheduler.schedule(now_ns=0)
        if plan is None:
            return
        scheduler.commit(plan, runner.execute(plan, default=token if left == 1 else 1))
        scheduler.check_integrity()


def held(scheduler: Scheduler) -> list[int]:
    """Blocks that the one running request holds, by table."""
    (request,) = scheduler._running.requests
    tables = [request.kv.blocks, *request.kv.local]
    return [sum(block != NULL_BLOCK for block in table) for table in tables]


def used(pool: BlockPool) -> int:
    """Blocks that are not available."""
    return pool.num_blocks - pool.num_available


@pytest.mark.parametrize("prompt", [1, 100])
def test_a_long_output_holds_a_window_and_a_block(prompt: int) -> None:
    """Over hundreds of tokens layers with a window never hold more than the window and a block; layers without hold
    all, and so does a control whose layers all keep everything."""
    scheduler, pool = make_scheduler(groups=TABLES, num_blocks=80, max_context=400)
    runner = SimulatedRunner(scheduler, BLOCK)
    scheduler.add(submit(1, [3] * prompt, 330 - prompt), now_ns=0)
    most = 0
    while not scheduler._running.decoding.requests and scheduler.has_work:
        run(scheduler, runner, 1)
    while scheduler.has_work:
        run(scheduler, runner, 1)
        if len(scheduler._running):
            most = max(most, held(scheduler)[1])
            assert used(pool) == sum(held(scheduler))
            full = held(scheduler)[0]
    assert most == -(-(WINDOW.size - 1) // BLOCK) + 1
    assert full == -(-328 // (2 * BLOCK))
    assert used(pool) == 0
    control, pool = make_scheduler(num_blocks=83)
    control.add(submit(1, [3] * prompt, 330 - prompt), now_ns=0)
    runner = SimulatedRunner(control, BLOCK)
    while control.has_work:
        run(control, runner, 1)
        most = max(most, used(pool))
    assert most == -(-328 // BLOCK)


def test_a_chunk_is_given_back_whole_at_its_end() -> None:
    """Layers of chunks hold blocks of the current chunk only; at its last token all of them go."""
    scheduler, _ = make_scheduler(
        groups=(KvGroup(FULL, BLOCK), KvGroup(Reach("chunk", 16), BLOCK)), num_blocks=64, max_context=128
    )
    runner = SimulatedRunner(scheduler, BLOCK)
    scheduler.add(submit(1, [1], 90), now_ns=0)
    seen = []
    while scheduler.has_work:
        run(scheduler, runner, 1)
        if len(scheduler._running):
            seen.append(held(scheduler)[1])
    assert max(seen) == 4
    assert seen[:60:4] == [1, 2, 3, 4] * 3 + [1, 2, 3]


def test_a_long_prompt_takes_no_more_than_window_and_chunk() -> None:
    """A prompt of ten times the pool's room for windows runs, chunk by chunk, beside others that decode."""
    scheduler, pool = make_scheduler(groups=TABLES, num_blocks=90, max_context=500, max_num_batched_tokens=16)
    runner = SimulatedRunner(scheduler, BLOCK)
    scheduler.add(submit(1, [1, 2, 3], 60), now_ns=0)
    run(scheduler, runner, 3)
    scheduler.add(submit(2, [7] * 480, 4, tenant=2), now_ns=0)
    while scheduler.num_running + scheduler.num_waiting:
        run(scheduler, runner, 1)
        assert used(pool) <= 60 + 5 + 9 + 4 + 8
    assert scheduler.num_preempted == 0


def cached(scheduler: Scheduler, runner: SimulatedRunner, number: int, prompt: list[int], tenant: int = 1) -> int:
    """Tokens found in the cache for a request that is run to its end."""
    scheduler.add(submit(number, prompt, 4, tenant=tenant), now_ns=0)
    starts = []
    while scheduler.has_work:
        plan = scheduler.schedule(now_ns=0)
        starts += scheduler.commit(plan, runner.execute(plan)).starts
    return starts[0].cached_tokens


@pytest.mark.parametrize("groups", [TABLES, (KvGroup(WINDOW, BLOCK),), (KvGroup(Reach("chunk", 12), BLOCK),)])
def test_a_prefix_is_found_when_all_that_is_seen_is_known(groups: tuple[KvGroup, ...]) -> None:
    """A second turn finds the first's whole blocks, also those that were given back on the way; another tenant finds
    nothing. Without the blocks before its end the hit is shorter; without any of the window there is none."""
    scheduler, pool = make_scheduler(groups=groups, num_blocks=64, max_context=128)
    runner = SimulatedRunner(scheduler, BLOCK)
    prompt = list(range(1, 46))
    assert cached(scheduler, runner, 1, prompt) == 0
    assert cached(scheduler, runner, 2, [*prompt, 50, 51]) == 40 + 4 * (groups[0].block_size == BLOCK)
    assert cached(scheduler, runner, 3, prompt, tenant=2) == 0
    assert cached(scheduler, runner, 4, [*prompt[:27], 60]) == 24
    cache = scheduler._planner._cache
    window = len(groups) - 1
    probe = runner_request(scheduler, [*prompt, 50, 51])
    hit = cache.match(probe)
    tail = next(block for block in reversed(hit.local[0]) if block)
    assert window in (0, 1)
    pool.forget(pool.contents.ids[tail])
    shorter = cache.match(probe)
    assert 0 < shorter.num_tokens < hit.num_tokens
    for block in pool._cached.all():
        if pool.contents.ids[block][-1] == window:
            pool.forget(pool.contents.ids[block])
    assert cache.match(probe).num_tokens == 0


def runner_request(scheduler: Scheduler, prompt: list[int]) -> object:
    """A request, as the cache sees it before it is queued."""
    return scheduler._request(submit(99, prompt, 4), now_ns=0)


def test_an_admission_never_takes_the_cached_blocks_that_it_builds_on() -> None:
    """The pool is full of cached blocks, the oldest of them those of the window that a second turn needs: they are its
    own before it takes new ones."""
    scheduler, pool = make_scheduler(
        groups=(KvGroup(FULL, BLOCK), KvGroup(Reach("window", 6), 2 * BLOCK)), num_blocks=15, max_context=36
    )
    runner = SimulatedRunner(scheduler, BLOCK)
    prompt = list(range(1, 22))
    assert cached(scheduler, runner, 1, prompt) == 0
    second = [*prompt[:20], *range(50, 54)]
    needed = scheduler._planner._cache.match(runner_request(scheduler, second)).local[0][-1]
    for block in pool._cached.all():
        if block != needed:
            pool._cached._shared.move_to_end(block)
    pool._free.clear()
    assert needed
    scheduler.add(submit(2, second, 1), now_ns=0)
    plan = scheduler.schedule(now_ns=0)
    assert plan is not None and plan.admissions
    assert needed not in plan.zero_blocks
    assert scheduler.commit(plan, runner.execute(plan)).starts[0].cached_tokens == 16


def test_what_may_not_be_kept_is_zeroed_as_soon_as_it_is_behind() -> None:
    """Without retention a block behind the window is clean and to be zeroed in the step that gives it back."""
    scheduler, pool = make_scheduler(groups=TABLES, num_blocks=64, max_context=128)
    runner = SimulatedRunner(scheduler, BLOCK)
    scheduler.add(submit(1, [1] * 12, 60, retain=False), now_ns=0)
    run(scheduler, runner, 2)
    (request,) = scheduler._running.requests
    zeroed = []
    for _ in range(40):
        before = list(request.kv.local[0])
        plan = scheduler.schedule(now_ns=0)
        behind = [one for one, now in zip(before, request.kv.local[0], strict=False) if one and not now]
        assert set(behind) <= set(plan.zero_blocks)
        assert all(pool.owner(block) == CLEAN for block in behind if not pool.refs(block))
        zeroed += behind
        scheduler.commit(plan, runner.execute(plan))
    assert len(zeroed) >= 9
    assert pool.num_cached == 0


def test_what_a_broken_request_gave_back_is_not_found() -> None:
    """A row that fails makes all that it computed unfindable, blocks behind its window included; control: before that
    they are found."""
    scheduler, pool = make_scheduler(groups=TABLES, num_blocks=64, max_context=128)
    runner = SimulatedRunner(scheduler, BLOCK)
    scheduler.add(submit(1, list(range(1, 60)), 30), now_ns=0)
    run(scheduler, runner, 8)
    cache, probe = scheduler._planner._cache, runner_request(scheduler, list(range(1, 60)))
    assert cache.match(probe).num_tokens == 56
    assert pool.num_cached
    run(scheduler, runner, 1, token=FAILED)
    assert not scheduler.num_running
    assert (cache.match(probe).num_tokens, pool.num_cached) == (0, 0)
    assert {pool.owner(block) for block in range(1, 65)} <= {CLEAN, namespace(1)}


def test_windows_shorter_than_the_context_alone_make_tables() -> None:
    """A model that cannot outgrow its window keeps one table, as the compiled kernels read it."""
    model = model_of((Reach("window", 64), FULL))
    assert make_engine(model, max_context=64).scheduler.limits.groups == ()
    assert len(make_engine(model, max_context=65, num_blocks=128).scheduler.limits.groups) == 2
