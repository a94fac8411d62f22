"""Once an engine serves it takes neither memory of the device nor page-locked memory from the driver, whatever comes.

There is no GPU here: torch's allocator is a model of it (``shadow``), fed with every tensor that the engine's own code
takes outside of recordings, and copies go through the engine's own arena, with a queue that ends them late.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from numpy.typing import NDArray

from appliance.operator.calls.spill_host import SpillHost
from engine.backends.cuda.runtime.copying import ArenaCopies
from engine.backends.cuda.runtime.device_memory import ATTEMPTS, Resources, largest_plans, take_memory
from engine.backends.cuda.runtime.mixing import ALWAYS, NEVER, Mixing
from engine.backends.cuda.runtime.runner import MOST_AHEAD, DeviceRunner, sizes_of
from engine.core.engine import Engine
from engine.core.kv.layout import FULL, Reach
from engine.core.kv.leaving import SpillChannel
from engine.core.scheduler.limits import SCORED_ROWS, SchedulerLimits
from engine.core.scheduler.plan import StepPlan
from engine.errors import ConfigurationError
from engine.startup.warmup import warm_up
from isolation.ipc.logit_bias import MAX_LOGIT_BIASES
from isolation.ipc.messages import Role
from tests.engine.backends.cuda.runtime.late_side import LateSide
from tests.engine.backends.cuda.runtime.shadow import LateQueue, ShadowMemory, Watch
from tests.engine.backends.cuda.runtime.toy import (
    BLOCK,
    CONTEXT,
    CPU,
    ROWS,
    STAGED,
    VOCAB,
    Schedule,
    again,
    differs,
    draw_schedule,
    run_schedule,
    toy_engine,
)
from tests.isolation.ipc.wire import connect

pytestmark = pytest.mark.usefixtures("one_thread")

Upload = Callable[[NDArray[Any]], torch.Tensor]

BLOCK_BYTES = 2 * BLOCK * 8
"""Of the toy: a key and a value of a token, in float64."""

DIVISOR = 1 << 10
"""The toy's tensors are some thousand times smaller than a model's: up to 1 KiB they are small ones here."""

REACHES = ((FULL,), (FULL, Reach("window", 7), Reach("chunk", 6), Reach("window", 7)))


def limits_of(budget: int) -> SchedulerLimits:
    """As ``toy_engine`` has them."""
    return SchedulerLimits(
        max_num_seqs=ROWS,
        max_num_batched_tokens=budget,
        max_waiting=100,
        max_context=CONTEXT,
        block_size=BLOCK,
        vocab_size=VOCAB,
    )


class Grow:
    """Page-locked memory that is taken by need, as torch's cache takes it: pieces of powers of two, each used again
    when its copy is over."""

    def __init__(self) -> None:
        self._ends: dict[int, list[int]] = {}
        """By size, when the copy from each piece is over."""

    def around(self, upload: Upload, queue: LateQueue, memory: ShadowMemory) -> Upload:
        """Count what an upload would have taken."""

        def growing(values: NDArray[Any]) -> torch.Tensor:
            ends = self._ends.setdefault(max(0, int(values.nbytes) - 1).bit_length(), [])
            free = next((place for place, end in enumerate(ends) if queue.passed(end)), None)
            memory.host_taken += free is None
            found = upload(values)
            if free is not None:
                del ends[free]
            ends.append(queue.now())
            return found

        return growing


@dataclass(frozen=True, slots=True)
class Bench:
    """An engine and what watches it."""

    engine: Engine
    copies: ArenaCopies
    queue: LateQueue
    memory: ShadowMemory
    watch: Watch

    @property
    def runner(self) -> DeviceRunner:
        """Of the engine."""
        assert isinstance(self.engine.runner, DeviceRunner)
        return self.engine.runner


def bench(
    schedule: Schedule,
    seed: int,
    *,
    settles: bool = True,
    upload: Grow | None = None,
    side: LateSide | None = None,
    spill: SpillChannel | None = None,
    mixing: Mixing = NEVER,
    queue: LateQueue | None = None,
) -> Bench:
    """An engine that was warmed up, with a queue that is late. ``settles``: whether it takes memory beforehand;
    ``upload``: watches what goes to the device; ``side``, ``spill``: where copies of its blocks are made and go;
    ``mixing``: which rows join prompts."""
    queue, memory = queue or LateQueue(random.Random(seed)), ShadowMemory(DIVISOR)
    staged = () if spill is None else (BLOCK_BYTES,) * (2 * STAGED)
    sizes = replace(sizes_of(limits_of(schedule.budget), staged), stretch=1 << 14)
    place = torch.zeros(sizes.total, dtype=torch.uint8)
    copies = ArenaCopies(CPU, sizes, place, queue.fence, queue.carry)
    if upload is not None:
        copies.upload = upload.around(copies.upload, queue, memory)  # type: ignore[method-assign]
    resources = Resources(copies, memory if settles else None, side)
    engine = toy_engine(schedule, eager=False, most_ahead=MOST_AHEAD, mixing=mixing, resources=resources, spill=spill)
    watch = Watch(memory.allocator)
    replayer = engine.runner._launcher._replayer  # type: ignore[attr-defined]
    replayer.run = watch.unwatched(replayer.run)
    with watch:
        warm_up(engine)
    return Bench(engine, copies, queue, memory, watch)


def scored(schedule: Schedule, seed: int) -> Schedule:
    """The schedule with some requests that ask for their prompts' log-probabilities too."""
    draw = random.Random(seed)
    arrivals = {
        step: [replace(one, prompt_logprobs=draw.choice((-1, -1, 0, 20))) for one in some]
        for step, some in schedule.arrivals.items()
    }
    return replace(schedule, arrivals=arrivals)


@pytest.mark.parametrize("schedules", [1, pytest.param(250, marks=[pytest.mark.full, pytest.mark.timeout(3_600)])])
@pytest.mark.parametrize(
    "reaches",
    [pytest.param(REACHES[0], id="one table", marks=pytest.mark.full), pytest.param(REACHES[1], id="three tables")],
)
def test_nothing_is_taken_after_an_engine_is_ready(schedules: int, reaches: tuple[Reach, ...]) -> None:
    """Schedules of all sizes, with sampling, masks, penalties, log-probabilities of outputs and prompts, four steps
    ahead, and in every second one rows that join prompts: after the warm-up the model of torch's allocator asks the
    driver for nothing, every array goes to the device in one copy, no copy's bytes are written while it is under way,
    and the tokens are those of the plainest loop."""
    early = copies = 0
    for seed in range(schedules):
        schedule = scored(draw_schedule(seed, reaches), seed)
        made = bench(schedule, seed, mixing=NEVER if seed % 2 else ALWAYS)
        calls = counted(made)
        with made.watch:
            answers = run_schedule(made.engine, schedule)
        assert made.runner.num_taken == 0, seed
        assert not differs(schedule, answers), seed
        made.queue.advance(made.queue.now())
        assert made.queue.overwritten == 0
        assert calls.arrays == calls.copies(made) > 0
        early += made.runner.num_ahead
        copies += calls.arrays
    assert early > 20 * schedules and copies > 20 * schedules, "the schedules show nothing"


@dataclass(slots=True)
class Spilled:
    """What schedules with spill came to."""

    differing: int = 0
    taken: int = 0
    sent: int = 0
    restored: int = 0
    forgotten: int = 0
    joined: int = 0
    changed: int = 0
    """Blocks that were sent twice with different bytes, and copies whose host's side was written under way."""


def run_spilled(seed: int, found: Spilled, *, joins: bool = True) -> None:
    """A schedule whose prompts come again, with blocks that leave and come back and tenants that are forgotten."""
    draw = random.Random(seed + (1 << 34))
    schedule = again(scored(draw_schedule(seed), seed), seed)
    side, wire = LateSide(draw, joins=joins), connect(Role.SPILL)
    host = SpillHost(wire.host, seed)
    made = bench(schedule, seed, side=side, spill=wire.guest)
    tier, content = made.engine.spill, made.runner.content
    assert tier is not None and content is not None
    calls = counted(made)

    def between() -> None:
        host.serve()
        if not made.engine.has_work:
            made.engine.look()
        assert tier.num_leaving + len(content._out) == len(content._in) + len(content._writing) == STAGED
        for buffer in (*content._out, *content._in):
            assert not buffer.memory.numpy().any(), "a buffer that holds no block is not zero"
        tier.pool.check_integrity()

    with made.watch:
        answers = run_schedule(made.engine, schedule, between)
    assert calls.arrays == calls.copies(made) > 0
    found.differing += differs(schedule, answers)
    found.taken += made.runner.num_taken
    found.sent += tier.counts.sent
    found.restored += tier.counts.restored
    found.forgotten += host.forgotten
    found.joined += side.joined
    found.changed += host.changed + side.overwritten
    made.queue.advance(made.queue.now())
    assert made.queue.overwritten == 0
    wire.close()


@pytest.mark.full
@pytest.mark.parametrize("schedules", [1, pytest.param(500, marks=pytest.mark.timeout(3_600))])
def test_nothing_is_taken_while_blocks_leave_and_come_back(schedules: int) -> None:
    """Schedules as above, whose prompts come again when their blocks were sent away: nothing is asked of the driver,
    the tokens are those of the plainest loop, a block that leaves twice has the same bytes, and a buffer without a
    block is zero after every step, although copies end as late as their fences and joins allow and tenants are
    forgotten meanwhile."""
    found = Spilled()
    for seed in range(schedules):
        run_spilled(seed, found)
    print(f"{schedules} schedules: {found}")
    assert (found.differing, found.taken, found.changed) == (0, 0, 0)
    assert found.sent > 5 * schedules and found.joined > schedules
    assert schedules < 10 or (found.restored > schedules and found.forgotten > schedules // 4)


@pytest.mark.full
def test_without_joins_blocks_are_wrong() -> None:
    """Control: where steps do not wait for copies of blocks, tokens differ, or blocks that left have other bytes."""
    found = Spilled()
    for seed in range(2, 6):
        run_spilled(seed, found, joins=False)
        if found.differing + found.changed:
            return
    pytest.fail("no schedule noticed")


@dataclass(slots=True)
class Calls:
    """What was given to the arena since a moment."""

    before: int
    arrays: int = 0

    def copies(self, made: Bench) -> int:
        """Copies to the device since then."""
        return made.copies.num_copies - self.before


def counted(made: Bench) -> Calls:
    """Count the arrays that go to the device from here on, empty ones left out."""
    calls, upload = Calls(made.copies.num_copies), made.copies.upload

    def watched(values: NDArray[Any]) -> torch.Tensor:
        calls.arrays += bool(values.size)
        return upload(values)

    made.copies.upload = watched  # type: ignore[method-assign]
    made.runner._choices._upload = watched
    return calls


def test_without_the_largest_steps_memory_is_taken_later() -> None:
    """Control: where only the warm-up's own steps were run, and nothing was taken in one piece, some schedule asks the
    driver; and page-locked memory that is taken by need, in sizes of powers of two as torch's cache has them, is taken
    after the warm-up too."""
    taken = grown = 0
    for seed in range(2):
        schedule = scored(draw_schedule(seed), seed)
        made = bench(schedule, seed, settles=False, upload=Grow())
        taken -= made.memory.allocator.num_taken
        grown -= made.memory.host_taken
        with made.watch:
            run_schedule(made.engine, schedule)
        taken += made.memory.allocator.num_taken
        grown += made.memory.host_taken
        if taken and grown:
            return
    pytest.fail(f"the driver was asked for {taken} segments and {grown} page-locked pieces")


def test_a_largest_step_needs_no_more_the_second_time() -> None:
    """What is kept is enough for steps that need the same each time. Control: of one that needs twice as much each
    time the caller is told, after so many attempts as there are."""
    for grows in (False, True):
        memory, runs = ShadowMemory(1), []

        def run(memory: ShadowMemory = memory, runs: list[None] = runs, grows: bool = grows) -> None:
            runs.append(None)
            sizes = (100, 3 << 20, (8 << 20) << (len(runs) if grows else 1))
            for piece in [memory.allocator.take(size) for size in sizes]:
                memory.allocator.release(piece)

        assert (take_memory(memory, run) > 0) == grows
        assert len(runs) == 2 + (ATTEMPTS if grows else 1)


def test_a_card_without_room_ends_the_start() -> None:
    """Where the largest step finds no memory, the start ends with an error that says what to lower."""

    def run() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(ConfigurationError, match="no room for the largest step.*lower max_num_batched_tokens"):
        take_memory(ShadowMemory(1), run)


def test_the_model_of_the_allocator_splits_and_joins() -> None:
    """Worked out by hand: small ones share a segment of 2 MiB, what is freed is put together, the best fit is taken,
    and what nobody holds can be given back."""
    made = ShadowMemory(1).allocator
    mib = 1 << 20
    small = [made.take(mib) for _ in range(4)]
    assert made.num_taken == 2
    large = [made.take(size) for size in (5 * mib, 5 * mib, 9 * mib)]
    assert made.num_taken == 3 and {one.segment for one in large} == {3}
    made.release(large[1])
    assert made.take(5 * mib).begin == 5 * mib and made.num_taken == 3
    made.take(21 * mib)
    assert made.num_taken == 4
    for piece in small:
        made.release(piece)
    made.give_back()
    made.take(1)
    assert made.num_taken == 5 and made.held[False] == 512


def rows_and_tokens(plan: StepPlan) -> tuple[int, int, int]:
    """How much a plan asks for."""
    lines = sum(chunk.last for chunk in plan.prefills) + sum(chunk.num_scored for chunk in plan.prefills)
    return len(plan.prefills), sum(chunk.length for chunk in plan.prefills), lines


def test_no_plan_is_larger_than_the_largest() -> None:
    """Over drawn limits: the plans keep them, and have all tokens, all rows and all lines of logits that a step can
    have, masks, biases and penalties of all rows, and no step behind them."""
    draw = random.Random(8)
    for _ in range(200):
        limits = SchedulerLimits(
            max_num_seqs=draw.randint(1, 40),
            max_num_batched_tokens=draw.randint(40, 900),
            max_waiting=1,
            max_context=draw.randint(30, 600),
            block_size=4,
            vocab_size=draw.choice((20, 700)),
        )
        rows = min(limits.max_num_seqs, limits.max_num_batched_tokens)
        plans = largest_plans(limits, 9)
        assert plans
        for plan in plans:
            count, tokens, lines = rows_and_tokens(plan)
            assert count <= rows and tokens <= limits.max_num_batched_tokens and lines <= limits.max_logit_lines
            assert tokens == min(limits.max_num_batched_tokens, count * (limits.max_context - 1))
            assert set(plan.masks) == {one.row for one in plan.admissions} and plan.zero_blocks == [*range(1, 10)]
            for one, chunk in zip(plan.admissions, plan.prefills, strict=True):
                assert len(one.token_ids) == chunk.length < limits.max_context and one.limit == chunk.length + 1
                assert one.logit_bias is not None
                assert len(one.logit_bias) == min(MAX_LOGIT_BIASES, limits.vocab_size)
                assert one.sampling.repetition_penalty != 1
        count, tokens, lines = rows_and_tokens(plans[-1])
        assert count == rows and lines == rows + min(SCORED_ROWS, tokens - rows)


def test_an_engine_is_as_before_when_its_memory_was_taken() -> None:
    """After the largest steps KV, counts, masks and rows hold nothing. Control: right after them they do."""
    schedule = draw_schedule(0)
    made = bench(schedule, 0)
    choices = made.runner._choices
    state = (*made.runner.storage.memory, choices.counts, choices.masks, choices.biases)
    assert not any(one.any() for one in state)
    with torch.inference_mode():
        made.runner.execute(largest_plans(made.runner.limits, 1)[-1])
        assert all(one.any() for one in state)
        made.runner.touch()
    assert not any(one.any() for one in state)
